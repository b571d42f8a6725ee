"""Requests of the shape and size of OpenClaw's, filled with text of Python's own documentation.

A system prompt of 25 to 46 kB and 10 to 105 kB of tools, the same in every session of a surface; a
first user message that ends in the Runtime line; at the end of every request a message that is
dropped from the next one. What is new in a further turn is small.

Rule: what a user or a tool says is new in every session, because repeated text would flatter a
cache; the rest of a request was serialised once, so that the client's core keeps up.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pydoc_data.topics import topics
from typing import Any

MODEL = "bench"
RELAYED = 513
"""max_tokens of a request whose reply has exactly that many tokens, streamed one by one."""
_TEXT = "\n\n".join(topics.values())
_WORDS = sorted(set(_TEXT.split()))
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
    """Bytes up to and including the system message."""
    tail: bytes
    """Bytes after the last message."""

    @property
    def size(self) -> int:
        return len(self.head) + len(self.tail)


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _text(start: int, length: int) -> str:
    """Return an excerpt of the documentation; the same arguments give the same text."""
    start %= len(_TEXT) - length
    return _TEXT[start : start + length]


def surface(name: str, system: int, tools: int, tools_size: int, seed: int = 0) -> Surface:
    """Make a surface. `system`: characters; `tools`: their number, of `tools_size` bytes
    together."""
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
"""Surfaces in the order of their use, each as often as agents use it."""


def relayed(like: Surface) -> Surface:
    """Return the same surface with requests for a reply of `RELAYED` tokens."""
    return replace(like, tail=like.tail.replace(b"4096}", b"%d}" % RELAYED))


def unseen(count: int, name: str = "unseen") -> list[Surface]:
    """Make surfaces that each have a system prompt of their own."""
    return [surface(f"{name} {n}", 39_873, 12, 9_800, seed=n + 1) for n in range(count)]


@dataclass
class Conversation:
    """One session, as the client sends it."""

    surface: Surface
    key: str
    messages: list[bytes] = field(default_factory=list)
    """Serialised messages, without the volatile one at the end."""
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def body(self) -> bytes:
        """Body of the next request."""
        volatile = {"role": "user", "content": [{"type": "text", "text": _VOLATILE}]}
        body = b",".join([self.surface.head, *self.messages, _dumps(volatile)])
        return body + self.surface.tail

    def open(self, about: int | None = None) -> None:
        """Add the user's first message; `about`: a different one than other sessions of this key
        have."""
        text = _said(self.key, about or 0)
        runtime = (
            f"\n\nRuntime: agent=main | session=agent:main:explicit:{self.key} | "
            f"sessionId={self.key} | host=bench | repo=/home/user/project | os=Linux | "
            "model=bench/bench | default_model=bench/bench | shell=bash"
        )
        self.messages.append(_dumps({"role": "user", "content": text + runtime}))

    def answer(self, reply: Reply) -> None:
        """Append a reply to the history, and a new message after it."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        turn = next(self._count) + 1
        if reply.calls:
            message["tool_calls"] = reply.calls
        self.messages.append(_dumps(message))
        for call in reply.calls:
            result = _new_words(f"{self.key} result {turn}", 60 + 30 * (turn % 4))
            self.messages.append(
                _dumps({"role": "tool", "content": result, "tool_call_id": call["id"]})
            )
        if not reply.calls:
            self.messages.append(_dumps({"role": "user", "content": _said(self.key, turn)}))


def _said(key: str, turn: int) -> str:
    words = _new_words(f"{key} {turn}", 8 + 5 * (turn % 3))
    return f"[Sat 2026-11-21 00:{turn % 60:02d} UTC] {words}"


def _new_words(key: str, count: int) -> str:
    """Return words of the documentation, in an order that depends on `key`."""
    return " ".join(random.Random(key).choices(_WORDS, k=count))


@dataclass(frozen=True)
class Reply:
    """A reply as the client keeps it."""

    text: str
    calls: Sequence[dict[str, Any]]


def read_reply(events: bytes) -> Reply:
    """Assemble the reply of a stream.

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
    piece = delta.get("function", {})
    for name in ("name", "arguments"):
        calls[delta["index"]]["function"][name] += piece.get(name) or ""


HEADERS = (
    "accept: application/json\r\ncontent-type: application/json\r\n"
    "authorization: Bearer sk-bench\r\nuser-agent: OpenAI/JS 7.15.0\r\naccept-language: *\r\n"
    "accept-encoding: gzip, deflate\r\nx-stainless-arch: x64\r\nx-stainless-lang: js\r\n"
    "x-stainless-os: Linux\r\nx-stainless-retry-count: 0\r\nx-stainless-runtime: node\r\n"
)
"""Headers of every request, besides host, length and traceparent."""
