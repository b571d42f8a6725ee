"""Requests of the shape and size of OpenClaw's, with text of Python's own documentation in them.

A system prompt of 25 to 46 kB and 10 to 105 kB of tools, the same in every session of a surface; a
first user message that ends in the Runtime line; at the end of every request a message that is
dropped from the next one. What is new in a further turn is small.

Rule: a request is made of parts that were serialised once, so that the client's core keeps up.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

MODEL = "bench"
_TEXT = "\n\n".join(topics.values())
_VOLATILE = (
    "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nWhat runs now (for information only):\n"
    '"Processes:\\nnone, and none has ended since the message before this one"\n\n'
    'What was delegated (for information only):\n"## Delegated\\nnothing is under way"\n'
    "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
)


@dataclass(frozen=True)
class Surface:
    """System prompt and tools that many sessions share, serialised."""

    name: str
    head: bytes
    """Up to and with the system message."""
    tail: bytes
    """From behind the last message on."""

    @property
    def size(self) -> int:
        return len(self.head) + len(self.tail)


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _text(start: int, length: int) -> str:
    """A stretch of documentation; the same arguments give the same text."""
    start %= len(_TEXT) - length
    return _TEXT[start : start + length]


def surface(name: str, system: int, tools: int, tools_size: int, seed: int = 0) -> Surface:
    """`system`: characters; `tools`: how many, of `tools_size` bytes together."""
    prompt = f"<!-- openclaw:{name} {seed} -->\n" + _text(seed * 50_021 + 7 * system, system)
    specs = [_tool(number, tools_size // tools) for number in range(tools)]
    head = b'{"model":' + _dumps(MODEL) + b',"messages":['
    head += _dumps({"role": "system", "content": prompt})
    rest = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": specs,
        "tool_choice": "auto",
        "max_completion_tokens": 4096,
    }
    return Surface(name, head, b"]," + _dumps(rest)[1:])


def _tool(number: int, size: int) -> dict[str, Any]:
    properties = {
        f"{what}{number}": {"type": "string", "description": _text(997 * number + at, 60)}
        for at, what in enumerate(("path", "pattern", "mode")[: 1 + number % 3])
    }
    parameters = {"type": "object", "properties": properties, "required": [f"path{number}"]}
    function = {"name": f"tool_{number}", "description": "", "parameters": parameters}
    spec = {"type": "function", "function": function}
    function["description"] = _text(7919 * number, max(20, size - len(_dumps(spec))))
    return spec


SURFACES = (
    surface("terminal", 39_873, 12, 9_800),
    surface("short", 30_032, 12, 9_800),
    surface("browser", 44_924, 11, 8_900),
    surface("scheduled", 27_500, 11, 8_900),
    surface("all tools", 39_873, 54, 105_000),
)
MIX = tuple(SURFACES[i] for i in (0, 1, 0, 2, 0, 3, 2, 0, 1, 0, 0, 4))
"""How often each is met."""


def unseen(count: int, name: str = "unseen") -> list[Surface]:
    """Surfaces of which each has a system prompt of its own."""
    return [surface(f"{name} {n}", 39_873, 12, 9_800, seed=n + 1) for n in range(count)]


@dataclass
class Conversation:
    """One session, as the client tells it."""

    surface: Surface
    key: str
    messages: list[bytes] = field(default_factory=list)
    """Serialised, without the volatile one at the end."""
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def body(self) -> bytes:
        """The next request."""
        volatile = {"role": "user", "content": [{"type": "text", "text": _VOLATILE}]}
        told = b",".join([self.surface.head, *self.messages, _dumps(volatile)])
        return told + self.surface.tail

    def open(self, about: int | None = None) -> None:
        """The user's first message; `about`: another one than that of all sessions of this key."""
        said = _said(self.key, about or 0)
        runtime = (
            f"\n\nRuntime: agent=main | session=agent:main:explicit:{self.key} | "
            f"sessionId={self.key} | host=bench | repo=/home/user/project | os=Linux | "
            "model=bench/bench | default_model=bench/bench | shell=bash"
        )
        self.messages.append(_dumps({"role": "user", "content": said + runtime}))

    def answer(self, reply: Reply) -> None:
        """The reply goes into the history, and something new behind it."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        turn = next(self._count) + 1
        if reply.calls:
            message["tool_calls"] = reply.calls
        self.messages.append(_dumps(message))
        for call in reply.calls:
            result = _text(turn * 104_729 + 31 * len(self.key), 400 + 200 * (turn % 4))
            self.messages.append(
                _dumps({"role": "tool", "content": result, "tool_call_id": call["id"]})
            )
        if not reply.calls:
            self.messages.append(_dumps({"role": "user", "content": _said(self.key, turn)}))


def _said(key: str, turn: int) -> str:
    words = _text(turn * 15_485 + sum(key.encode()) * 613, 50 + 30 * (turn % 3))
    return f"[Sat 2026-11-21 00:{turn % 60:02d} UTC] {key}/{turn}: {words}"


@dataclass(frozen=True)
class Reply:
    """What came back, as the client keeps it."""

    text: str
    calls: Sequence[dict[str, Any]]


def read_reply(events: bytes) -> Reply:
    """Put a stream together.

    Raises:
        ValueError: it broke off, or ended in an error.
    """
    text, calls, ended = "", list[dict[str, Any]](), False
    for block in events.split(b"\n\n"):
        if not block.startswith(b"data: {"):
            continue
        event = json.loads(block[len(b"data: ") :])
        if "error" in event:
            raise ValueError(f"the stream ended in an error: {event['error']}")
        for choice in event["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                _add(calls, call)
            ended = ended or choice.get("finish_reason") is not None
    if not ended:
        raise ValueError("the stream ended without a finish_reason")
    return Reply(text, calls)


def _add(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    if delta["index"] == len(calls):
        function = {"name": "", "arguments": ""}
        calls.append({"id": delta.get("id"), "type": "function", "function": function})
    told = delta.get("function", {})
    for name in ("name", "arguments"):
        calls[delta["index"]]["function"][name] += told.get(name) or ""


KEY = "sk-" + "0123456789abcdef" * 4
"""A key that lets nobody in anywhere: a proxy that wants one is started with it."""
HEADERS = (
    "accept: application/json\r\ncontent-type: application/json\r\n"
    f"authorization: Bearer {KEY}\r\nuser-agent: OpenAI/JS 7.15.0\r\naccept-language: *\r\n"
    "accept-encoding: gzip, deflate\r\nx-stainless-arch: x64\r\nx-stainless-lang: js\r\n"
    "x-stainless-os: Linux\r\nx-stainless-retry-count: 0\r\nx-stainless-runtime: node\r\n"
)
"""Of every request, besides host, length and traceparent."""
