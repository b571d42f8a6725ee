"""Servers that fail: others answer, they leave, and they return with the versions in use."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from local_gpu.sample.member import PoolOptions
from tests.local_gpu.prompts import prompt, sampled
from tests.support.inference_servers import MODEL, InferenceServer
from tests.support.pools import Site, site
from tests.support.waits import eventually
from tinker_claw.errors import BackendError, OutageError
from tinker_claw.policy import Sampler
from tinker_claw.retry import Backoff
from tinker_claw.types import Completion, SamplingParams

SLOW_TO_RETURN = PoolOptions(returns=Backoff(600, 600), look_s=600)
"""Options with which a server that leaves does not return during a test."""


async def streamed(sampler: Sampler, tokens: tuple[int, ...]) -> Completion:
    params = SamplingParams(max_tokens=12, seed=4)
    async with aclosing(sampler.stream(tokens, params)) as stream:  # type: ignore[type-var]
        return Completion.collect([chunk async for chunk in stream], params)


def had(server: InferenceServer) -> int:
    return len(server.log.prompts)


async def home(place: Site, sampler: Sampler, tokens: tuple[int, ...]) -> InferenceServer:
    """Server of a conversation, at which it continues."""
    before = [had(server) for server in place.servers]
    await sampled(sampler, tokens)
    return next(s for s, n in zip(place.servers, before, strict=True) if had(s) > n)


async def test_a_busy_server_passes_a_request_on_and_stays(tmp_path: Path) -> None:
    async with site(tmp_path, options=SLOW_TO_RETURN) as place:
        sampler, tokens = await place.publish("v1"), prompt(520)
        busy = await home(place, sampler, tokens)
        busy.faults.status = 429
        assert len((await sampled(sampler, tokens)).tokens) == 12
        busy.faults.status = None
        assert len((await sampled(sampler, prompt(520, 2))).tokens) == 12
        assert place.pool.away() == ()


async def test_a_busy_server_that_is_the_only_one_is_an_outage_that_says_so(tmp_path: Path) -> None:
    options = PoolOptions(returns=Backoff(600, 600), look_s=0.1)
    async with site(tmp_path, 1, options=options) as place:
        sampler, (busy,) = await place.publish("v1"), place.servers
        busy.faults.status = 429
        with pytest.raises(OutageError, match=r"No server can be asked: .* answers HTTP 429"):
            await sampled(sampler, prompt(30))
        looked = len(busy.log.warmed)
        await eventually(lambda: len(busy.log.warmed) >= looked + 2)
        assert place.pool.away() == ()
        busy.faults.status = None
        assert len((await sampled(sampler, prompt(30))).tokens) == 12


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["gone", "503", "cut", "ends early"])
async def test_another_server_takes_what_fails_before_the_first_token(
    tmp_path: Path, ends: str
) -> None:
    async with site(tmp_path, options=SLOW_TO_RETURN) as place:
        sampler, tokens = await place.publish("v1"), prompt(520)
        sick = await home(place, sampler, tokens)
        if ends == "gone":
            sick.stop()
        sick.faults.status = 503 if ends == "503" else None
        sick.faults.breaks_after = 0 if ends == "cut" else None
        sick.faults.ends_after = 0 if ends == "ends early" else None
        before, warmed = had(sick), len(sick.log.warmed)
        drawn = await streamed(sampler, tokens)
        assert len(drawn.tokens) == 12
        assert place.errors("v1", tokens, drawn) < 1e-4
        assert had(sick) == before + (ends != "gone")  # it was asked, and
        assert [url for url, _ in place.pool.away()] == [sick.url]
        for salt in range(2, 6):  # left at once: these would spread over both
            await sampled(sampler, prompt(520, salt), max_tokens=1)
        assert had(sick) == before + (ends != "gone")
        assert not any(name == "v1" for name, _ in sick.log.warmed[warmed:])
        if ends == "gone":
            sick.start()


@pytest.mark.parametrize("fault", ["breaks_after", "ends_after"])
async def test_a_reply_that_breaks_off_is_an_outage_and_goes_on_elsewhere(
    tmp_path: Path, fault: str
) -> None:
    async with site(tmp_path, options=SLOW_TO_RETURN) as place:
        sampler, tokens = await place.publish("v1"), prompt(520)
        sick = await home(place, sampler, tokens)
        setattr(sick.faults, fault, 5)
        params = SamplingParams(max_tokens=20)
        got: list[int] = []

        async def read() -> None:
            async with aclosing(sampler.stream(tokens, params)) as stream:
                async for chunk in stream:
                    got.extend(chunk.tokens)

        with pytest.raises(OutageError, match="broke"):
            await read()
        assert len(got) == 5
        before = had(sick)
        # As the gateway does it.
        rest = await sampled(sampler, (*tokens, *got), max_tokens=15)
        assert len(rest.tokens) == 15
        assert place.errors("v1", (*tokens, *got), rest) < 1e-4
        assert had(sick) == before


async def test_a_server_that_comes_back_has_every_version_in_use_again(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        old, new = await place.publish("v1"), await place.publish("v2")
        dead = place.servers[0]
        dead.stop()
        for salt in range(4):
            assert place.errors("v2", prompt(30, salt), await sampled(new, prompt(30, salt))) < 1e-4
        newest = await place.publish("v3")  # while it is away
        await old.aclose()
        dead.log.changes.clear()
        dead.start()
        await eventually(lambda: set(dead.adapters) == {"v2", "v3"})
        await eventually(lambda: place.pool.away() == ())
        place.servers[1].stop()
        for sampler in (new, newest):
            tokens = prompt(30)
            assert place.errors(sampler.ref, tokens, await sampled(sampler, tokens)) < 1e-4
        place.servers[1].start()


async def test_an_outage_of_all_names_them_and_ends_by_itself(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        sampler, tokens = await place.publish("v1"), prompt(40)
        for server in place.servers:
            server.stop()
        with pytest.raises(OutageError):
            await sampled(sampler, tokens)
        with pytest.raises(OutageError, match=r"No server.*away for \d+ s \(.*cannot") as told:
            await sampled(sampler, tokens)
        assert all(server.url in str(told.value) for server in place.servers)
        with pytest.raises(OutageError):
            await place.publish("v2")
        assert place.pool.live() == {"v1"}
        for server in place.servers:
            server.start()
        await eventually(lambda: place.pool.away() == ())
        assert all(set(server.adapters) == {"v1"} for server in place.servers)
        assert place.errors("v1", tokens, await sampled(sampler, tokens)) < 1e-4


async def test_a_server_that_cannot_load_a_version_leaves_and_the_others_serve_it(
    tmp_path: Path,
) -> None:
    async with site(tmp_path) as place:
        await place.publish("v1")
        place.servers[0].faults.refuses_loads = True
        new = await place.publish("v2")
        ((url, error),) = place.pool.away()
        assert url == place.servers[0].url
        assert "cannot load" in error
        assert place.errors("v2", prompt(30), await sampled(new, prompt(30))) < 1e-4
        place.servers[0].faults.refuses_loads = False
        await eventually(lambda: place.pool.away() == ())
        assert "v2" in place.servers[0].adapters
        for server in place.servers:
            server.faults.refuses_loads = True
        with pytest.raises(BackendError, match="No server serves 'v3'") as refused:
            await place.publish("v3")
        assert not isinstance(refused.value, OutageError)
        assert place.pool.away() == (), "the version is at fault"
        assert place.pool.live() == {"v1", "v2"}
        assert place.errors("v2", prompt(30), await sampled(new, prompt(30))) < 1e-4


@pytest.mark.slow
async def test_a_server_that_hangs_does_not_hold_up_a_publish(tmp_path: Path) -> None:
    options = PoolOptions(ready_s=8, returns=Backoff(600, 600), look_s=600)
    async with site(tmp_path, options=options) as place:
        place.servers[0].faults.load_s = 9
        new = await place.publish("v1")
        ((url, error),) = place.pool.away()
        assert url == place.servers[0].url
        assert "not ready in 8 s" in error
        assert len((await sampled(new, prompt(30))).tokens) == 12


async def test_a_request_that_fails_everywhere_spares_the_last_servers(tmp_path: Path) -> None:
    async with site(tmp_path, 4, options=SLOW_TO_RETURN) as place:
        sampler = await place.pool.base()
        await eventually(lambda: all((MODEL, (0, 0)) in s.log.warmed for s in place.servers))
        for server in place.servers:  # which have been looked at
            server.faults.status = 500
        with pytest.raises(OutageError, match="HTTP 500"):
            await sampled(sampler, prompt(30))
        assert sorted(had(server) for server in place.servers) == [0, 1, 1, 1]
        assert len(place.pool.away()) == 3


async def test_a_pool_can_be_closed_while_a_server_is_being_brought_back(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        sampler = await place.publish("v1")
        for server in place.servers:
            server.faults.hangs = True  # with the exam of whoever wants to come back
            server.faults.breaks_after = 0
            server.restart()
        with pytest.raises(OutageError):
            await sampled(sampler, prompt(20))
        await eventually(lambda: any(server.log.warmed for server in place.servers))
        async with asyncio.timeout(60):
            await place.pool.aclose()
