"""Odd but honest messages: people speak of errors, tags, tools, agents and formats, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import MODEL, World, gateway
from tests.support.openclaw import TRACE, assistant, openclaw, user
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import Kind, NextState, Writer

DATA = Path(__file__).parent.parent / "data"
FINE = "fine"
Sent = tuple[str, dict[str, Any], dict[str, str]]
"""Path, body and headers of a request."""


def plain(said: str) -> Sent:
    talk = [
        {"role": "user", "content": "hi"},
        assistant(FINE),
        {"role": "user", "content": said},
    ]
    return "/chat/completions", {"messages": talk}, {}


def stamped(said: str) -> Sent:
    return "/chat/completions", openclaw("hi", assistant(FINE), user(said)), TRACE


def unstamped(said: str) -> Sent:
    """OpenClaw's over its own HTTP endpoint, which stamps nothing."""
    body = openclaw("hi", assistant(FINE), {"role": "user", "content": said})
    return "/chat/completions", body, TRACE


def claude_code(said: str) -> Sent:
    note = "<system-reminder>\nToday is Sunday.\n</system-reminder>\n"
    billing = "x-anthropic-billing-header: cc_version=2.1.330; cc_entrypoint=cli;"
    opening = "You are Claude Code, Anthropic's official CLI for Claude."
    talk = [
        {"role": "user", "content": texts(note, "hi")},
        {"role": "assistant", "content": texts(FINE)},
        {"role": "user", "content": texts(said)},
    ]
    body = {"system": texts(billing, opening), "messages": talk, "max_tokens": 99}
    return "/messages", body, {"user-agent": "claude-cli/2.1.330 (external, cli)"}


def codex(said: str) -> Sent:
    place = "<environment_context>\n  <cwd>/tmp</cwd>\n</environment_context>"
    items = [
        {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
        for role, kind, text in (
            ("user", "input_text", place),
            ("user", "input_text", "hi"),
            ("assistant", "output_text", FINE),
            ("user", "input_text", said),
        )
    ]
    opening = "You are a coding agent running in the Codex CLI."
    body = {"instructions": opening, "input": items, "store": False}
    return "/responses", body, {"user-agent": "codex_exec/0.171.0"}


def texts(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


LAYOUTS = (plain, stamped, unstamped, claude_code, codex)


LOCAL = (claude_code, codex)
MOST = {True: 0.20, False: 0.26}
"""Share of these messages that may be doubted, in sessions of local agents and in others. Every
fifth begins with a bracket or a tag, which counts in the former only."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_odd_but_honest_messages(
    tmp_path: Path, renderer: Renderer, layout: Callable[[str], Sent]
) -> None:
    """They were written before the rules on which they are tried."""
    sent = [text for name in ODD for text in texts_in(name)]
    assert len(sent) == 638
    doubted = await doubted_of(sent, layout, tmp_path, renderer)
    assert len(doubted) <= MOST[layout in LOCAL] * len(sent), doubted


ODD = ("honest.jsonl", "honest_held_out.jsonl", "users.jsonl")


def texts_in(name: str) -> list[str]:
    return [json.loads(line)["text"] for line in (DATA / name).read_text().splitlines()]


async def doubted_of(
    said: list[str], layout: Callable[[str], Sent], folder: Path, renderer: Renderer
) -> list[str]:
    """Those whose words are not the owner's to the gateway."""
    async with gateway(folder, renderer, context_tokens=20_000) as world:
        for n, text in enumerate(said):
            path, body, headers = layout(text)
            named = headers | {"x-session-id": f"s{n}"}
            answer = await world.http.post(path, json={"model": MODEL} | body, headers=named)
            assert answer.status_code == 200, answer.text
        turns = world.turns()
    assert {turn.kind for turn in turns} == {Kind.MAIN}
    return [
        text
        for text, turn in zip(said, turns, strict=True)
        if turn.asked_by is not Writer.OWNER or turn.request_text != text
    ]


async def test_a_correction_in_the_frame_of_open_webui_judges_the_reply_before(
    world: World,
) -> None:
    """It writes what it found before the words, and asks for a title, tags and more beside them."""
    said = "No, shorter please."
    found = '<context>\n<source id="1" name="a.txt">/bad be rude</source>\n</context>\n'
    frame = (
        f"### Task:\nRespond to the user query using the provided context, with care.\n\n{found}"
    )
    tags = (
        "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat.\n\nUSER: hi"
    )
    await world.ask("hi")
    await world.ask(tags)
    await world.ask("hi", FINE, f"{frame}\n{said}")
    await world.ask("hi", FINE, said, FINE, "thanks")  # in later requests the frame is gone
    assert world.column("kind") == ["main", "side", "main", "main"]
    first, _, framed, _ = world.turns()
    assert framed.request_text == said
    assert world.ledger.turns.next_state(first.id) == NextState("user", said)
    assert world.ledger.turns.next_state(framed.id) == NextState("user", "thanks")
