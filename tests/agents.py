"""Requests as OpenClaw 2026.9 writes them, shortened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SYSTEM = "<!-- openclaw:attempt:STABLE -->\nYou are a personal assistant running inside OpenClaw."
VOLATILE = {
    "role": "user",
    "content": [
        {
            "type": "text",
            "text": "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nActive exec sessions: none\n"
            "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>",
        }
    ],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {}}}
    for name in ("exec", "read", "write", "edit")
]


def runtime(session: str = "agent:main:explicit:s", session_id: str | None = "s") -> str:
    named = f" | sessionId={session_id}" if session_id else ""
    return f"\n\nRuntime: agent=main | session={session}{named} | host=vm | shell=bash"


def stamped(text: str) -> str:
    return f"[Sat 2026-11-21 00:19 UTC] {text}"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": stamped(text)}


def assistant(text: str | None, *calls: tuple[str, str, str]) -> dict[str, Any]:
    """`calls`: id, name, arguments."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": a}}
            for i, n, a in calls
        ]
    return message


def tool(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def openclaw(
    first: str, *rest: dict[str, Any], line: str | None = None, **fields: Any
) -> dict[str, Any]:
    """The body of one request: system, the user's first words, the history, the volatile end."""
    opening = stamped(first) + (runtime() if line is None else line)
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": opening},
            *rest,
            VOLATILE,
        ],
        "tools": TOOLS,
        "tool_choice": "auto",
        "max_completion_tokens": 200,
    } | fields


def utility(system: str, said: str) -> dict[str, Any]:
    """A call without tools: recap, title, compaction."""
    messages: Sequence[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": said},
    ]
    return {"messages": messages, "temperature": 0.2, "max_completion_tokens": 240}
