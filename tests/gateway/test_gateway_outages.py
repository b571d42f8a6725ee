"""A service that is away, as the agent sees it over HTTP: it waits, and is told when it is over."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes import UNTIL_TOLD, FakeSampler, Script
from tests.support.gateways import MODEL, chat, gateway, spell, text_of
from tests.support.learning import world as loop
from tinker_claw.errors import OutageError, SamplerError
from tinker_claw.gateway.fallback import RETRIES, Retries
from tinker_claw.policy import Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.retry import Backoff


@pytest.mark.parametrize("stream", [False, True])
async def test_outage_is_waited_out_inside_the_request(
    tmp_path: Path, renderer: Renderer, stream: bool
) -> None:
    async with gateway(tmp_path, renderer, keepalive_s=0.02) as world:
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
        assert world.health.backend.away == frozenset()


async def test_failing_sampler_is_given_up_although_the_service_was_away_before(
    tmp_path: Path, renderer: Renderer
) -> None:
    broken = FakeSampler(Script(spell(renderer, "x"), fail_after=0))
    async with gateway(tmp_path, renderer, broken) as world:
        broken.away = 2
        assert (await world.ask("hi")).status_code == 503
        assert len(broken.prompts) == 5, "two outages, and three attempts as always"
        assert world.health.backend.away == frozenset(), "a refusal is an answer"


async def test_patience_ends_with_a_503_that_says_when_to_come_back(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, patience_s=1) as world:
        world.sampler.away = UNTIL_TOLD
        began = time.monotonic()
        response = await world.ask("hi")
        assert time.monotonic() - began >= 1
        assert (response.status_code, response.headers["retry-after"]) == (503, "30")
        message = response.json()["error"]["message"]
        assert message == "The service that runs the model is away; try again in a few minutes."
        assert len(world.sampler.prompts) >= 2
        assert world.turns() == []
        health = await world.http.get(world.url.removesuffix("/v1") + "/healthz")
        seen = health.json()
        assert (seen["status"], seen["backend"]) == ("degraded", "away")
        assert seen["backend_error"] == "the service is away, as told"
        assert seen["meaning"].startswith("Replies wait for the service")
        world.sampler.away = 0
        assert (await world.ask("hi")).status_code == 200
        assert (await world.http.get(str(health.url))).json()["status"] == "ok"


async def test_streamed_patience_ends_with_an_error_and_no_finish_reason(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, patience_s=1, keepalive_s=0.02) as world:
        world.sampler.away = UNTIL_TOLD
        events = await world.events("hi")
        assert events[-1]["error"]["type"] == "server_error"
        assert len(events) > 3, "kept alive until then"
        assert all(e["choices"][0]["finish_reason"] is None for e in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_hangs_up_ends_the_waiting(
    tmp_path: Path, renderer: Renderer, stream: bool
) -> None:
    async with gateway(tmp_path, renderer, keepalive_s=0.02) as world:
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


async def test_outage_in_the_middle_of_a_reply_has_its_end_too(
    tmp_path: Path, renderer: Renderer
) -> None:
    tokens = spell(renderer, "one two three four")
    broken = FakeSampler(Script(tokens, away_after=2), Script(tokens, away_after=0))
    async with gateway(tmp_path, renderer, broken, patience_s=1) as world:
        events = await world.events("hi")
        assert text_of(events), "the first tokens were out"
        assert events[-1]["error"]["type"] == "server_error"
        assert all(e["choices"][0]["finish_reason"] is None for e in events[:-1])
        assert len(broken.prompts) >= 2
        assert world.health.backend.away == {"serving"}
        assert world.turns() == []


async def test_reply_that_flows_for_longer_than_patience_has_all_of_it_left(
    tmp_path: Path, renderer: Renderer
) -> None:
    tokens = spell(renderer, "one two three four")
    sampler = FakeSampler(Script(tokens, gap_s=0.2, away_after=3), Script(tokens[3:]))
    async with gateway(tmp_path, renderer, sampler, patience_s=0.3) as world:
        assert text_of(await world.events("hi")) == "one two three four"
        assert len(sampler.prompts) == 2


async def test_version_that_cannot_be_opened_now_is_a_503_not_a_404(
    tmp_path: Path, renderer: Renderer
) -> None:
    class Away(dict[int, Sampler]):
        def __missing__(self, number: int) -> Sampler:
            raise OutageError("opening came to nothing")

    class Full(Away):
        def __bool__(self) -> bool:
            return True

    async with gateway(tmp_path, renderer, versions=Full()) as world:
        response = await world.ask("hi", model=f"{MODEL}@v7")
        assert (response.status_code, response.headers["retry-after"]) == (503, "30")
        assert world.health.backend.away == {"serving"}


async def test_replies_go_on_while_learning_waits(tmp_path: Path, renderer: Renderer) -> None:
    async with (
        loop(tmp_path / "loop") as learning,
        gateway(tmp_path / "gateway", renderer, health=learning.health) as world,
    ):
        learning.trainer.away |= {"train_step": 1, "load_state": UNTIL_TOLD}
        for _ in range(4):
            learning.turn("GOOD")
        await learning.until(lambda: learning.health.learner.state == "stalled")
        assert (await world.ask("hi")).status_code == 200
        url = world.url.removesuffix("/v1") + "/healthz"
        seen: dict[str, Any] = (await world.http.get(url)).json()
        assert (seen["status"], seen["backend"], seen["judge"]) == ("degraded", "away", "ok")
        assert seen["meaning"].startswith("Replies come from policy v0 as before; learning waits")


def test_last_attempt_is_at_the_end_of_patience() -> None:
    patience = Retries(time.monotonic() + 3, Backoff(2, 60))
    away, failed = OutageError("away"), SamplerError("failed")
    assert patience.wait_s(away) == 2
    assert [patience.wait_s(failed) for _ in range(3)] == [RETRIES.after(1), RETRIES.after(2), None]
    assert patience.wait_s(away) == pytest.approx(3, abs=0.5), "not four: patience is over by then"
    assert Retries(time.monotonic(), Backoff(2, 60)).wait_s(away) is None


def test_the_time_in_which_tokens_came_is_no_waiting() -> None:
    patience = Retries(time.monotonic() + 3, Backoff(2, 60))
    away = OutageError("away")
    assert [patience.wait_s(away), patience.wait_s(away)] == [2, pytest.approx(3, abs=0.5)]
    patience.went_well(50)
    assert [patience.wait_s(away) for _ in range(3)] == [2, 4, 8], "a new outage"
