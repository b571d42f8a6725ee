"""Whether a request goes on from an earlier turn, and what it says about it.

Rule: messages are compared by what they mean, not by their bytes: agents rewrite ids, re-serialise
arguments and trim replies. The system prompt is left out, because it changes with the date.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinker_claw.sessions.openclaw import without_volatile, words
from tinker_claw.types import Message, NextState, Reply


def digest(message: Message) -> str:
    """A short name for what a message says."""
    role: str = message["role"]
    text: str = message["content"]
    if role == "system":
        text = ""
    elif role == "user":
        text = words(text)  # timestamps, and the frame of a retry, come and go
    elif role == "assistant":
        text = text.strip()
    calls = [
        [call["function"]["name"], _canonical(call["function"]["arguments"])]
        for call in message.get("tool_calls", ())
    ]
    meaning = json.dumps([role, text, calls])
    return hashlib.sha256(meaning.encode()).hexdigest()[:32]


def digests(messages: Sequence[Message]) -> tuple[str, ...]:
    """Of all messages that the client keeps in its history."""
    return tuple(digest(message) for message in without_volatile(messages))


def reply_digest(reply: Reply) -> str:
    """Digest of the message that a client makes of a reply."""
    calls = [{"function": {"name": c.name, "arguments": c.arguments}} for c in reply.tool_calls]
    return digest({"role": "assistant", "content": reply.text, "tool_calls": calls})


def _canonical(arguments: str) -> str:
    """Arguments regardless of spacing, order of keys and spelling of numbers."""
    try:
        # JavaScript knows floats only: 1.0 comes back as 1, and long integers come back rounded.
        return json.dumps(json.loads(arguments, parse_int=float), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def extension(
    history: Sequence[str], reply: str, messages: Sequence[Message]
) -> list[Message] | None:
    """What stands behind a turn in a request, or None when the request does not go on from it.

    Args:
        history: digests of the turn's own request.
        reply: digest of its reply.
    """
    kept = without_volatile(messages)
    at = len(history)
    if len(kept) <= at + 1 or digest(kept[at]) != reply or digests(kept[:at]) != tuple(history):
        return None
    new = list(kept[at + 1 :])
    # Another reply in between: what follows judges that one.
    return None if any(m["role"] == "assistant" for m in new) else new


def next_state(new_messages: Sequence[Message], replied: Message | None = None) -> NextState | None:
    """What the messages behind a turn say about it.

    The user's own words count before tool results: he has seen both.

    Args:
        replied: the turn's reply as the client sent it back; names the tools.
    """
    said = [words(m["content"]) for m in new_messages if m["role"] == "user"]
    if text := "\n\n".join(part for part in said if part):
        return NextState("user", text)
    names = _tool_names(replied) if replied else {}
    results = [m for m in new_messages if m["role"] == "tool"]
    parts = [
        f"[result {n} of {len(results)}, {names.get(m['tool_call_id'], 'tool')}]\n{m['content']}"
        for n, m in enumerate(results, 1)
    ]
    return NextState("tool", "\n\n".join(parts)) if parts else None


def _tool_names(message: Message) -> Mapping[str, str]:
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls", ())
    return {call["id"]: call["function"]["name"] for call in calls}
