"""What docs/clients.md says of single clients, beside what `test_coding_agents.py` runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from examples.day.npm import npm
from tests.gateway.test_agent_texts import type_all
from tests.gateway.test_coding_agents import BASH, KEY, NOTE, READ, TYPED
from tests.gateway.test_openclaw import scripted
from tests.support import client_pages
from tests.support.coding_agents import LLM, WINDOW, Aider, ClaudeCode
from tests.support.gateways import World, gateway
from tests.support.ledger import sql
from tinker_claw.render.renderer import Renderer
from tinker_claw.served import RequestKind
from tinker_claw.types import Kind

real = pytest.mark.skipif(npm() is None, reason="npm is not installed: no agent can be run")
HELLO, CORRECTED = "Hello, who are you?", "No, shorter please."
REPLIES = {HELLO: "I am the claw of a gateway.", CORRECTED: "Claw.", TYPED: "Yes."}
RECIPES = {"Claude Code", "Codex", "opencode", "Hermes Agent", "pi", "aider", "llm", "Continue"}
"""Sections whose blocks the drivers of `coding_agents` take."""


def test_every_recipe_of_the_page_is_run() -> None:
    assert client_pages.with_recipes() == RECIPES


@real
@pytest.mark.agents
@pytest.mark.slow
async def test_ten_messages_to_claude_code_need_no_compaction(
    tmp_path: Path, renderer: Renderer
) -> None:
    """On a terminal it takes commands that it does not know for its own."""
    talk = [HELLO, READ, *(f"Please count to {number}." for number in range(3, 11))]
    call = f"I look.\n<tool_call>\n{BASH}\n</tool_call>"
    replies = {HELLO: "I am Claw.", READ: call, NOTE: "Forty-two.", "count": "One, two."}
    sampler = scripted(renderer, replies)
    async with gateway(
        tmp_path / "data", renderer, sampler, api_key=KEY, context_tokens=WINDOW
    ) as world:
        agent = ClaudeCode.create(tmp_path / "home", world.url, "demo", KEY)
        (agent.workspace / "notes.txt").write_text(NOTE)
        with agent.at_a_terminal() as typist:
            await asyncio.to_thread(type_all, typist, world, sampler, talk)
            refused = "Unknown command"
            await asyncio.to_thread(typist.types, TYPED, lambda: refused in typist.screen)

        assert RequestKind.COMPACTION not in world.column("request_kind")
        asked = [turn.request_text for turn in world.turns() if turn.kind is Kind.MAIN]
        assert asked == [HELLO, READ, *talk[1:]]
        assert ratings(world) == []


@pytest.mark.agents
@pytest.mark.slow
async def test_llm_continues_and_rates(tmp_path: Path, renderer: Renderer) -> None:
    sampler = scripted(renderer, REPLIES)
    async with gateway(
        tmp_path / "data", renderer, sampler, api_key=KEY, context_tokens=WINDOW
    ) as world:
        agent = LLM.create(tmp_path / "home", world.url, "demo", KEY)
        for said, reply in REPLIES.items():
            assert await asyncio.to_thread(agent.say, said) == reply
        (session,) = {turn.session_id for turn in world.turns()}
        assert session
        assert ratings(world) == [-1.0]


@pytest.mark.agents
@pytest.mark.slow
async def test_aider_keeps_commands_to_itself(tmp_path: Path, renderer: Renderer) -> None:
    sampler = scripted(renderer, REPLIES)
    async with gateway(
        tmp_path / "data", renderer, sampler, api_key=KEY, context_tokens=WINDOW
    ) as world:
        agent = Aider.create(tmp_path / "home", world.url, "demo", KEY)
        shown = await asyncio.to_thread(agent.talk, HELLO, TYPED, CORRECTED)
        assert "Invalid command: /bad" in shown
        assert [turn.request_text for turn in world.turns()] == [HELLO, CORRECTED]
        assert ratings(world) == []


def ratings(world: World) -> list[float]:
    db = sql(world.ledger)
    return [row["score"] for row in db.rows("SELECT score FROM feedback")]
