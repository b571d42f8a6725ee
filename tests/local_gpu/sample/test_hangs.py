"""Servers that hang: no connection breaks, and nothing comes. Others take over their requests."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from local_gpu.sample.member import PoolOptions
from local_gpu.sample.serving import PoolServing
from local_gpu.sample.vllm import VllmServer
from tests.local_gpu.prompts import prompt, sampled
from tests.support.inference_servers import (
    stoppable,
    tiny_base,
)
from tests.support.pools import PATIENT, TEXT, Site, Trainer, facts_of, site
from tests.support.waits import eventually
from tinker_claw.retry import Backoff
from tinker_claw.types import SamplingParams

QUICK = PoolOptions(returns=Backoff(0.1, 0.5), look_s=0.5, still_s=4)
AT_MOST_S = 240
"""Seconds that a test lasts at most."""


@pytest.mark.slow
async def test_a_server_that_only_pauses_keeps_its_requests(tmp_path: Path) -> None:
    base, params = tiny_base(), SamplingParams(max_tokens=40)
    trainer = Trainer(base, tmp_path)
    with stoppable("tiny") as stopped:
        server = VllmServer(stopped.url, deadlines=replace(PATIENT, answer_s=2))
        pool = await PoolServing.start([server], facts_of(base), trainer.score, TEXT, QUICK)
        try:
            sampler = await Site(pool, trainer, [], tmp_path).publish("v1")
            async with (
                asyncio.timeout(AT_MOST_S),
                aclosing(sampler.stream(prompt(40, 1), params)) as stream,
            ):
                chunks = [await anext(stream)]
                stopped.stop()
                await eventually(lambda: pool.away() != ())
                assert "hangs" in pool.away()[0][1]
                stopped.go_on()
                chunks += [chunk async for chunk in stream]
            assert len(chunks) == 40, "in one piece"
            await eventually(lambda: pool.away() == ())
        finally:
            stopped.go_on()
            await pool.aclose()


@pytest.mark.slow
async def test_a_server_that_computes_for_others_does_not_hang(tmp_path: Path) -> None:
    # A busy machine may keep a server from its token for seconds.
    options = PoolOptions(returns=Backoff(600, 600), look_s=0.1, still_s=4)
    async with site(tmp_path, 1, options=options) as place:
        sampler, (server,) = await place.publish("v1"), place.servers
        server.faults.slow_s = 0.1
        async with aclosing(
            sampler.stream(prompt(40, 1), SamplingParams(max_tokens=400))
        ) as stream:
            await anext(stream)
            server.faults.hangs = True  # whoever comes now gets no turn
            asked = len(server.log.warmed)
            while len(server.log.warmed) < asked + 2:  # two checks in vain
                await anext(stream)
                assert place.pool.away() == ()
        await eventually(lambda: place.pool.away() != ())


async def test_a_request_that_waits_too_long_goes_elsewhere_and_says_nothing_of_the_server(
    tmp_path: Path,
) -> None:
    options = PoolOptions(returns=Backoff(600, 600), look_s=600, still_s=600)
    deadlines = replace(PATIENT, first_token_s=4)
    async with site(tmp_path, 2, options=options, deadlines=deadlines) as place:
        sampler = await place.publish("v1")
        slow = place.servers[0]
        slow.faults.hangs = True
        for salt in range(2):  # one of both goes there first
            assert len((await sampled(sampler, prompt(40, salt))).tokens) == 12
        assert slow.log.prompts
        assert place.pool.away() == ()


async def test_one_that_nobody_asks_is_noticed_and_whoever_runs_it_is_told_until_it_is_back(
    tmp_path: Path,
) -> None:
    hung: list[str] = []
    options = PoolOptions(returns=Backoff(0.1, 0.1), look_s=0.2, still_s=2, hung=hung.append)
    async with site(tmp_path, 1, options=options) as place:
        (server,) = place.servers
        server.faults.hangs = True
        await eventually(lambda: place.pool.away() != ())
        assert "hangs" in place.pool.away()[0][1]
        await eventually(lambda: hung == [server.url] * 2)
        server.stop()  # as whoever was told does: now it does not hang, it is gone
        server.faults.hangs = False
        server.start()
        await eventually(lambda: place.pool.away() == ())
        assert len(hung) <= 3
