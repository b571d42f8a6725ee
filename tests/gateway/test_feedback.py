"""Feedback over HTTP: who may give it on what, what it changes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.gateways import World, gateway
from tinker_claw.render.renderer import Renderer

ROUTE = "/v1/feedback"


async def give(world: World, **body: Any) -> httpx.Response:
    headers = body.pop("headers", {})
    url = world.url.removesuffix("/v1") + ROUTE
    return await world.http.post(url, json=body, headers=headers)


async def test_reply_is_judged_by_its_name_without_a_next_state(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        reply = (await world.ask("hi")).json()
        answer = await give(world, response_id=reply["id"], score=-0.5, text="say hello back")
        assert answer.json() == {
            **{"object": "feedback", "id": 1, "turn": 1, "repeated": False},
            **{"trains": True, "because": None},
        }
        verdict = world.ledger.judgements.verdict(1)
        assert verdict is not None
        assert (verdict.value, verdict.source, verdict.score) == (-1, "user", -0.5)
        assert world.ledger.judgements.hints(1) == ("say hello back",)
        assert world.ledger.turns.judgeable() == [1]
        assert world.woken == ["judge"]
        assert world.ledger.feedback.outcome(1) is None


async def test_final_feedback_is_the_outcome_of_its_session(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        await world.ask("hi", headers={"X-Session-Id": "one"})
        answer = await give(world, session="one", score=0.0, final=True, task="t", group="g")
        assert answer.json()["because"].startswith(
            "it is of how the session ended, and the session"
        )
        assert world.ledger.feedback.outcome(1) == 0.0
        assert world.ledger.judgements.verdict(1) is None
