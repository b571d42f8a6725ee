"""A service that is away, as the agent sees it over HTTP: it waits, and is told when it is over."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.support.fakes import UNTIL_TOLD, FakeSampler, Script
from tests.support.gateways import MODEL, World, chat, gateway, served, spell, text_of
from tinker_claw.errors import OutageError, SamplerError
from tinker_claw.policy import Sampler
from tinker_claw.render.renderer import Renderer


@served(keepalive_s=0.02)
@pytest.mark.parametrize("stream", [False, True])
async def test_outage_is_waited_out_inside_the_request(world: World, stream: bool) -> None:
    world.sampler.away = 4
    if stream:
        events = await world.events("hi")
        assert text_of(events) == "fine"
        deltas = [e["choices"][0]["delta"] for e in events if e]
        first = next(i for i, delta in enumerate(deltas) if delta.get("content"))
        assert sum(not delta for delta in deltas[:first]) >= 5, "the client hears from us"
    else:
        (choice,) = (await world.ask("hi")).json()["choices"]
        assert choice["message"]["content"] == "fine"
    assert len(world.sampler.prompts) == 5
    assert len(world.turns()) == 1
    assert world.health.outages.away == frozenset()


@served(patience_s=1, keepalive_s=0.02)
async def test_patience_ends_with_a_503_that_says_when_to_come_back(world: World) -> None:
    world.sampler.away = UNTIL_TOLD
    began = time.monotonic()
    response = await world.ask("hi")
    assert time.monotonic() - began >= 1
    assert (response.status_code, response.headers["retry-after"]) == (503, "30")
    assert "is away" in response.json()["error"]["message"]
    assert len(world.sampler.prompts) >= 2
    health = "/../healthz"
    seen = (await world.http.get(health)).json()
    assert (seen["status"], seen["backend"]) == ("degraded", "away")
    assert seen["backend_error"] == "the service is away, as told"
    events = await world.events("hi")
    assert events[-1]["error"]["type"] == "server_error"
    assert len(events) > 3, "kept alive until then"
    assert all(e["choices"][0]["finish_reason"] is None for e in events[:-1])
    assert world.turns() == []
    world.sampler.away = 0
    assert (await world.ask("hi")).status_code == 200
    assert (await world.http.get(health)).json()["status"] == "ok"


@served(keepalive_s=0.02)
@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_hangs_up_ends_the_waiting(world: World, stream: bool) -> None:
    world.sampler.away = UNTIL_TOLD
    body = {"model": MODEL, "messages": chat("hi"), "stream": stream}
    asking = asyncio.create_task(world.http.post("/chat/completions", json=body))
    asked = world.sampler.prompts
    async with asyncio.timeout(60):
        while len(asked) < 2:  # noqa: ASYNC110 - the gateway tells nobody
            await asyncio.sleep(0.01)
        asking.cancel()
        before = 0
        while len(asked) > before:  # until the news has arrived
            before = len(asked)
            await asyncio.sleep(0.5)  # two of the longest waits
    assert world.turns() == []


@pytest.mark.parametrize("how", ["away_after", "fail_after"])
async def test_trouble_in_the_middle_of_a_stream_ends_it_with_an_error_and_no_finish_reason(
    tmp_path: Path, renderer: Renderer, how: str
) -> None:
    tokens = spell(renderer, "one two three four")
    broken = FakeSampler(Script(tokens, **{how: 2}), Script(tokens, **{how: 0}))
    async with gateway(tmp_path, renderer, broken, patience_s=1) as world:
        events = await world.events("hi")
        assert text_of(events), "the first tokens were out"
        assert events[-1]["error"]["type"] == "server_error"
        assert all(e["choices"][0]["finish_reason"] is None for e in events[:-1])
        assert world.health.outages.away == ({"serving"} if how == "away_after" else frozenset())
        assert (len(broken.prompts) == 3) or how == "away_after"
        assert world.turns() == []


async def test_reply_that_flows_for_longer_than_patience_has_all_of_it_left(
    tmp_path: Path, renderer: Renderer
) -> None:
    tokens = spell(renderer, "one two three four")
    sampler = FakeSampler(Script(tokens, gap_s=0.2, away_after=3), Script(tokens[3:]))
    async with gateway(tmp_path, renderer, sampler, patience_s=0.3) as world:
        assert text_of(await world.events("hi")) == "one two three four"
        assert len(sampler.prompts) == 2


@pytest.mark.parametrize("error", [OutageError, SamplerError])
async def test_a_version_that_cannot_be_opened_now_is_a_503_not_a_404(
    tmp_path: Path, renderer: Renderer, error: type[Exception]
) -> None:
    class Broken(dict[int, Sampler]):
        def __missing__(self, number: int) -> Sampler:
            raise error("opening came to nothing")

    versions = Broken({9: FakeSampler((1,))})
    async with gateway(tmp_path, renderer, versions=versions) as world:
        world.ledger.versions.roll_back(world.policy.current.version)
        response = await world.ask("hi", model=f"{MODEL}@v1")
        assert response.status_code == 503
        if error is OutageError:
            assert response.headers["retry-after"] == "30"
            assert world.health.outages.away == {"serving"}
