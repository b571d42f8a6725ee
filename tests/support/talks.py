"""Conversations of agents with a gateway, as requests on each wire.

A place is what an agent's own code says of a session, in its system prompt and headers. Texts are
shortened from what the agents send.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import gateway_wires
from tests.support.gateways import MODEL
from tests.support.openclaw import SYSTEM, TOOLS

_SPOKEN = {wire.name: wire for wire in gateway_wires.WIRES}
_MOST = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}
WIRES = {name: wire.path for name, wire in _SPOKEN.items()}
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
        system = self.place.system.replace("{id}", self.id)
        line = self.place.line.replace("{id}", self.id)
        messages = [message | {"content": [*_texts(message)]} for message in self.messages[:until]]
        if line and wire == "chat":
            messages[0]["content"][-1] += f"\n\n{line}"
        elif line:
            system = f"{system}\n{line}"
        for message in messages:
            texts = message["content"]
            parts = [{"type": "text", "text": text} for text in texts]
            message["content"] = parts if len(texts) > 1 else "".join(texts)
        more: dict[str, Any] = {"model": MODEL, _MOST[wire]: 50}
        if system and wire == "chat":
            messages.insert(0, {"role": "system", "content": system})
        elif system:
            more["instructions" if wire == "responses" else "system"] = system
        tools = [tool["function"] | {"parameters": {"type": "object"}} for tool in self.place.tools]
        return json.loads(_SPOKEN[wire].body(messages, tools, **more))

    @property
    def headers(self) -> dict[str, str]:
        return dict(self.place.headers)


def user(content: Content) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _texts(message: Mapping[str, Any]) -> Sequence[str]:
    content: Content = message["content"]
    return [content] if isinstance(content, str) else content
