"""Stock OpenClaw from npm, with nothing but a provider block, against the gateway it would meet."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest

from tests.fakes import FakeSampler, Script
from tests.gateways import World, gateway, spell
from tests.openclaw import OpenClaw, npm
from tests.processes import product
from tinker_claw.render import Renderer
from tinker_claw.sessions import Call
from tinker_claw.types import NextState, SamplingParams, Tokens, Turn

pytestmark = [
    pytest.mark.openclaw,
    pytest.mark.slow,
    pytest.mark.skipif(npm() is None, reason="npm is not installed: OpenClaw cannot be run"),
]

MESSAGES = ("Hello, who are you?", "What is 3 + 4?", "Thanks, that is great.")
SLOW_S = 62
"""To the first token. The agent gives up earlier, unless it is shown signs of life."""
GIVES_UP_S = 30


def test_three_turns_land_in_the_ledger_of_the_running_product(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with product(data) as running:
        claw = OpenClaw.create(tmp_path / "user", running.url, "demo")
        for message in MESSAGES:
            started = time.monotonic()
            assert claw.say("first", message)
            assert time.monotonic() - started < 90, "a turn, OpenClaw's own start included"
        assert running.health()["policy_version"] == 0
        assert running.stop() == 0

    ledger = sqlite3.connect(data / "ledger.sqlite3")
    ledger.row_factory = sqlite3.Row
    main = ledger.execute("SELECT * FROM turns WHERE kind = 'main' ORDER BY id").fetchall()
    assert len({turn["session_id"] for turn in main}) == 1
    assert [turn["idx"] for turn in main] == list(range(len(main)))
    said = [turn["request_text"] for turn in main]
    assert [text for text in dict.fromkeys(said) if text in MESSAGES] == list(MESSAGES)
    assert said[0] == MESSAGES[0], "timestamp and Runtime line are not the user's words"

    answered = {row["turn_id"]: row for row in ledger.execute("SELECT * FROM next_states")}
    assert all(turn["id"] in answered for turn in main[:-1])
    assert answered[main[-2]["id"]]["text"] == MESSAGES[2]
    assert main[-1]["id"] not in answered

    opening, following = main[0], main[1]
    assert opening["prompt_tokens"] > 5_000, "OpenClaw's own system prompt and tools"
    assert following["cached_tokens"] > 0.8 * opening["prompt_tokens"], "the prefix is reused"
    assert all(turn["kind_reason"] for turn in main)
    ledger.close()


class Listener(FakeSampler):
    """Answers what was said last. Each saying has its scripts, the last of which is for ever."""

    def __init__(self, renderer: Renderer, answers: dict[str, list[Script | Tokens]]) -> None:
        super().__init__((0,))
        self._renderer = renderer
        self._answers_to = {saying: FakeSampler(*scripts) for saying, scripts in answers.items()}
        self.heard: list[str] = []
        """What was said last, of every prompt."""

    def _take(self, prompt: Tokens, params: SamplingParams) -> Script:
        said = [
            part
            for part in self._renderer.decode(prompt).split("<|im_start|>")
            if part.startswith("user\n") and "BEGIN_OPENCLAW_INTERNAL_CONTEXT" not in part
        ][-1]
        self.heard.append(said)
        self.prompts.append(tuple(prompt))
        (sampler,) = [s for saying, s in self._answers_to.items() if saying in said]
        return sampler._take(prompt, params)


TALK = "Hello, who are you?", "Please read notes.txt for me.", "Thanks, that is great."
NOTE = "The number in the note is forty-two."
TROUBLE = "Tell me about bees.", "And about wasps?"
WAIT = "Take your time with this one."


def answers(renderer: Renderer) -> dict[str, list[Script | Tokens]]:
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "notes.txt"}}\n</tool_call>'
    bees = spell(renderer, "Bees dance in the dark.")
    return {
        TALK[0]: [spell(renderer, "I am Claw.")],
        TALK[1]: [spell(renderer, f"I will look.\n{call}")],
        f"<tool_response>\n{NOTE}": [spell(renderer, "It says forty-two.")],
        TALK[2]: [spell(renderer, "You are welcome.")],
        WAIT: [Script(spell(renderer, "Here it is."), first_after_s=SLOW_S)],
        TROUBLE[0]: [
            *[Script(bees, away_after=0)] * 3,
            Script(bees, fail_after=0),
            Script(bees, fail_after=3),
            bees[3:],
        ],
        TROUBLE[1]: [spell(renderer, "Wasps do not.")],
    }


async def test_agent_hears_of_no_trouble_and_no_session_of_another(
    tmp_path: Path, renderer: Renderer
) -> None:
    """Three users at once: one with a tool, one whose model is slow, one whose model breaks."""
    sampler = Listener(renderer, answers(renderer))

    async with gateway(tmp_path / "data", renderer, sampler, context_tokens=65536) as world:
        heard = await asyncio.gather(
            converse(world, tmp_path / "talk", *TALK),
            converse(world, tmp_path / "wait", WAIT),
            converse(world, tmp_path / "trouble", *TROUBLE),
        )
        assert heard == [
            ["I am Claw.", "It says forty-two.", "You are welcome."],
            ["Here it is."],
            ["Bees dance in the dark.", "Wasps do not."],
        ]
        sessions = {
            row["key"]: row["id"] for row in world.ledger._db.rows("SELECT id, key FROM sessions")
        }
        assert set(sessions) == {"talk", "wait", "trouble"}
        talk, wait, trouble = (story(world, sessions[n]) for n in ("talk", "wait", "trouble"))
        assert [turn.request_text for turn, _ in talk] == [TALK[0], TALK[1], TALK[1], TALK[2]]
        assert [state and state.role for _, state in talk] == ["user", "tool", "user", None]
        assert [state and state.text.splitlines()[-1] for _, state in talk] == [
            *(TALK[1], NOTE, TALK[2], None),
        ]
        assert talk[2][0].reply_text == "It says forty-two."
        assert [(t.request_text, t.reply_text) for t, _ in wait] == [(WAIT, "Here it is.")]
        assert [state and state.text for _, state in trouble] == [TROUBLE[1], None]
        assert trouble[0][0].reply_text == "Bees dance in the dark."
        assert len([text for text in sampler.heard if TROUBLE[0] in text]) == 6
        rewritten = [t for t in map(renderer.decode, sampler.prompts) if "[Queued user me" in t]
        assert rewritten == [], "OpenClaw has never tried anything again"
        did = dict(zip([t.id for t in world.turns()], called(world), strict=True))
        assert [did[t.id][0] for t, _ in talk] == [Call.USER, Call.USER, Call.TOOL, Call.USER]
        traces = [did[t.id][1] for t, _ in talk]
        assert traces[1] == traces[2], "one run of the agent: the tool and what it said of it"
        assert len(set(traces)) == 3
        assert {did[t.id][0] for t, _ in wait + trouble} == {Call.USER}
        assert set(world.column("kind")) == {"main"}
        assert set(world.column("untrained_because")) == {None}


async def converse(world: World, home: Path, *messages: str) -> list[str]:
    """One user and his OpenClaw; the session is named like his folder."""
    claw = OpenClaw.create(home, world.url, "demo", gives_up_s=GIVES_UP_S)
    (home / "workspace" / "notes.txt").write_text(NOTE)
    return [await asyncio.to_thread(claw.say, home.name, message) for message in messages]


def called(world: World) -> list[tuple[str, str]]:
    """What every turn was for, and its trace."""
    return list(zip(world.column("call"), world.column("trace"), strict=True))


def story(world: World, session: int) -> list[tuple[Turn, NextState | None]]:
    return [
        (turn, world.ledger.turns.next_state(turn.id))
        for turn in world.turns()
        if turn.session_id == session
    ]
