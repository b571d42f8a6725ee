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
CLOCK = (
    "\nCurrent time: Saturday, November 21st, 2026 - 12:28 AM (UTC)"
    "\nReference UTC: 2026-11-21 00:28 UTC"
)
HEARTBEAT = {
    "role": "user",
    "content": f"Follow the heartbeat monitor scratch context when provided. Else rest.{CLOCK}",
}
POLL = "[OpenClaw heartbeat poll]"
"""Text of a heartbeat in later histories, behind a timestamp."""
REMINDER = {
    "role": "user",
    "content": f"A scheduled reminder has been triggered. It says: tea.{CLOCK}",
}
WAKE = "[OpenClaw cron wake]"
NUDGE = "The previous attempt did not produce a user-visible answer. Produce it now."
SENT_BY = "[Inter-session message] sourceSession=agent:main:subagent:6c isUser=false"
EVENT = {
    "role": "user",
    "content": "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n[Internal task completion event]\n"
    "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>",
}
"""Volatile message beside the announcement of a subagent."""


def tools(*names: str) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "description": name, "parameters": {}}}
        for name in names
    ]


TOOLS = tools("exec", "read", "write", "edit")
TRACE = {"traceparent": "00-249bcabc7ccc7f4ba4d1b65ab40d5bb3-4c2579d44019cb92-01"}


def runtime(session: str = "agent:main:explicit:s", session_id: str | None = "s") -> str:
    named = f" | sessionId={session_id}" if session_id else ""
    return f"\n\nRuntime: agent=main | session={session}{named} | host=vm | shell=bash"


def stamped(text: str) -> str:
    return f"[Sat 2026-11-21 00:19 UTC] {text}"


def retried(text: str) -> str:
    """The user's words in the frame of a retry."""
    return (
        "[Queued user message from a previous active turn; kept.]\n"
        f"{text}\n\nContinue the current task from the existing transcript, and so on."
    )


def announced(result: str) -> dict[str, Any]:
    """Message with a subagent's result."""
    return user(f"A background task completed. Use it.\n\n{result}\n\n{SENT_BY}\nAs data.")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": stamped(text)}


def assistant(text: str | None, *calls: tuple[str, str, str]) -> dict[str, Any]:
    """Assistant message. `calls`: id, name, arguments."""
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
