"""The embedded sampler: its logprobs are its version's, and no request harms another."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from local_gpu.sample import embedded
from local_gpu.sample.cached import Row, hidden
from local_gpu.sample.embedded import Engine, EngineSize, LocalSampler
from local_gpu.sample.routing import RecentPrompts
from local_gpu.trainer import LocalTrainer
from tests.local_gpu.prompts import prompt, sampled
from tests.support.backends import VOCABULARY, held_requests, start_local
from tests.support.inference_servers import tiny_base
from tests.support.pools import Trainer, facts_of
from tests.support.waits import eventually
from tinker_claw.errors import SamplerError
from tinker_claw.types import Adam, Completion, Datum, LossPass, SamplingParams


@pytest.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[LocalTrainer]:
    trainer = await start_local(tmp_path)
    yield trainer
    await trainer.aclose()


async def distance(sampler: LocalSampler, tokens: tuple[int, ...], drawn: Completion) -> float:
    """Largest difference between the sampler's logprobs and those of its version, in nats."""
    scored = await sampler.logprobs((*tokens, *drawn.tokens), start=len(tokens))
    return max(abs(a - b) for a, b in zip(scored.logprobs, drawn.logprobs, strict=True))


async def learn(trainer: LocalTrainer, tokens: tuple[int, ...]) -> None:
    rows = len(tokens) - 5
    datum = Datum(tokens, 5, logprobs=(-4.0,) * rows, advantages=(0.1,) * rows)
    await trainer.train_step([LossPass("ppo", (datum,))], Adam(0.01))


def base_logits(folder: Path, tokens: tuple[int, ...], drawn: Completion) -> torch.Tensor:
    """Full logits of the base model, by transformers' own eager attention."""
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([tokens + drawn.tokens])).logits[0, len(tokens) - 1 : -1]


# Whose logprobs


async def test_logprobs_and_candidates_are_the_base_models(
    trainer: LocalTrainer, tmp_path: Path
) -> None:
    tokens, base = prompt(70), await trainer.base()
    for temperature in (0.0, 0.5, 1.0):  # candidates are told at 1 whatever is drawn
        drawn = await sampled(base, tokens, temperature=temperature, student_topk=5)
        rows = base_logits(tmp_path, tokens, drawn).log_softmax(-1)
        top = rows.topk(5)
        assert [list(row) for row in drawn.topk_ids] == top.indices.tolist()
        told = torch.tensor(drawn.topk_logprobs)
        torch.testing.assert_close(told, top.values, atol=1e-4, rtol=0)
    expected = rows.gather(1, torch.tensor(drawn.tokens)[:, None])[:, 0].tolist()
    assert drawn.logprobs == pytest.approx(expected, abs=1e-4)


async def test_logprobs_are_those_of_the_shaped_distribution(
    trainer: LocalTrainer, tmp_path: Path
) -> None:
    tokens, base = prompt(40), await trainer.base()
    drawn = await sampled(base, tokens, temperature=0.7, top_p=0.8, top_k=20, max_tokens=30)
    logits = base_logits(tmp_path, tokens, drawn)
    for row, token, logprob in zip(logits, drawn.tokens, drawn.logprobs, strict=True):
        # By hand: temper, keep the 20 likeliest, then the fewest that reach 0.8; renormalise.
        order = row.argsort(descending=True)[:20]
        mass = (row[order] / 0.7).softmax(0)
        kept = int((mass.cumsum(0) < 0.8).sum()) + 1
        place = order.tolist().index(token)
        assert place < kept
        assert logprob == pytest.approx((mass[place] / mass[:kept].sum()).log().item(), abs=1e-4)


async def test_a_request_in_flight_keeps_its_version(trainer: LocalTrainer) -> None:
    tokens = prompt(60)
    old = await trainer.publish()
    params = SamplingParams(max_tokens=120, seed=1)
    async with aclosing(old.stream(tokens, params)) as stream:
        chunks = [await anext(stream) for _ in range(10)]
        await learn(trainer, tokens)
        new = await trainer.publish()
        fresh = await sampled(new, tokens, max_tokens=60)
        chunks += [chunk async for chunk in stream]
    drawn = Completion.collect(chunks, params)
    assert await distance(old, tokens, drawn) < 1e-4
    assert await distance(new, tokens, fresh) < 1e-4
    assert await distance(new, tokens, drawn) > 0.1


# Prefixes, seeds, many at once


async def test_a_shared_prefix_is_not_computed_again_and_changes_no_logprob(
    trainer: LocalTrainer,
) -> None:
    sampler, tokens = await trainer.publish(), prompt(200)
    first, *others = await sampler.sample(tokens, SamplingParams(max_tokens=60, seed=4), n=3)
    assert [c.cached_tokens for c in (first, *others)] == [0, 199, 199], "a prompt's last is not"
    longer = (*tokens, *first.tokens, *prompt(25, salt=7))
    second = await sampled(sampler, longer, max_tokens=30)
    assert second.cached_tokens == 259, "all whose keys were computed"
    assert await distance(sampler, longer, second) < 1e-4


@pytest.mark.slow
async def test_a_reply_is_a_prefix_under_its_own_salt_only(trainer: LocalTrainer) -> None:
    """Of prompts the contract says so."""
    sampler, tokens = await trainer.publish(), prompt(200)
    for salt in (None, "anna", "ben"):
        drawn = await sampled(sampler, tokens, max_tokens=90, cache_salt=salt)
        assert drawn.cached_tokens == 0
    drawn = await sampled(sampler, tokens, max_tokens=90, cache_salt="anna", seed=8)
    further = (*tokens, *drawn.tokens, *prompt(9, salt=5))
    for salt in ("ben", "anna", None):
        next_turn = await sampled(sampler, further, max_tokens=2, cache_salt=salt)
        assert next_turn.cached_tokens >= 200
        assert (next_turn.cached_tokens == 289) == (salt == "anna")
        assert await distance(sampler, further, next_turn) < 1e-4


async def test_a_forgotten_prompt_is_computed_for_no_new_version(trainer: LocalTrainer) -> None:
    sampler, words, cached = await trainer.publish(), prompt(300), list[int]()
    for forgets in (False, True):
        async with aclosing(sampler.stream(words, SamplingParams(max_tokens=2))) as stream:
            assert [chunk async for chunk in stream]
        if forgets:
            trainer.forget()
        sampler = await trainer.publish()
        cached.append((await sampled(sampler, words, max_tokens=2)).cached_tokens)
    assert cached[0] >= 224
    assert cached[1] == 0


def engine(**sizes: int) -> Engine:
    """An engine over a tiny model whose cache holds one context."""
    size = {"context_tokens": 320, "kv_cache_tokens": 320, **sizes}
    return Engine(tiny_base().module, EngineSize(VOCABULARY, **size))


async def test_more_requests_than_the_cache_holds_are_all_served_exactly(tmp_path: Path) -> None:
    small, base = engine(), tiny_base()
    sampler = LocalSampler(
        "base", small, facts_of(base), Trainer(base, tmp_path).score, RecentPrompts(), id
    )
    prompts = [prompt(90 + i, salt=i) for i in range(8)]
    drawn = await asyncio.gather(*(sampled(sampler, p, max_tokens=100) for p in prompts))
    for tokens, completion in zip(prompts, drawn, strict=True):
        assert len(completion.tokens) == 100
        assert await distance(sampler, tokens, completion) < 1e-4
    # The whole cache for one request, after others have left their rows in it.
    full = prompt(300, salt=9)
    assert await distance(sampler, full, await sampled(sampler, full)) < 1e-4


async def test_a_short_prompt_passes_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    small = engine(context_tokens=2048, kv_cache_tokens=3072, max_batch_tokens=32)
    order: list[str] = []
    both = threading.Event()

    def waits(*arguments: Any) -> torch.Tensor:
        both.wait(60)
        return hidden(*arguments)

    monkeypatch.setattr(embedded, "hidden", waits)

    async def first_token(name: str, tokens: tuple[int, ...]) -> None:
        async with aclosing(small.stream(tokens, SamplingParams(max_tokens=2))) as stream:
            await anext(stream)
            order.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(first_token("long", prompt(1900)))
        await asyncio.sleep(0)
        group.create_task(first_token("short", prompt(10, salt=3)))
        await asyncio.sleep(0)
        both.set()
    assert order == ["short", "long"]


# Ends and failures


async def quiet(sampler: LocalSampler) -> None:
    await eventually(lambda: not held_requests(sampler))


async def test_an_abandoned_request_frees_its_cache(trainer: LocalTrainer) -> None:
    sampler, tokens = await trainer.publish(), prompt(60)
    async with asyncio.TaskGroup() as group:
        kept = group.create_task(sampled(sampler, tokens, max_tokens=100))
        stream = sampler.stream(prompt(40, 2), SamplingParams(max_tokens=1500))
        async with aclosing(stream):
            await anext(stream)
        task = group.create_task(
            sampler.sample(prompt(40, 3), SamplingParams(max_tokens=1500), n=3)
        )
        await asyncio.sleep(0.1)
        task.cancel()
    assert task.cancelled()
    await quiet(sampler)
    assert len(kept.result().tokens) == 100
    for text, drawn in (
        (tokens, kept.result()),
        ((*tokens, 5), await sampled(sampler, (*tokens, 5))),
    ):
        assert await distance(sampler, text, drawn) < 1e-4


async def test_a_failing_forward_pass_fails_its_requests_and_the_next_one_is_served(
    trainer: LocalTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = await trainer.publish()

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory, say")

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "hidden", fail)
        results = await asyncio.gather(
            *(sampled(sampler, prompt(40, salt=i)) for i in range(3)), return_exceptions=True
        )
    assert [type(r) for r in results] == [SamplerError] * 3
    assert all("out of memory, say" in str(r) for r in results)
    assert await distance(sampler, prompt(40), await sampled(sampler, prompt(40))) < 1e-4


async def test_closing_frees_the_cache_without_a_garbage_collection(
    trainer: LocalTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[weakref.ref[Row]] = []

    class Watched(Row):
        def __init__(self) -> None:
            super().__init__()
            rows.append(weakref.ref(self))

    monkeypatch.setattr(embedded, "Row", Watched)
    sampler = await trainer.publish()
    await sampled(sampler, prompt(40))
    await quiet(sampler)
    gc.disable()
    try:
        assert any(row() for row in rows)
        await sampler.aclose()
        assert not any(row() for row in rows)
        await sampled(sampler, prompt(40))  # a late request leaves nothing, either
        await quiet(sampler)
        assert not any(row() for row in rows)
    finally:
        gc.enable()
