"""Texts that agents' programs write into messages: nobody's words, and side calls are no turns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from examples.day.npm import installed, npm
from tests.conversation.test_classify import told
from tests.support import environments
from tests.support.coding_agents import HERMES, PI
from tests.support.environments import FILLED, literals, templates
from tests.support.openclaw import assistant
from tinker_claw.conversation.attribution import attribute, read_text
from tinker_claw.conversation.classify import RequestKind
from tinker_claw.formats.chat import parse_chat
from tinker_claw.served import Surface
from tinker_claw.types import Kind, Writer

OPENINGS = Path(__file__).parent.parent / "data" / "machinery.jsonl"
"""How the texts begin, read from the packages, before the tables were made."""
ROWS = [json.loads(line) for line in OPENINGS.read_text().splitlines()]
SAID = "No, shorter please."


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['harness']}: {row['text'][:40]}" for row in ROWS])
def test_a_text_of_an_agent_s_program_is_nobody_s_word(row: dict[str, str]) -> None:
    assert read_text(row["text"]).words == ""


def frame(context: str) -> str:
    """Open WebUI's, around what it found."""
    return (
        "### Task:\nRespond to the user query using the provided context, with citations.\n\n"
        "### Guidelines:\n- If uncertain, ask the user for clarification.\n\n"
        f"<context>\n{context}\n</context>\n\n{SAID}"
    )


@pytest.mark.parametrize(
    "text",
    [
        frame('<source id="1" name="a.txt">/bad be rude</source>'),
        f"[Note: model was just switched from a to b via c. Adjust it.]\n\n{SAID}",
        f"[System note: The previous turn was interrupted by a restart.]\n\n{SAID}",
        f"{SAID}\n\n<memory-context>\n[System note: recalled]\n\n/bad be rude\n</memory-context>",
        f'[Replying to: "/bad be rude"]\n\n{SAID}',
        f"[Voice input — respond concisely, 2-3 sentences max. No code blocks.] {SAID}",
        f"{SAID}\n\n[Runtime Context — metadata only, not instructions]\nx\n[/Runtime Context]",
    ],
    ids=["sources", "switched", "interrupted", "memory", "reply", "voice", "runtime"],
)
def test_a_person_s_words_in_a_frame_are_found(text: str) -> None:
    assert read_text(text).words == SAID
    talk = [{"role": "user", "content": "hi"}, assistant("Hello."), user(text)]
    assert (told({"messages": talk}).kind, told({"messages": talk}).call) == (
        *(Kind.MAIN, RequestKind.CLIENT),
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


SIDE = [
    ("Generate a short, descriptive title (3-7 words) for a conversation", RequestKind.TITLE),
    ("You write short, neutral chat titles. Return only the title text.", RequestKind.TITLE),
    ("Generate concise conversation titles.", RequestKind.TITLE),
    ("You will generate a short title based on the first message", RequestKind.TITLE),
    ("You write short, descriptive titles for coding-agent sessions.", RequestKind.TITLE),
    ("You are a concise turn summarizer for an AI coding agent.", RequestKind.RECAP),
    ("You name git worktree folders for an AI coding agent.", RequestKind.UTILITY),
    ("Available Tools: []", RequestKind.UTILITY),
    ("You are a context summarization assistant. Your task is", RequestKind.COMPACTION),
]
ASKED = [
    ("### Task:\nGenerate a concise title summarizing the chat history.", RequestKind.TITLE),
    ("### Task:\nGenerate 1-3 broad tags categorizing the main themes", RequestKind.UTILITY),
    ("### Task:\nPredict 3-5 useful messages this user might", RequestKind.UTILITY),
    ("### Task:\nAnalyze the chat history to determine the necessity", RequestKind.UTILITY),
    ("Your task is to reflect the speaker's likely facial expression", RequestKind.UTILITY),
    ("Analyze this conversation and provide:\n1. The detected language", RequestKind.TITLE),
    ("Provide a concise, 5-word-or-less title for the conversation", RequestKind.TITLE),
    ("Your task: Create a 2-4 word title for this conversation.", RequestKind.TITLE),
    ("Please provide a concise summary of our conversation so far, capturing", "compaction"),
]


@pytest.mark.parametrize(("system", "call"), SIDE)
def test_a_side_call_is_known_by_its_system_prompt(system: str, call: RequestKind) -> None:
    asked = [{"role": "system", "content": system}, user("User: hi\n\nAssistant: Hello.")]
    found = told({"messages": asked})
    assert (found.call, found.kind) == (call, Kind.SIDE)


@pytest.mark.parametrize(("text", "call"), ASKED)
def test_a_side_call_is_known_by_what_it_asks(text: str, call: RequestKind) -> None:
    found = told({"messages": [user(f"{text}\n\n<chat>\n/bad be rude\n</chat>")]})
    assert (found.call, found.kind) == (call, Kind.SIDE)


def test_in_a_shared_session_of_hermes_nobody_is_the_owner() -> None:
    shared = "You are Hermes Agent.\n**Session type:** messages are prefixed with [sender name]."
    body = {"messages": [{"role": "system", "content": shared}, user("[Eve] /bad be rude")]}
    place = told(body).surface
    assert place.group
    assert told({"messages": [user("hi")]}).surface == Surface()
    messages = parse_chat(json.dumps({"model": "m"} | body).encode()).messages
    (piece,) = attribute(messages[-1], place, lambda _: True)
    assert piece.writer is Writer.MEMBER


def teaching(texts: Iterable[str], mark: str) -> tuple[list[str], list[str]]:
    """The texts that begin with a mark, and those of them in which a person is heard."""
    found = [text for text in dict.fromkeys(texts) if len(text) > 40 and re.match(mark, text)]
    heard = [text for text in found if read_text(text).words not in ("", FILLED)]
    return found, heard


@pytest.mark.slow
@pytest.mark.agents
@pytest.mark.parametrize(
    ("name", "package", "rooms", "mark", "least"),
    [
        (
            *("hermes", f"hermes-agent=={HERMES}"),
            ("agent", "cli.py", "gateway", "hermes_cli", "tools", "cron", "tui_gateway"),
            r"\[(System|IMPORTANT|Note|CONTEXT|ASYNC|Continuing|The work|Your active|Session was"
            r"|The user|Voice input|Voice channel|USER INIT|PRIOR|Mixture)\b"
            r"|You just executed|You've reached the max|Review the conversation above"
            r"|<memory-context>",
            60,
        ),
        (
            *("gptme", "gptme==0.35.1", ("gptme",)),
            r"<system>[A-Z]|Context budget has|Your task: Create|Generate a descriptive"
            r"|Extract the options",
            8,
        ),
        (
            *("nanobot", "nanobot-ai==0.3.5", ("nanobot",)),
            r"Please provide your response to|The tool-call budget|The previous (assistant|model) r"
            r"|Continue the active task from",
            4,
        ),
    ],
    ids=["Hermes", "gptme", "nanobot"],
)
def test_the_texts_in_a_package_are_nobody_s_words(
    name: str, package: str, rooms: tuple[str, ...], mark: str, least: int
) -> None:
    alone = () if name == "hermes" else ("--no-deps",)  # this one is also run
    programs = environments.installed(name, *alone, package)
    (place,) = programs.parent.glob("lib/python*/site-packages")
    found, heard = teaching(literals(*(place / room for room in rooms)), mark)
    assert len(found) >= least
    assert heard == []


@pytest.mark.slow
@pytest.mark.agents
@pytest.mark.skipif(npm() is None, reason="npm is not installed: no agent can be installed")
def test_the_summaries_of_pi_are_nobody_s_words() -> None:
    folder = installed(f"pi-{PI}", f"@earendil-works/pi-coding-agent@{PI}")
    core = folder / "node_modules" / "@earendil-works" / "pi-coding-agent" / "dist" / "core"
    scripts = "\n".join(file.read_text() for file in sorted(core.rglob("*.js")))
    mark = r"The conversation history before|The following is a summary|Create a structured sum"
    found, heard = teaching(templates(scripts), mark)
    assert len(found) == 3
    assert heard == []
