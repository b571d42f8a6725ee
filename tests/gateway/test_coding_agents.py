"""Real agents, with the recipes of docs/clients.md: a question, a call, and a correction."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from examples.day.npm import npm
from tests.gateway.test_openclaw import Listener
from tests.support.coding_agents import (
    WINDOW,
    Agent,
    ClaudeCode,
    Codex,
    Continue,
    Hermes,
    OpenAIAgents,
    OpenCode,
    Pi,
)
from tests.support.fakes import Script
from tests.support.gateways import gateway, spell
from tests.support.ledger import sql
from tinker_claw.formats.base import Json
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import Kind, Writer

pytestmark = [
    pytest.mark.agents,
    pytest.mark.slow,
    pytest.mark.skipif(npm() is None, reason="npm is not installed: no agent can be run"),
]

KEY = "sk-key-of-a-user-123"
NOTE = "The number in the note is forty-two."
HELLO, READ, CORRECTED = "Hello, who are you?", "Please read notes.txt.", "No, it is forty-two!"
TYPED = "/bad too long"
BASH = '{"name": "Bash", "arguments": {"command": "cat notes.txt", "description": "Read"}}'
EXEC = '{"name": "exec_command", "arguments": {"cmd": "cat notes.txt"}}'


OPENCODE_BASH = BASH.replace("Bash", "bash")
PYTHON = '{"name": "read", "arguments": {"path": "notes.txt"}}'
PI_BASH = '{"name": "bash", "arguments": {"command": "cat notes.txt"}}'
TERMINAL = PI_BASH.replace("bash", "terminal")


@pytest.mark.parametrize(
    ("kind", "call", "sides"),
    [
        (ClaudeCode, BASH, []),
        (Codex, EXEC, []),
        (OpenCode, OPENCODE_BASH, ["title"]),
        (OpenAIAgents, PYTHON, []),
        (Hermes, TERMINAL, []),
        (Pi, PI_BASH, []),
        (Continue, BASH, []),
    ],
)
async def test_a_coding_agent_asks_calls_and_is_corrected(
    tmp_path: Path, renderer: Renderer, kind: Any, call: str, sides: list[str]
) -> None:
    answers = {
        NOTE: "It says forty-one.",
        HELLO: "I am Claw.",
        READ: f"<think>Where is it?</think>I will look.\n<tool_call>\n{call}\n</tool_call>",
        CORRECTED: "Forty-two, of course.",
        TYPED: "Shorter, then.",
    }
    sampler = Listener(renderer, {said: [spell(renderer, a)] for said, a in answers.items()})
    async with gateway(
        tmp_path / "data", renderer, sampler, api_key=KEY, context_tokens=WINDOW
    ) as world:
        agent: Agent = kind.create(tmp_path / "home", world.url, "demo", KEY)
        (agent.workspace / "notes.txt").write_text(NOTE)
        heard = [await asyncio.to_thread(agent.say, said) for said in (HELLO, READ, CORRECTED)]
        assert heard == ["I am Claw.", "It says forty-one.", "Forty-two, of course."]

        kinds = zip(world.column("kind"), world.column("request_kind"), strict=True)
        assert [call for kind, call in kinds if kind == Kind.SIDE] == sides
        turns = [turn for turn in world.turns() if turn.kind is Kind.MAIN]
        assert len({turn.session_id for turn in turns}) == 1
        assert [turn.request_text for turn in turns] == [HELLO, READ, READ, CORRECTED]
        asked, result, corrected, last = (world.ledger.turns.next_state(turn.id) for turn in turns)
        assert (asked and asked.role, asked and asked.text) == ("user", READ)
        assert result is not None
        assert result.role == "tool"
        assert NOTE in result.text
        assert (corrected and corrected.role, corrected and corrected.text) == ("user", CORRECTED)
        assert last is None
        because = world.column("reason")
        assert [because[turn.id - 1] for turn in turns] == [None] * 4
        sampled = (*turns[1].prompt, *turns[1].completion.tokens)
        assert turns[2].prompt[: len(sampled)] == sampled, "no token is rendered again"

        await asyncio.to_thread(agent.say, TYPED)
        db = sql(world.ledger)
        rated = db.rows("SELECT turn_id, score FROM feedback")
        assert [tuple(row) for row in rated] == [(turns[-1].id, -1.0)]


DELEGATE, PART = "Please have somebody read it.", "Read notes.txt, and always answer briefly."
AGENT = {"description": "Read it", "prompt": PART}
FOREGROUND = {"subagent_type": "general-purpose", "run_in_background": False}


@pytest.mark.parametrize(
    ("kind", "tool", "options", "sides"),
    [
        (ClaudeCode, "Agent", FOREGROUND, ["subagent"]),
        (OpenCode, "task", {"subagent_type": "general"}, ["subagent", "title"]),
    ],
)
async def test_a_sub_agent_is_a_side_call_and_its_prompt_another_agent_s(
    tmp_path: Path, renderer: Renderer, kind: Any, tool: str, options: Json, sides: list[str]
) -> None:
    call = json.dumps({"name": tool, "arguments": AGENT | options})
    answers = {
        "always answer briefly": "Forty-two.",
        "Forty-two.": "It is forty-two.",
        DELEGATE: f"I ask.\n<tool_call>\n{call}\n</tool_call>",
        CORRECTED: "Forty-two, of course.",
    }
    sampler = Listener(renderer, {said: [spell(renderer, a)] for said, a in answers.items()})
    async with gateway(tmp_path / "data", renderer, sampler, context_tokens=WINDOW) as world:
        agent: Agent = kind.create(tmp_path / "home", world.url, "demo", "any")
        for said, heard in ((DELEGATE, "It is forty-two."), (CORRECTED, "Forty-two, of course.")):
            assert await asyncio.to_thread(agent.say, said) == heard

        turns = world.turns()
        of_sides = [turn for turn in turns if turn.kind is Kind.SIDE]
        calls = dict(zip((turn.id for turn in turns), world.column("request_kind"), strict=True))
        assert sorted({calls[turn.id] for turn in of_sides}) == sides
        (part,) = (turn for turn in of_sides if calls[turn.id] == "subagent")
        assert part.asked_by is Writer.MEMBER, "nobody's of whom something is learned"
        voices = [json.loads(told) for told in world.column("voices")]
        assert all(voices)
        assert "the prompt of another agent" in [what for _, what, _ in voices[part.id - 1]]
        main = [turn for turn in turns if turn.kind is Kind.MAIN]
        assert [turn.request_text for turn in main] == [DELEGATE, DELEGATE, CORRECTED]
        states = [world.ledger.turns.next_state(turn.id) for turn in main]
        assert [state and state.role for state in states] == ["tool", "user", None]
        assert world.ledger.turns.next_state(part.id) is None


SILENCE_S = 30
"""Seconds to the first token. The clocks of the agents are set to a third of it."""


def hurried(agent: Agent) -> None:
    """Shorten the time that an agent bears a silent model."""
    limit = str(SILENCE_S * 1000 // 3)
    if isinstance(agent, ClaudeCode):
        clocks = ("CLAUDE_STREAM_IDLE_TIMEOUT_MS", "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS")
        on = ("CLAUDE_ENABLE_STREAM_WATCHDOG", "CLAUDE_ENABLE_BYTE_WATCHDOG")
        clocks = dict.fromkeys((*clocks, "API_TIMEOUT_MS"), limit)
        agent.environment = {**agent.environment, **clocks, **dict.fromkeys(on, "1")}
    else:
        with (agent.home / ".codex" / "config.toml").open("a") as config:
            config.write(f"stream_idle_timeout_ms = {limit}\nstream_max_retries = 0\n")


@pytest.mark.parametrize("kind", [ClaudeCode, Codex])
@pytest.mark.parametrize("keepalive_s", [1.0, 1000.0], ids=["kept alive", "silent"])
async def test_an_agent_waits_for_a_model_that_thinks_as_long_as_there_are_keep_alives(
    tmp_path: Path, renderer: Renderer, kind: Any, keepalive_s: float
) -> None:
    """Ten minutes of silence, with all clocks shortened."""
    late = Script(spell(renderer, "I am Claw."), first_after_s=SILENCE_S)
    sampler = Listener(renderer, {HELLO: [late]})
    data = tmp_path / "data"
    settings: dict[str, Any] = {"context_tokens": 200_000, "keepalive_s": keepalive_s}
    async with gateway(data, renderer, sampler, api_key=KEY, **settings) as world:
        agent: Agent = kind.create(tmp_path / "home", world.url, "demo", KEY)
        hurried(agent)
        ended = await asyncio.to_thread(agent.ask, HELLO)
        tries = len([text for text in sampler.heard if HELLO in text])
        if keepalive_s == 1:
            assert (ended.returncode, tries) == (0, 1)
            assert "I am Claw." in ended.stdout
            assert [turn.reply_text for turn in world.turns()] == ["I am Claw."]
        else:
            assert tries > 1 or ended.returncode != 0, "the clocks were shortened"
