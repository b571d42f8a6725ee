"""Texts that coding agents add to their requests, in runs of the real agents.

Compactions, titles, memory and nudges are nobody's turns and nobody's next states. An agent without
a row in the table is told from its user only with `--agents listed`, see `test_who_speaks.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.day.npm import npm
from tests.gateway.test_openclaw import Listener
from tests.support.coding_agents import (
    Aider,
    ClaudeCode,
    Cline,
    Codex,
    Hermes,
    OpenCode,
    Pi,
    QwenCode,
    Typist,
)
from tests.support.gateways import World, gateway, spell
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import Kind, NextState, Turn

pytestmark = [
    pytest.mark.agents,
    pytest.mark.slow,
    pytest.mark.skipif(npm() is None, reason="npm is not installed: no agent can be run"),
]

KEY = "sk-key-of-a-user-123"
WINDOW = 200_000
NOTE = "The number in the note is forty-two."
HELLO, ASKED = "Hello, who are you?", "What is forty plus two?"
CORRECTED, PRAISED = "No, it is forty-two!", "That is what I wanted."
READ = "Please read notes.txt."
TALK = HELLO, ASKED, CORRECTED, PRAISED
REPLIES = {
    HELLO: "I am Claw.",
    ASKED: "It is forty-three.",
    CORRECTED: "Forty-two, of course.",
    PRAISED: "You are welcome.",
}
SUMMARY = "They asked for forty plus two."
MEMORY = "There is nothing to save."
ASKED_TO_SUM_UP = {
    # Last message of a request for a summary, by its opening, with the answer.
    "CRITICAL: Respond with TEXT ONLY": f"<analysis>Well.</analysis>\n<summary>{SUMMARY}</summary>",
    "You are performing a CONTEXT CHECKPOINT": SUMMARY,
    "Here is the conversation so far:": SUMMARY,
    "<conversation>\n[User]: ": SUMMARY,
    "You are the component that summarizes": (
        f"<analysis>Well.</analysis>\n<state_snapshot>{SUMMARY}</state_snapshot>"
    ),
    "Summarize this session for continuation.": SUMMARY,
    "You are a summarization agent creating": SUMMARY,
}
ASKED_FOR_MEMORY = {"Managed memory has TWO directories.": MEMORY}


@pytest.mark.parametrize("kind", [ClaudeCode, Codex, OpenCode, Pi])
async def test_words_after_a_compaction_answer_the_turn_before_it(
    tmp_path: Path, renderer: Renderer, kind: Any
) -> None:
    """Sums up in the middle of a talk, because the user says so. (qwen-code names no session, and
    nothing that is left of the talk tells it.)"""
    replies = ASKED_TO_SUM_UP | ASKED_FOR_MEMORY | REPLIES
    async with started(kind, tmp_path, renderer, replies) as (world, agent):
        await hears(agent, HELLO, ASKED)
        await asyncio.to_thread(agent.compact)
        await hears(agent, CORRECTED, PRAISED)

        assert any(SUMMARY in turn.reply_text for turn in world.turns()), "it was summed up"
        assert_only_words_count(world, TALK)


MENTIONED = "What is in @notes.txt here?"


@pytest.mark.parametrize("kind", [ClaudeCode, Codex, OpenCode, QwenCode])
async def test_what_stands_beside_the_words_is_not_said(
    tmp_path: Path, renderer: Renderer, kind: Any
) -> None:
    """Instructions of a project, a file that is mentioned, a mode that changes."""
    replies = ASKED_FOR_MEMORY | REPLIES | {MENTIONED: "It says forty-one.", NOTE: "Well."}
    async with started(kind, tmp_path, renderer, replies) as (world, agent):
        (agent.workspace / "notes.txt").write_text(NOTE)
        for name in ("AGENTS.md", "CLAUDE.md", "QWEN.md"):
            (agent.workspace / name).write_text("Always speak plainly.\n")
        if isinstance(agent, OpenCode):
            agent.mode = "plan"
        await asyncio.to_thread(agent.say, HELLO)
        if isinstance(agent, OpenCode):
            agent.mode = "build"
        for message in (MENTIONED, CORRECTED, PRAISED):
            await asyncio.to_thread(agent.say, message)

        assert_only_words_count(world, (HELLO, MENTIONED, CORRECTED, PRAISED))


async def test_qwen_code_keeps_its_session_although_its_date_moves_and_trains_no_memory(
    tmp_path: Path, renderer: Renderer
) -> None:
    """The memory agent reads the whole talk, and calls tools of its own."""
    looks = '{"name": "glob", "arguments": {"pattern": "*.txt"}}'
    memory = [f"I look.\n<tool_call>\n{looks}\n</tool_call>", MEMORY]
    replies = REPLIES | {"No files found": MEMORY}
    scripts = dict.fromkeys(ASKED_FOR_MEMORY, memory)
    async with started(QwenCode, tmp_path, renderer, replies, scripts) as (world, agent):
        await hears(agent, *TALK)

        assert MEMORY in [turn.reply_text for turn in world.turns()]
        assert_only_words_count(world, TALK)


RUN = '{"name": "run_commands", "arguments": {"commands": ["cat notes.txt"]}}'
SUMS_UP = '"summary": "I have read the note, and it says forty-two.", "verified": true'
END = f'{{"name": "submit_and_exit", "arguments": {{{SUMS_UP}}}}}'
WORK = [
    f"I will look.\n<tool_call>\n{RUN}\n</tool_call>",
    "It says forty-two.",
    "It says forty-two, as I said.",
    f"I end.\n<tool_call>\n{END}\n</tool_call>",
]


async def test_nudges_of_cline_are_nobodys_words(tmp_path: Path, renderer: Renderer) -> None:
    """The first stands behind the user's own words; one more follows every reply without a call."""
    async with started(Cline, tmp_path, renderer, {}, {"": WORK}) as (world, agent):
        (agent.workspace / "notes.txt").write_text(NOTE)
        await asyncio.to_thread(agent.say, READ)

        turns = world.turns()
        assert len(turns) == 4
        assert [turn.request_text for turn in turns[:2]] == [READ, READ]
        assert [turn.id for turn in trainable(world)] == [turn.id for turn in turns[:2]]
        states = [next_state(world, turn) for turn in turns]
        assert states[0] is not None
        assert states[0].role == "tool"
        assert NOTE in states[0].text
        assert [state for state in states[1:] if state and state.role == "user"] == []


TITLE = '{"title": "A sum"}'


async def test_titles_that_claude_code_asks_for_on_a_terminal_are_refused_and_no_turns(
    tmp_path: Path, renderer: Renderer
) -> None:
    """It asks for one beside every turn, with the user's words in it, that fits a schema."""
    replies = {"<session>": TITLE} | ASKED_TO_SUM_UP | REPLIES
    async with started(ClaudeCode, tmp_path, renderer, replies) as (world, agent):
        agent.asks_for_titles = True
        talk = (HELLO, ASKED, "/compact", CORRECTED, PRAISED)
        with agent.at_a_terminal() as typist:
            await asyncio.to_thread(type_all, typist, world, world.sampler, talk)

        replies = [turn.reply_text for turn in world.turns()]
        assert TITLE not in replies, "a title must fit a schema"
        assert any(SUMMARY in reply for reply in replies), "it was summed up"
        assert_only_words_count(world, TALK)


async def test_words_after_a_compaction_of_hermes_answer_the_turn_before_it(
    tmp_path: Path, renderer: Renderer
) -> None:
    """It keeps the first messages and the last, and names no session."""
    title = {f"Assistant: {REPLIES[HELLO]}": "A sum"}
    count = {f"Please count to {number}.": "One, two." for number in ("two", "six")}
    replies = title | ASKED_TO_SUM_UP | REPLIES | count
    async with started(Hermes, tmp_path, renderer, replies) as (world, agent):
        talk = (HELLO, *count, ASKED, CORRECTED, PRAISED)
        with agent.at_a_terminal() as typist:
            typed = (*talk[:-2], "/compress", *talk[-2:])
            await asyncio.to_thread(type_all, typist, world, world.sampler, typed)

        assert any(SUMMARY in turn.reply_text for turn in world.turns()), "it was summed up"
        assert_only_words_count(world, talk)


async def test_summary_of_cline_on_a_terminal_is_nobodys_word(
    tmp_path: Path, renderer: Renderer
) -> None:
    """It names no session, so the talk behind a summary is another one."""
    replies = ASKED_TO_SUM_UP | REPLIES
    async with started(Cline, tmp_path, renderer, replies) as (world, agent):
        talk = (HELLO, ASKED, "/compact", CORRECTED, PRAISED)
        with agent.at_a_terminal() as typist:
            await asyncio.to_thread(type_all, typist, world, world.sampler, talk)

        assert SUMMARY in [turn.reply_text for turn in world.turns()]
        assert [turn.request_text for turn in trainable(world)] == [*TALK]
        assert of_users(world) <= {*TALK}


DONE = f"notes.txt\n```\n{NOTE}\n```"
CHANGE = "Please change the number."


ASIDES = {"# Diffs:": "Set the number", "# ASSISTANT": "I asked you to set the number."}
"""Further requests of aider: for a commit message, and for a summary of the talk."""


@pytest.mark.parametrize("kept", [None, 20])
async def test_words_to_aider_are_told_from_files_reminders_and_side_calls(
    tmp_path: Path, renderer: Renderer, kept: int | None
) -> None:
    """It edits and commits; files stand between the turns, and a summary where it keeps few."""
    replies = ASIDES | REPLIES | {CHANGE: f"I change it.\n\n{DONE}\n"}
    async with started(Aider, tmp_path, renderer, replies) as (world, agent):
        (agent.workspace / "notes.txt").write_text(NOTE.replace("two", "one"))
        talk = HELLO, CHANGE, CORRECTED, PRAISED
        options = {} if kept is None else {"max_chat_history_tokens": kept}
        await asyncio.to_thread(lambda: agent.talk(*talk, files=["notes.txt"], **options))
        assert (agent.workspace / "notes.txt").read_text().strip() == NOTE

        replies = {turn.reply_text for turn in world.turns()}
        assert [said in replies for said in ASIDES.values()] == [True, kept is not None]
        assert_only_words_count(world, talk)


async def test_what_aider_says_of_an_edit_that_failed_is_not_said_by_its_user(
    tmp_path: Path, renderer: Renderer
) -> None:
    bad = "notes.txt\n```\n<<<<<<< SEARCH\nNothing like it.\n=======\nIt.\n>>>>>>> REPLACE\n```\n"
    failed = {"failed to match!": "I cannot."}
    replies = ASIDES | failed | REPLIES | {CHANGE: f"I change it.\n\n{bad}"}
    async with started(Aider, tmp_path, renderer, replies) as (world, agent):
        (agent.workspace / "notes.txt").write_text(NOTE)
        talk = HELLO, CHANGE, PRAISED
        await asyncio.to_thread(lambda: agent.talk(*talk, files=["notes.txt"], edit_format="diff"))

        assert "I cannot." in [turn.reply_text for turn in world.turns()]
        assert of_users(world) <= {*talk}
        asked = [turn.request_text for turn in trainable(world)]
        assert [text for text in asked if text in talk] == list(talk)
        assert not any("failed to match" in text for text in asked)


def listens(
    renderer: Renderer, replies: dict[str, str], scripts: dict[str, list[str]] | None = None
) -> Listener:
    """A model that replies to the last message, to each with one script or with several in
    order."""
    answers = {said: [text] for said, text in replies.items()} | (scripts or {})
    return Listener(
        renderer, {said: [spell(renderer, text) for text in a] for said, a in answers.items()}
    )


def type_all(typist: Typist, world: World, sampler: Any, talk: Sequence[str]) -> None:
    """Type messages, each when the one before has its reply."""
    for message in talk:
        marks = ASKED_TO_SUM_UP if message.startswith("/") else (message,)
        typist.types(message, replied(world, sampler, marks))


def replied(world: World, sampler: Listener, marks: Collection[str]) -> Callable[[], bool]:
    """Whether a message with one of the marks was asked from now on, apart from titles, and
    everything asked is answered."""
    before = len(sampler.heard)

    def done() -> bool:
        heard = [text for text in sampler.heard[before:] if "<session>" not in text]
        asked = any(mark in text for text in heard for mark in marks)
        return asked and len(world.observer.seen) == len(sampler.heard)

    return done


@asynccontextmanager
async def started(
    kind: Any,
    tmp_path: Path,
    renderer: Renderer,
    replies: dict[str, str],
    scripts: dict[str, list[str]] | None = None,
) -> AsyncGenerator[tuple[World, Any]]:
    """Start a gateway, whose model answers as `listens` says, and an agent in front of it."""
    sampler = listens(renderer, replies, scripts)
    async with gateway(
        tmp_path / "data", renderer, sampler, api_key=KEY, context_tokens=WINDOW
    ) as world:
        yield world, kind.create(tmp_path / "home", world.url, "demo", KEY)


async def hears(agent: Any, *messages: str) -> None:
    """Say messages to an agent, and check its replies."""
    for message in messages:
        assert await asyncio.to_thread(agent.say, message) == REPLIES[message]


def assert_only_words_count(world: World, talk: Sequence[str]) -> None:
    """Check that the ledger has one session, in which each message of the user has a turn whose
    next state is the message that followed, and that nothing else is trained or a next state."""
    turns = trainable(world)
    assert [turn.request_text for turn in turns] == list(talk)
    assert len({turn.session_id for turn in turns}) == 1
    states = [next_state(world, turn) for turn in turns]
    assert [state and (state.role, state.text) for state in states] == [
        *(("user", said) for said in talk[1:]),
        None,
    ]
    assert of_users(world) == {*talk[1:]}


def trainable(world: World) -> list[Turn]:
    because = world.column("reason")
    turns = zip(world.turns(), because, strict=True)
    return [turn for turn, why in turns if turn.kind is Kind.MAIN and why is None]


def next_state(world: World, turn: Turn) -> NextState | None:
    return world.ledger.turns.next_state(turn.id)


def of_users(world: World) -> set[str]:
    """Next states that count as words of a user."""
    states = world.next_states().values()
    return {state.text for state in states if state is not None and state.role == "user"}
