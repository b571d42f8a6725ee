"""Versions over several servers: each answers as itself, and none is unloaded while in use."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from local_gpu.model.files import write_adapter
from local_gpu.model.lora import fresh_adapter
from local_gpu.sample.member import PoolOptions
from tests.local_gpu.prompts import prompt, sampled
from tests.support.backends import CONTEXT, VOCABULARY
from tests.support.pools import SHAPE, Site, site
from tests.support.waits import eventually
from tinker_claw.errors import (
    BackendError,
    ContextLengthError,
    GoneError,
    OutageError,
    RequestError,
    SamplerError,
)
from tinker_claw.retry import Backoff
from tinker_claw.types import Completion, SamplingParams


def asked(place: Site, model: str) -> list[int]:
    """Number of requests that each server has had under a name."""
    return [sum(name == model for name, _ in server.log.prompts) for server in place.servers]


async def test_a_reply_in_flight_ends_on_its_version_which_waits_for_it(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        old, tokens = await place.publish("v1"), prompt(60)
        params = SamplingParams(max_tokens=80, seed=1)
        async with aclosing(old.stream(tokens, params)) as stream:
            chunks = [await anext(stream) for _ in range(5)]
            new = await place.publish("v2")
            await old.aclose()
            await asyncio.gather(*(sampled(new, prompt(40, salt)) for salt in range(4)))
            assert place.pool.live() == {"v1", "v2"}  # its folder stays, too
            chunks += [chunk async for chunk in stream]
        drawn = Completion.collect(chunks, params)
        assert len(drawn.tokens) == 80
        assert place.errors("v1", tokens, drawn) < 1e-4
        await eventually(lambda: all("v1" not in s.adapters for s in place.servers))
        assert place.pool.live() == {"v2"}
        assert [s.log.most_running["v1"] for s in place.servers] == [0, 0]


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
        assert place.errors("v1", prompt(30), await sampled(serving, prompt(30))) < 1e-4
        await serving.aclose()
        await eventually(lambda: all("v1" not in s.adapters for s in place.servers))


async def test_a_request_after_closing_is_served_and_lets_the_adapter_go_again(
    tmp_path: Path,
) -> None:
    async with site(tmp_path) as place:
        sampler = await place.publish("v1")
        await sampler.aclose()
        await eventually(lambda: not any(s.adapters for s in place.servers))
        place.servers[0].stop()  # which cannot load it
        late = await asyncio.gather(*(sampled(sampler, prompt(30, salt)) for salt in range(4)))
        for salt, drawn in enumerate(late):
            assert place.errors("v1", prompt(30, salt), drawn) < 1e-4
        await eventually(lambda: not any(s.adapters for s in place.servers))
        assert place.pool.live() == frozenset()
        place.servers[0].start()


async def test_a_reply_that_nobody_wants_any_more_ends_at_the_server(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        sampler = await place.publish("v1")
        async with aclosing(sampler.stream(prompt(40), SamplingParams(max_tokens=1500))) as stream:
            await anext(stream)
        await eventually(lambda: sum(s.log.aborted for s in place.servers) == 1)
        assert sum(s.log.running for s in place.servers) == 0
        async with asyncio.TaskGroup() as group:
            task = group.create_task(sampled(sampler, prompt(40), max_tokens=1500))
            await eventually(lambda: sum(s.log.running for s in place.servers) == 1)
            task.cancel()
        await eventually(lambda: sum(s.log.aborted for s in place.servers) == 2)


async def test_a_forgotten_prompt_is_sent_with_no_new_version(tmp_path: Path) -> None:
    async with site(tmp_path, 1) as place:
        await sampled(await place.publish("v1"), said := prompt(600, salt=5))
        place.pool.forget()
        await place.publish("v2")
        (server,) = place.servers
        assert not any(tokens[:9] == said[:9] for name, tokens in server.log.warmed if name == "v2")


async def test_prefixes_are_computed_beforehand_and_used_by_salt(tmp_path: Path) -> None:
    async with site(tmp_path, 2) as place:
        first, system = await place.publish("v1"), prompt(1100, salt=5)
        for n in range(2):
            await sampled(first, (*system, *prompt(50, n)), cache_salt="anna")
        second = await place.publish("v2")
        for server in place.servers:
            assert server.log.salts["v2", system[:1024]] == {"anna"}
        asked = (*system, *prompt(50, 8))
        stranger = await sampled(second, asked, max_tokens=2, cache_salt="ben")
        assert stranger.cached_tokens == 0
        # All but the last pass, of which the engine keeps nothing where one token ends a request.
        assert (await sampled(second, asked, max_tokens=2, cache_salt="anna")).cached_tokens >= 512


async def test_the_next_turn_goes_where_the_last_one_was(tmp_path: Path) -> None:
    async with site(tmp_path, 3) as place:
        sampler = await place.publish("v1")
        conversations = [prompt(520, salt) for salt in range(3)]
        for turn in range(3):
            for i in ((0, 1, 2), (2, 0, 1), (1, 2, 0))[turn]:  # not in turn
                tokens = conversations[i]
                drawn = await sampled(sampler, tokens, max_tokens=4)
                assert turn == 0 or drawn.cached_tokens >= 512
                conversations[i] = (*tokens, *drawn.tokens, *prompt(30, salt=turn + i))
        assert asked(place, "v1") == [3, 3, 3]


async def test_scores_are_those_of_the_half_that_learns(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        sampler, tokens = await place.publish("v1"), prompt(30)
        read = await sampler.logprobs(tokens, start=10, top_k=3)
        assert place.trainer.scored[-1] == "v1"
        assert len(read.logprobs) == len(read.topk_ids) == 20


async def test_what_cannot_be_served_is_refused_before_any_server_is_asked(tmp_path: Path) -> None:
    async with site(tmp_path, context=1000) as place:
        assert place.pool.context_tokens == 1000 < CONTEXT
        sampler = await place.pool.base()
        before = [len(s.log.prompts) + len(s.log.warmed) for s in place.servers]
        with pytest.raises(ContextLengthError, match="1000"):
            await sampled(sampler, prompt(989))
        with pytest.raises(RequestError, match="empty"):
            await sampled(sampler, ())
        with pytest.raises(SamplerError, match="tokenizer"):  # some servers die of it
            await sampled(sampler, (1, VOCABULARY))
        with pytest.raises(SamplerError, match="outside"):
            await sampler.logprobs((1, 2, 3), start=1, targets=[(1,), (VOCABULARY,)])
        assert [len(s.log.prompts) + len(s.log.warmed) for s in place.servers] == before
        assert len((await sampled(sampler, prompt(988))).tokens) == 12


async def test_an_adapter_on_the_head_is_refused_before_any_server_is_asked(tmp_path: Path) -> None:
    async with site(tmp_path, 1) as place:
        base, shape = place.trainer.base, replace(SHAPE, head=True)
        (folder := tmp_path / "headed").mkdir()
        write_adapter(folder, base, shape, fresh_adapter(base, shape, seed=0))
        with pytest.raises(BackendError, match="train_unembed=False"):
            await place.pool.open("headed", folder)
        with pytest.raises(GoneError, match="gone"):
            await place.pool.open("gone", tmp_path / "gone")
        assert place.pool.live() == frozenset()
        assert place.servers[0].log.changes == []


async def test_the_pool_leaves_nothing_loaded_whoever_closes_it(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        await place.publish("v1")
        async with asyncio.TaskGroup() as group:
            group.create_task(place.pool.aclose())
        assert not any(s.adapters for s in place.servers)


async def test_a_trainer_that_is_busy_or_away_holds_up_no_version(tmp_path: Path) -> None:
    sentences: list[str] = []
    returns = Backoff(600, 600)
    options = PoolOptions(score_s=0.2, returns=returns, look_s=600, say=sentences.append)
    async with site(tmp_path, options=options) as place:
        await place.publish("v1")
        place.trainer.busy = asyncio.Event()
        old = await place.publish("v0")
        assert len((await sampled(old, prompt(20))).tokens) == 12
        place.trainer.busy.set()
        place.trainer.fault = OutageError("The device failed: CUDA error.")
        old = await place.publish("v00")
        assert place.pool.away() == ()
        assert "CUDA error" in sentences[-1]
        assert len((await sampled(old, prompt(20))).tokens) == 12
