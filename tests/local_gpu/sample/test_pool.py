"""Versions over several servers: each answers as itself, and none is unloaded while in use."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from local_gpu.config import LocalConfig
from local_gpu.model.files import write_adapter
from local_gpu.model.load import load_base
from local_gpu.model.lora import fresh_adapter
from local_gpu.sample.member import PoolOptions
from local_gpu.sample.sampler import PoolSampler
from local_gpu.trainer import LocalTrainer
from tests.support.backends import CONTEXT, VOCABULARY, tiny_model
from tests.support.inference_servers import MODEL, inference_servers
from tests.support.pools import FAST, SHAPE, Site, site
from tests.support.waits import eventually
from tinker_claw.errors import (
    BackendError,
    ContextLengthError,
    GoneError,
    OutageError,
    RequestError,
    SamplerError,
)
from tinker_claw.policy import Sampler
from tinker_claw.retry import Backoff
from tinker_claw.types import Adam, Completion, Datum, LossPass, SamplingParams


def prompt(length: int, salt: int = 1) -> tuple[int, ...]:
    return tuple((salt * 29 + i * i * 3 + i * salt) % VOCABULARY for i in range(length))


async def one(sampler: Sampler, tokens: tuple[int, ...], **params: Any) -> Completion:
    settings: dict[str, Any] = {"max_tokens": 12, "seed": 4} | params
    return (await sampler.sample(tokens, SamplingParams(**settings)))[0]


def asked(place: Site, model: str) -> list[int]:
    """Number of requests that each server has had under a name."""
    return [sum(name == model for name, _ in server.log.prompts) for server in place.servers]


@pytest.mark.slow
async def test_each_version_answers_with_its_own_weights_on_every_server(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        samplers = {ref: await place.publish(ref) for ref in ("v1", "v2")}
        samplers["base"] = await place.pool.base()
        for ref, sampler in samplers.items():
            assert isinstance(sampler, Sampler)
            assert sampler.ref == ref
            for salt in range(4):  # short ones spread over both servers
                tokens = prompt(40, salt)
                drawn = await one(sampler, tokens)
                assert place.errors(ref, tokens, drawn) < 1e-4
                assert all(place.errors(r, tokens, drawn) > 0.05 for r in samplers if r != ref)
        assert min(asked(place, "v1") + asked(place, "v2") + asked(place, MODEL)) > 0
        assert place.pool.live() == {"v1", "v2"}
        assert all("v2" in server.adapters for server in place.servers)


async def test_a_reply_in_flight_ends_on_its_version_which_waits_for_it(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        old, tokens = await place.publish("v1"), prompt(60)
        params = SamplingParams(max_tokens=80, seed=1)
        async with aclosing(old.stream(tokens, params)) as stream:
            chunks = [await anext(stream) for _ in range(5)]
            new = await place.publish("v2")
            await old.aclose()
            await asyncio.gather(*(one(new, prompt(40, salt)) for salt in range(4)))
            assert place.pool.live() == {"v1", "v2"}  # its folder stays, too
            chunks += [chunk async for chunk in stream]
        drawn = Completion.collect(chunks, params)
        assert len(drawn.tokens) == 80
        assert place.errors("v1", tokens, drawn) < 1e-4
        await eventually(lambda: all("v1" not in s.adapters for s in place.servers))
        assert place.pool.live() == {"v2"}
        assert [s.log.most_running["v1"] for s in place.servers] == [0, 0]


@pytest.mark.slow
async def test_nothing_fails_while_versions_are_published_under_load(tmp_path: Path) -> None:
    async with site(tmp_path, 3) as place:
        current: list[PoolSampler] = [await place.publish("v0")]
        drawn: list[tuple[str, tuple[int, ...], Completion]] = []
        ended = asyncio.Event()

        async def talk(salt: int) -> None:
            """Turns of a conversation, each under the version that serves when it begins."""
            tokens, turns = prompt(60 + 7 * salt, salt), 0
            while not ended.is_set() or turns < 2:
                sampler, params = current[0], SamplingParams(max_tokens=6)
                async with aclosing(sampler.stream(tokens, params)) as stream:
                    reply = Completion.collect([chunk async for chunk in stream], params)
                drawn.append((sampler.ref, tokens, reply))
                turns += 1
                tokens = (*tokens, *reply.tokens, salt)[-300:]

        async with asyncio.TaskGroup() as group:
            for salt in range(8):
                group.create_task(talk(salt))
            for number in range(1, 4):
                replaced, current[0] = current[0], await place.publish(f"v{number}")
                await replaced.aclose()
            await eventually(lambda: any(ref == "v3" for ref, _, _ in drawn))
            ended.set()
        await eventually(lambda: all(set(s.adapters) == {"v3"} for s in place.servers))
        assert {ref for ref, _, _ in drawn} >= {"v0", "v3"}
        assert max(place.errors(*reply) for reply in drawn[:: max(1, len(drawn) // 30)]) < 1e-4
        for server in place.servers:
            assert [c for c in server.log.changes if c[0] == "late"] == []
            assert set(server.log.most_running.values()) == {0}
            assert server.log.aborted == 0


async def test_two_samplers_of_one_version_do_not_unload_under_one_another(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        serving, folder = await place.publish("v1"), tmp_path / "v1"
        by_name = await place.pool.open("v1", folder)
        loads = [list(s.log.changes) for s in place.servers]
        assert loads == [[("load", "v1")]] * 2
        await by_name.aclose()
        await by_name.aclose()
        other = await place.publish("v2")  # gives the servers time to do something wrong
        await other.aclose()
        await eventually(lambda: all(("unload", "v2") in s.log.changes for s in place.servers))
        assert all("v1" in s.adapters for s in place.servers)
        assert place.errors("v1", prompt(30), await one(serving, prompt(30))) < 1e-4
        await serving.aclose()
        await eventually(lambda: all("v1" not in s.adapters for s in place.servers))


async def test_a_request_after_closing_is_served_and_lets_the_adapter_go_again(
    tmp_path: Path,
) -> None:
    async with site(tmp_path) as place:
        sampler = await place.publish("v1")
        await sampler.aclose()
        await eventually(lambda: not any(s.adapters for s in place.servers))
        late = await asyncio.gather(*(one(sampler, prompt(30, salt)) for salt in range(4)))
        for salt, drawn in enumerate(late):
            assert place.errors("v1", prompt(30, salt), drawn) < 1e-4
        await eventually(lambda: not any(s.adapters for s in place.servers))
        assert place.pool.live() == frozenset()


async def test_a_reply_that_nobody_wants_any_more_ends_at_the_server(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        sampler = await place.publish("v1")
        async with aclosing(sampler.stream(prompt(40), SamplingParams(max_tokens=1500))) as stream:
            await anext(stream)
        await eventually(lambda: sum(s.log.aborted for s in place.servers) == 1)
        assert sum(s.log.running for s in place.servers) == 0
        async with asyncio.TaskGroup() as group:
            task = group.create_task(one(sampler, prompt(40), max_tokens=1500))
            await eventually(lambda: sum(s.log.running for s in place.servers) == 1)
            task.cancel()
        await eventually(lambda: sum(s.log.aborted for s in place.servers) == 2)


@pytest.mark.slow
async def test_recent_prompts_are_computed_everywhere_before_a_version_serves(
    tmp_path: Path,
) -> None:
    async with site(tmp_path, 3) as place:
        first, system = await place.publish("v1"), prompt(600, salt=5)
        for salt in range(2):
            await one(first, (*system, *prompt(50, salt)))
        second = await place.publish("v2")
        for server in place.servers:
            assert ("v2", system[:512]) in server.log.warmed
        drawn = await asyncio.gather(
            *(one(second, (*system, *prompt(50, salt))) for salt in range(6, 12))
        )
        # Whole pages that the engine has gone past, as it cut its passes; else there are none.
        assert min(completion.cached_tokens for completion in drawn) >= 256
        assert min(asked(place, "v2")) > 0


async def test_a_forgotten_prompt_is_sent_with_no_new_version(tmp_path: Path) -> None:
    async with site(tmp_path, 1) as place:
        await one(await place.publish("v1"), said := prompt(600, salt=5))
        place.pool.forget()
        await place.publish("v2")
        (server,) = place.servers
        assert not any(tokens[:9] == said[:9] for name, tokens in server.log.warmed if name == "v2")


async def test_prefixes_are_computed_beforehand_and_used_by_salt(tmp_path: Path) -> None:
    async with site(tmp_path, 2) as place:
        first, system = await place.publish("v1"), prompt(1100, salt=5)
        for n in range(2):
            await one(first, (*system, *prompt(50, n)), cache_salt="anna")
        second = await place.publish("v2")
        for server in place.servers:
            assert server.log.salts["v2", system[:1024]] == {"anna"}
        asked = (*system, *prompt(50, 8))
        stranger = await one(second, asked, max_tokens=2, cache_salt="ben")
        assert stranger.cached_tokens == 0
        # All but the last pass, of which the engine keeps nothing where one token ends a request.
        assert (await one(second, asked, max_tokens=2, cache_salt="anna")).cached_tokens >= 512


@pytest.mark.slow
async def test_a_conversation_is_computed_for_a_new_version_where_it_goes_on(
    tmp_path: Path,
) -> None:
    async with site(tmp_path, 3) as place:
        old, system = await place.publish("v1"), prompt(600, salt=5)
        talks = [(*system, *prompt(200, salt)) for salt in range(6)]
        for salt in range(2):
            asking = (one(old, (*tokens, *prompt(9, salt)), max_tokens=4) for tokens in talks)
            await asyncio.gather(*asking)
        new, wholes = await place.publish("v2"), {tokens[:768] for tokens in talks}
        there = {s.url: {t[:768] for n, t in s.log.prompts if n == "v1"} for s in place.servers}
        for server in place.servers:
            computed = {tokens for name, tokens in server.log.warmed if name == "v2"}
            assert len(there[server.url]) == 2
            assert computed & wholes == there[server.url]
        for tokens in talks:
            await one(new, tokens, max_tokens=4)
        for server in place.servers:
            assert {t[:768] for n, t in server.log.prompts if n == "v2"} == there[server.url]


async def test_no_prefix_is_computed_where_none_is_wanted(tmp_path: Path) -> None:
    options = PoolOptions(warm_prefixes=0, look_s=600)
    async with site(tmp_path, options=options) as place:
        sampler, system = await place.publish("v1"), prompt(600, salt=5)
        for salt in range(2):
            await one(sampler, (*system, *prompt(50, salt)))
        await place.publish("v2")
        assert all(("v2", system[:512]) not in s.log.warmed for s in place.servers)


@pytest.mark.slow
async def test_warming_ends_in_time(tmp_path: Path) -> None:
    options = PoolOptions(warm_s=0.5, look_s=600)
    async with site(tmp_path, options=options) as place:
        first, system = await place.publish("v1"), prompt(600, salt=5)
        for salt in range(2):
            await one(first, (*system, *prompt(50, salt)))
        for server in place.servers:
            server.faults.slow_s = 1.0
        await place.publish("v2")
        assert all(("v2", system[:512]) in s.log.warmed for s in place.servers)
        await eventually(lambda: all(server.log.aborted for server in place.servers))


async def test_the_next_turn_goes_where_the_last_one_was(tmp_path: Path) -> None:
    async with site(tmp_path, 3) as place:
        sampler = await place.publish("v1")
        conversations = [prompt(520, salt) for salt in range(3)]
        for turn in range(3):
            for i in ((0, 1, 2), (2, 0, 1), (1, 2, 0))[turn]:  # not in turn
                tokens = conversations[i]
                drawn = await one(sampler, tokens, max_tokens=4)
                assert turn == 0 or drawn.cached_tokens >= 512
                conversations[i] = (*tokens, *drawn.tokens, *prompt(30, salt=turn + i))
        assert asked(place, "v1") == [3, 3, 3]


async def test_several_completions_of_one_prompt_are_one_request(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        sampler = await place.publish("v1")
        params = SamplingParams(max_tokens=5, seed=9)
        drawn = await sampler.sample(prompt(40), params, n=3)
        assert len({completion.tokens for completion in drawn}) == 3
        assert sum(asked(place, "v1")) == 1
        assert drawn[2].tokens == (await one(sampler, prompt(40), max_tokens=5, seed=11)).tokens


async def test_scores_are_those_of_the_half_that_learns(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        sampler, tokens = await place.publish("v1"), prompt(30)
        read = await sampler.logprobs(tokens, start=10, top_k=3)
        assert place.trainer.scored[-1] == "v1"
        assert len(read.logprobs) == len(read.topk_ids) == 20
        with pytest.raises(SamplerError, match="outside"):
            await sampler.logprobs((1, 2, 3), start=1, targets=[(1,), (VOCABULARY,)])


async def test_what_cannot_be_served_is_refused_before_any_server_is_asked(tmp_path: Path) -> None:
    async with site(tmp_path, context=1000) as place:
        assert place.pool.context_tokens == 1000 < CONTEXT
        sampler = await place.pool.base()
        before = [len(s.log.prompts) + len(s.log.warmed) for s in place.servers]
        with pytest.raises(ContextLengthError, match="1000"):
            await one(sampler, prompt(989))
        with pytest.raises(RequestError, match="empty"):
            await one(sampler, ())
        with pytest.raises(SamplerError, match="tokenizer"):  # some servers die of it
            await one(sampler, (1, VOCABULARY))
        assert [len(s.log.prompts) + len(s.log.warmed) for s in place.servers] == before
        assert len((await one(sampler, prompt(988))).tokens) == 12


async def test_an_adapter_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        with pytest.raises(GoneError, match="no adapter named 'gone'"):
            await place.pool.open("gone", tmp_path / "gone")
        assert place.pool.live() == frozenset()


async def test_an_adapter_on_the_head_is_refused_before_any_server_is_asked(tmp_path: Path) -> None:
    async with site(tmp_path, 1) as place:
        base, shape = place.trainer.base, replace(SHAPE, head=True)
        (folder := tmp_path / "headed").mkdir()
        write_adapter(folder, base, shape, fresh_adapter(base, shape, seed=0))
        with pytest.raises(BackendError, match=r"'headed' is on the head.*train_unembed=False"):
            await place.pool.open("headed", folder)
        assert place.pool.live() == frozenset()
        assert place.servers[0].log.changes == []


async def test_the_pool_leaves_nothing_loaded_whoever_closes_it(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        await place.publish("v1")
        async with asyncio.TaskGroup() as group:
            group.create_task(place.pool.aclose())
        assert not any(s.adapters for s in place.servers)


async def test_a_version_that_is_asked_for_by_name_does_not_wait_for_a_step(tmp_path: Path) -> None:
    folder, ended = tiny_model(tmp_path / "model"), threading.Event()
    base = load_base(str(folder), device=torch.device("cpu"), dtype=torch.float32)
    with inference_servers(base, 1) as (server,):
        trainer = await LocalTrainer.start(
            LocalConfig(
                model=str(folder), root=tmp_path, rank=4, threads=1, sampler_urls=(server.url,)
            )
        )
        try:
            old = await trainer.publish()
            await old.aclose()
            async with asyncio.TaskGroup() as group:
                trainer._backend._executor.submit(ended.wait)  # the step is a long one
                weights = ((1.0,),) * 2
                passes = [LossPass("cross_entropy", (Datum((1, 2, 3), 1, weights=weights),))]
                step = group.create_task(trainer.train_step(passes, Adam(0.1)))
                await asyncio.sleep(0)
                async with asyncio.timeout(60):  # a score would be waited for longer
                    asked = await trainer.open(old.ref)
                    assert len((await one(asked, prompt(20))).tokens) == 12
                assert not step.done()
                ended.set()
        finally:
            ended.set()
            await trainer.aclose()


async def test_serving_does_not_wait_for_a_trainer_that_is_busy(tmp_path: Path) -> None:
    options = PoolOptions(score_s=0.2, returns=FAST.returns, look_s=600)
    async with site(tmp_path, options=options) as place:
        await place.publish("v1")
        place.trainer.busy = asyncio.Event()
        old = await place.publish("v0")
        assert len((await one(old, prompt(20))).tokens) == 12
        place.trainer.busy.set()


async def test_a_trainer_that_is_away_takes_no_server_with_it(tmp_path: Path) -> None:
    said: list[str] = []
    options = PoolOptions(returns=Backoff(600, 600), look_s=600, say=said.append)
    async with site(tmp_path, options=options) as place:
        await place.publish("v1")
        place.trainer.fault = OutageError("The device failed: CUDA error.")
        old = await place.publish("v0")
        assert place.pool.away() == ()
        assert said == ["v0 serves without being compared: The device failed: CUDA error."]
        assert len((await one(old, prompt(20))).tokens) == 12
