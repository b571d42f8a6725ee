"""People go first: in the sampler's passes, in its cache, and beside other computations here."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from backends import start_local
from test_embedded import distance, one, prompt

from local_gpu.room import Breaks, Room
from local_gpu.sample.embedded import LocalSampler
from tinker_claw.types import Adam, Completion, Datum, LossPass, SamplingParams, TokenChunk

ROW_S = 0.02
Order = list[str]
"""Owners of tokens, in order of arrival."""


@asynccontextmanager
async def base_sampler(folder: Path, **settings: Any) -> AsyncGenerator[LocalSampler]:
    trainer = await start_local(folder, **settings)
    yield cast(LocalSampler, await trainer.base())
    await trainer.aclose()


@contextmanager
def passes(sampler: LocalSampler, told: Callable[[int], object]) -> Generator[None]:
    """Call `told` with the rows of each forward pass before it is computed."""
    module: Any = sampler._engine._module  # pyright: ignore[reportPrivateUsage]

    def before(_: object, __: object, inputs: Mapping[str, Any]) -> None:
        told(inputs["input_ids"].shape[-1])

    hook = module.register_forward_pre_hook(before, with_kwargs=True)
    yield
    hook.remove()


async def drawn(
    sampler: LocalSampler, name: str, tokens: tuple[int, ...], order: Order, **params: Any
) -> Completion:
    settings: dict[str, Any] = {"seed": 4, "person": name == "person"} | params
    asked, chunks = SamplingParams(**settings), list[TokenChunk]()
    async with aclosing(sampler.stream(tokens, asked)) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            order.append(name)
    return Completion.collect(chunks, asked)


async def come(order: Order, count: int) -> None:
    """Wait for this many tokens."""
    while len(order) < count:  # noqa: ASYNC110 - a list tells nobody
        await asyncio.sleep(0.001)


async def test_a_person_is_served_before_episodes_that_wait(tmp_path: Path) -> None:
    order, asked = Order(), threading.Event()
    async with base_sampler(tmp_path, max_batch_tokens=32) as sampler:
        with passes(sampler, lambda _: asked.wait(60)):
            async with asyncio.TaskGroup() as group:
                for n in range(8):
                    tokens = prompt(30, salt=n)
                    group.create_task(drawn(sampler, f"try {n}", tokens, order, max_tokens=2))
                await asyncio.sleep(0)
                group.create_task(drawn(sampler, "person", prompt(60), order, max_tokens=2))
                await asyncio.sleep(0)
                asked.set()
    assert order.index("person") <= 1, "at most the pass that ran already goes before"


@pytest.mark.slow
async def test_episodes_pause_for_a_person_and_draw_what_they_would_have_drawn(
    tmp_path: Path,
) -> None:
    order = Order()
    prompts = [prompt(5 + n, salt=n) for n in range(8)]
    async with base_sampler(tmp_path) as sampler:
        alone = [await one(sampler, tokens, max_tokens=24) for tokens in prompts]
        with passes(sampler, lambda rows: time.sleep(ROW_S * rows)):
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(drawn(sampler, "try", tokens, order, max_tokens=24))
                    for tokens in prompts
                ]
                await come(order, 24)
                group.create_task(drawn(sampler, "person", prompt(9, 11), order, max_tokens=12))
        for tokens, task, before in zip(prompts, tasks, alone, strict=True):
            assert task.result().tokens == before.tokens
            assert await distance(sampler, tokens, task.result()) < 1e-4
    first, last = order.index("person"), len(order) - order[::-1].index("person")
    between = order[first:last].count("try")
    # Rows cost alike, so that half of the time is worth about as many tokens as the person has.
    assert between < 4 * 12, "and not one of each of the eight for every token of the person"


@pytest.mark.slow
async def test_a_pass_of_a_person_that_once_takes_long_does_not_let_episodes_take_part_for_ever(
    tmp_path: Path,
) -> None:
    order, slow = Order(), [1.0]

    def told(rows: int) -> None:
        time.sleep(slow.pop() if rows == 1 and slow else ROW_S * rows)

    async with base_sampler(tmp_path) as sampler:
        with passes(sampler, told):
            tries = [
                asyncio.create_task(drawn(sampler, "try", prompt(5 + n, n), order, max_tokens=90))
                for n in range(8)
            ]
            await come(order, 24)
            await drawn(sampler, "person", prompt(9, 11), order, max_tokens=30)
            for task in tries:
                task.cancel()
            await asyncio.wait(tries)
    assert slow == []
    first, last = order.index("person"), len(order) - order[::-1].index("person")
    assert order[first:last].count("try") < 6 * 30, "and not eight for each token"


@pytest.mark.slow
async def test_a_person_who_was_alone_for_long_owes_episodes_nothing(tmp_path: Path) -> None:
    order = Order()
    async with base_sampler(tmp_path) as sampler:
        with passes(sampler, lambda rows: time.sleep(ROW_S * rows)):
            person = asyncio.create_task(
                drawn(sampler, "person", prompt(9, 11), order, max_tokens=240)
            )
            await come(order, 200)
            tries = [
                asyncio.create_task(drawn(sampler, "try", prompt(5 + n, n), order, max_tokens=90))
                for n in range(8)
            ]
            await person
            for task in tries:
                task.cancel()
            await asyncio.wait(tries)
    last = len(order) - order[::-1].index("person")
    assert order[:last].count("try") < 4 * 40


async def test_an_episode_goes_on_while_a_person_is_served(tmp_path: Path) -> None:
    order = Order()
    async with base_sampler(tmp_path) as sampler, asyncio.TaskGroup() as group:
        group.create_task(drawn(sampler, "person", prompt(9), order, max_tokens=600))
        await come(order, 1)
        await drawn(sampler, "try", prompt(40), order, max_tokens=5)
        assert order.count("person") < 600


async def test_a_person_takes_the_cache_of_an_episode_which_goes_on_as_it_would_have(
    tmp_path: Path,
) -> None:
    order = Order()
    prompts = [prompt(90 + n, salt=n) for n in range(3)]
    async with base_sampler(tmp_path, kv_cache_tokens=384) as sampler:
        alone = [await one(sampler, tokens, max_tokens=100) for tokens in prompts]
        with passes(sampler, lambda _: time.sleep(ROW_S / 4)):
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(drawn(sampler, "try", tokens, order, max_tokens=100))
                    for tokens in prompts
                ]
                await come(order, 60)
                tokens = prompt(150, 11)
                person = group.create_task(drawn(sampler, "person", tokens, order, max_tokens=10))
                await person
                assert not any(task.done() for task in tasks)
        assert await distance(sampler, tokens, person.result()) < 1e-4
        for tokens, task, before in zip(prompts, tasks, alone, strict=True):
            assert task.result().tokens == before.tokens
            assert await distance(sampler, tokens, task.result()) < 1e-4


async def test_a_version_has_computed_what_prompts_share_before_it_serves(tmp_path: Path) -> None:
    trainer = await start_local(tmp_path)
    shared = prompt(300)
    version = cast(LocalSampler, await trainer.publish())
    for own in (1, 2):
        asked = (*shared, *prompt(30, own))
        await drawn(version, "person", asked, Order(), max_tokens=1, cache_salt="anna")
    version = cast(LocalSampler, await trainer.publish())
    assert (await one(version, (*shared, 5), cache_salt="anna")).cached_tokens >= 256
    assert (await one(version, (*shared, 5), cache_salt="ben")).cached_tokens == 0
    await trainer.aclose()


def test_samplers_compute_one_pass_at_a_time_and_persons_have_as_long_as_others() -> None:
    room, turns = Room(), list[str]()

    def turn(whose: str, others_s: float) -> threading.Thread:
        def compute() -> None:
            room.take_turn(whose)
            turns.append(whose)
            room.end_turn(others_s)

        thread = threading.Thread(target=compute)
        thread.start()
        return thread

    turn("old", 3600).join(30)
    turn("old", 3600).join(30)  # nobody is served: it waits for nobody
    room.enter("a reply", "new")
    turn("new", 0).join(30)
    waits = turn("old", 0)
    waits.join(0.2)
    turn("new", 0).join(30)
    assert turns == ["old", "old", "new", "new"]
    room.leave("a reply")
    waits.join(30)
    room.enter("another", "new")
    room.take_turn("new")
    waits = turn("new", 0)
    waits.join(0.2)
    assert turns == ["old", "old", "new", "new", "old"], "a pass is computed already"
    room.end_turn(0)
    waits.join(30)
    assert turns[-1] == "new"


def test_no_sampler_computes_twice_while_another_waits() -> None:
    room, turns = Room(), list[str]()
    room.take_turn("first")

    def compute(whose: str) -> None:
        for _ in range(20):
            room.take_turn(whose)
            turns.append(whose)
            room.end_turn(0)

    threads = [threading.Thread(target=compute, args=(whose,)) for whose in "ab"]
    for thread in threads:
        thread.start()
        while len(room._queue) < threads.index(thread) + 1:  # pyright: ignore[reportPrivateUsage]
            time.sleep(0.001)
    room.end_turn(0)
    for thread in threads:
        thread.join(30)
    assert turns[:2] == ["a", "b"]


def test_others_go_on_beside_persons_when_they_have_waited_as_long_as_they_computed() -> None:
    room = Room()
    room.enter("a reply", "new")
    began = time.monotonic()
    for _ in range(3):
        room.take_turn("old")
        room.end_turn(0.05)
    assert time.monotonic() - began >= 2 * 0.05


def test_learning_pauses_until_a_person_has_a_token_but_never_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room, done = Room(), list[str]()

    def learn() -> None:
        with Breaks(room):
            time.sleep(0.1)
            torch.zeros(1)
        done.append("learned")

    room.enter("a reply", "b")
    learn()  # nobody answers, and it goes on all the same
    monkeypatch.setattr("local_gpu.room.LONGER", 600.0)
    learning = threading.Thread(target=learn)
    learning.start()
    learning.join(0.5)
    done.append("begun")
    room.begin("a reply")
    learning.join(30)
    assert done == ["learned", "begun", "learned"]


async def test_a_step_beside_persons_gives_the_same_weights(tmp_path: Path) -> None:
    tokens = prompt(60)
    datum = Datum(tokens, 5, logprobs=(-4.0,) * 55, advantages=(0.1,) * 55)
    weights = list[dict[str, torch.Tensor]]()
    for persons in (False, True):
        trainer = await start_local(tmp_path / str(persons))
        backend = trainer._backend  # pyright: ignore[reportPrivateUsage]
        if persons:
            backend._room.enter("a reply", "b")  # pyright: ignore[reportPrivateUsage]
        await trainer.train_step([LossPass("ppo", (datum,))], Adam(0.01))
        learning: Any = backend.learning
        weights.append(learning._model("policy").adapter())
        await trainer.aclose()
    alone, beside = weights
    assert all(torch.equal(alone[name], beside[name]) for name in alone)
