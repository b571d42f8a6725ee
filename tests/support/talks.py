"""Conversations of agents with a gateway, as requests on each wire.

A place is what an agent's own code says of a session, in its system prompt and headers. Texts are
shortened from what the agents send.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.gateways import MODEL
from tests.support.openclaw import SYSTEM, TOOLS

WIRES = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}
Content = str | Sequence[str]
"""A text, or the texts of several parts."""


@dataclass(frozen=True)
class Place:
    """A session as its agent describes it."""

    system: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    line: str = ""
    """OpenClaw's line about the session, with `{id}` in place of its id."""
    tools: Sequence[dict[str, Any]] = ()


def openclaw_place(key: str, *, channel: str = "telegram", line: str = "") -> Place:
    """Return a session of OpenClaw 2026.9 with this key."""
    meta = {"schema": "openclaw.inbound_meta.v2", "channel": channel}
    system = f"{SYSTEM}\n```json\n{json.dumps(meta)}\n```"
    line = line or f"Runtime: agent=main | session={key} | sessionId={{id}} | host=vm | shell=bash"
    return Place(system, line=line, tools=TOOLS)


def _hermes(*lines: str) -> Place:
    facts = "\n".join(lines)
    return Place(f"You are Hermes Agent, an assistant.\n\n## Current Session Context\n\n{facts}")


_CLAUDE = {"user-agent": "claude-cli/2.1.332 (external, cli)"}
_BILLING = "x-anthropic-billing-header: cc_version=2.1.332; cc_entrypoint=cli;"
PLACES: Mapping[str, Place] = {
    "plain": Place(),
    "own program": Place("You are the kitchen's assistant. Be kind."),
    "Claude Code": Place(f"{_BILLING}\nYou are Claude Code, Anthropic's official CLI.", _CLAUDE),
    "Codex": Place(
        "You are a coding agent running in the Codex CLI.", {"user-agent": "codex_exec/0.171.0"}
    ),
    "opencode": Place("You are opencode, an agent.", {"user-agent": "opencode/1.18.33"}),
    "cline": Place("You are Cline, a highly skilled software engineer."),
    "aider": Place("Act as an expert software developer."),
    "Hermes local": _hermes(
        "**Source:** Local (the machine running this agent)",
        "**Connected Platforms:** local (files on this machine)",
    ),
    "Hermes direct": _hermes('**Source:** Telegram ("DM with Mallory")', '**User:** "Mallory"'),
    "Hermes group": _hermes('**Source:** Telegram ("group: Crew")', '**User:** "Mallory"'),
    "Hermes thread": _hermes(
        '**Source:** Discord ("channel: Crew")',
        "**Session type:** Multi-user thread — messages are prefixed with [sender name].",
    ),
    "main": openclaw_place("agent:main:main"),
    "webchat": openclaw_place("agent:main:main", channel="webchat"),
    "explicit": openclaw_place("agent:main:explicit:s", channel="webchat"),
    "dashboard": openclaw_place("agent:main:dashboard:s", channel="webchat"),
    "named agent": openclaw_place(
        "",
        channel="webchat",
        line="Runtime: name=Claw | agent=main | session=agent:main:main | sessionId={id} | host=vm",
    ),
    "direct": openclaw_place("agent:main:telegram:direct:4917000000"),
    "direct per peer": openclaw_place("agent:main:direct:4917000000"),
    "direct per account": openclaw_place("agent:main:telegram:home:direct:4917000000"),
    "group": openclaw_place("agent:main:telegram:group:-100"),
    "channel": openclaw_place("agent:main:discord:channel:9", channel="discord"),
    "thread": openclaw_place("agent:main:telegram:group:-100:thread:3"),
    "team": openclaw_place("agent:main:slack:team:T1:channel:C1", channel="slack"),
    "voice": openclaw_place("agent:main:voice:49170", channel="voice-call"),
    "a2a": openclaw_place("agent:main:a2a:peer", channel="a2a"),
    "imap": openclaw_place("agent:main:imap:inbox", channel="imap"),
    "slash": openclaw_place("agent:main:discord:slash:9", channel="discord"),
    "bare chat": openclaw_place("agent:main:telegram:12345"),
    "hook": openclaw_place("agent:main:hook:mail", channel="webchat"),
    "cron": openclaw_place("agent:main:cron:7", channel="webchat"),
    "subagent": openclaw_place("agent:main:subagent:6c", channel="webchat"),
    "no line": Place(SYSTEM, tools=TOOLS),
    "OpenClaw 2026.7": Place(
        "You are a personal assistant running inside OpenClaw.\n\n## Tooling\n\n"
        "Runtime: agent=main | session=agent:main:main | sessionId={id} | channel=telegram",
        tools=TOOLS,
    ),
    "OpenClaw 2026.7, direct": Place(
        "You are a personal assistant running inside OpenClaw.\n\n## Tooling\n\n"
        "Runtime: agent=main | session=agent:main:telegram:direct:4917000000 | sessionId={id}",
        tools=TOOLS,
    ),
}
"""Sessions by name."""


@dataclass(frozen=True)
class Talk:
    """A conversation in a place."""

    place: Place
    messages: tuple[dict[str, Any], ...]
    """Messages as on chat completions; a content may be a list of texts."""
    id: str = "s"

    def body(self, wire: str, until: int | None = None) -> dict[str, Any]:
        """Return the request with the messages up to one of them."""
        messages = [dict(message) for message in self.messages[:until]]
        system = self.place.system.replace("{id}", self.id)
        line = self.place.line.replace("{id}", self.id)
        if line and wire == "chat":
            messages[0]["content"] = _appended(messages[0]["content"], f"\n\n{line}")
        elif line:
            system = f"{system}\n{line}"
        return {"model": MODEL} | _WRITERS[wire](system, messages, self.place.tools)

    @property
    def headers(self) -> dict[str, str]:
        return dict(self.place.headers)


def user(content: Content) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _appended(content: Content, text: str) -> Content:
    return content + text if isinstance(content, str) else [*content[:-1], content[-1] + text]


def _parts(content: Content, kind: str) -> Any:
    if isinstance(content, str):
        return content
    return [{"type": kind, "text": text} for text in content]


def _chat(
    system: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    first = [{"role": "system", "content": system}] if system else []
    rest = [message | {"content": _parts(message["content"], "text")} for message in messages]
    return {"messages": [*first, *rest]} | ({"tools": tools} if tools else {})


def _responses(
    system: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    items = list[dict[str, Any]]()
    for message in messages:
        if message["role"] == "tool":
            result = {"call_id": message["tool_call_id"], "output": message["content"]}
            items.append({"type": "function_call_output"} | result)
            continue
        if message["content"]:
            content = _parts(message["content"], "input_text")
            items.append({"role": message["role"], "content": content})
        for call in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call["id"]} | call["function"])
    functions = [{"type": "function"} | tool["function"] for tool in tools]
    body: dict[str, Any] = {"input": items} | ({"tools": functions} if tools else {})
    return body | ({"instructions": system} if system else {})


def _messages(
    system: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    turns = list[dict[str, Any]]()
    for message in messages:
        if message["role"] == "tool":
            part = {"tool_use_id": message["tool_call_id"], "content": message["content"]}
            turns.append({"role": "user", "content": [{"type": "tool_result"} | part]})
            continue
        content = message["content"]
        texts = ([content] if content else []) if isinstance(content, str) else content
        parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
        for call in message.get("tool_calls", ()):
            function = call["function"]
            used = {"id": call["id"], "name": function["name"]}
            parts.append({"type": "tool_use", "input": json.loads(function["arguments"])} | used)
        turns.append({"role": message["role"], "content": parts})
    named = [{"name": t["function"]["name"], "input_schema": {"type": "object"}} for t in tools]
    body: dict[str, Any] = {"messages": turns, "max_tokens": 50}
    return body | ({"tools": named} if tools else {}) | ({"system": system} if system else {})


_WRITERS = {"chat": _chat, "responses": _responses, "messages": _messages}
