"""Servers that hang: no connection breaks, and nothing comes. Others take over their requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest

from local_gpu.sample.http import Deadlines
from local_gpu.sample.member import PoolOptions
from local_gpu.sample.sampler import PoolSampler
from local_gpu.sample.serving import PoolServing
from local_gpu.sample.vllm import VllmServer
from tests.local_gpu.prompts import prompt, sampled
from tests.support.inference_servers import (
    SLOW_S,
    Stoppable,
    inference_servers,
    stoppable,
    tiny_base,
)
from tests.support.pools import PATIENT, TEXT, Site, Trainer, facts_of, site
from tests.support.waits import eventually
from tinker_claw.errors import OutageError
from tinker_claw.retry import Backoff
from tinker_claw.types import Completion, SamplingParams, TokenChunk

QUICK = PoolOptions(returns=Backoff(0.1, 0.5), look_s=0.5, still_s=4)
SOON = replace(PATIENT, answer_s=2, first_token_s=12, between_tokens_s=12)
"""Deadlines of requests, which pass after a server that hangs has left the rotation."""
AT_MOST_S = 240
"""Seconds that a test lasts at most."""


@pytest.fixture(scope="module")
def stopped() -> Iterator[Stoppable]:
    with stoppable("tiny") as server:
        yield server


@asynccontextmanager
async def beside(
    stopped: Stoppable,
    folder: Path,
    others: int,
    options: PoolOptions = QUICK,
    deadlines: Deadlines = SOON,
) -> AsyncGenerator[Site]:
    """A pool of the server that will be stopped, and others."""
    base = tiny_base()
    trainer = Trainer(base, folder)
    with inference_servers(base, others) as servers:
        for server in servers:
            server.faults.slow_s = SLOW_S
        urls = [stopped.url, *(server.url for server in servers)]
        connected = [VllmServer(url, deadlines=deadlines) for url in urls]
        pool = await PoolServing.start(connected, facts_of(base), trainer.score, TEXT, options)
        try:
            yield Site(pool, trainer, servers, folder)
        finally:
            stopped.go_on()
            await pool.aclose()


@dataclass
class Reply:
    """A reply that is continued where it breaks off, as the gateway does."""

    sampler: PoolSampler
    prompt: tuple[int, ...]
    length: int
    parts: list[tuple[tuple[int, ...], Completion]] = field(default_factory=list)
    """Sampled parts, each with its prompt."""
    began: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        tokens, left = self.prompt, self.length
        while left:
            params, chunks = SamplingParams(max_tokens=left), list[TokenChunk]()
            try:
                async with aclosing(self.sampler.stream(tokens, params)) as stream:
                    async for chunk in stream:
                        chunks.append(chunk)
                        self.began.set()
            except OutageError:
                await asyncio.sleep(0.2)
            part = Completion.collect(chunks, params, aborted=True)
            self.parts.append((tokens, part))
            tokens, left = (*tokens, *part.tokens), left - len(part.tokens)


def adapters(url: str) -> set[str]:
    cards = httpx.get(f"{url}/v1/models", timeout=10).json()["data"]
    return {card["id"] for card in cards if card["parent"]}


@pytest.mark.slow
async def test_replies_go_on_elsewhere_and_the_server_comes_back_with_every_version(
    stopped: Stoppable, tmp_path: Path
) -> None:
    async with beside(stopped, tmp_path, 1) as place:
        sampler = await place.publish("v1")
        replies = [Reply(sampler, prompt(40, salt), 60) for salt in range(6)]
        async with asyncio.timeout(AT_MOST_S), asyncio.TaskGroup() as group:
            for reply in replies[:4]:
                group.create_task(reply.run())
            for reply in replies[:4]:
                await reply.began.wait()
            stopped.stop()
            for reply in replies[4:]:  # one of both there; nothing will have come
                group.create_task(reply.run())
        ((url, why),) = place.pool.away()
        assert url == stopped.url
        assert "hangs" in why
        for reply in replies:
            parts = [part.tokens for _, part in reply.parts]
            assert sum(map(len, parts)) == 60
            assert all(place.errors("v1", *part) < 1e-4 for part in reply.parts)
        assert sum(len(reply.parts) == 2 for reply in replies[:4]) == 2, "those that had begun"
        assert all(len(reply.parts) == 1 for reply in replies[4:]), "the others noticed nothing"
        await place.publish("v2")
        stopped.go_on()
        await eventually(lambda: place.pool.away() == ())
        assert await asyncio.to_thread(adapters, stopped.url) == {"v1", "v2"}


@pytest.mark.slow
async def test_a_server_that_only_pauses_keeps_its_requests(
    stopped: Stoppable, tmp_path: Path
) -> None:
    async with beside(stopped, tmp_path, 0, deadlines=replace(PATIENT, answer_s=2)) as place:
        sampler = await place.publish("v1")
        reply = Reply(sampler, prompt(40, 1), 40)
        async with asyncio.timeout(AT_MOST_S), asyncio.TaskGroup() as group:
            group.create_task(reply.run())
            await reply.began.wait()
            stopped.stop()
            await eventually(lambda: place.pool.away() != ())
            assert "hangs" in place.pool.away()[0][1]
            stopped.go_on()
        ((_, completion),) = reply.parts
        assert len(completion.tokens) == 40, "in one piece"
        await eventually(lambda: place.pool.away() == ())


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
