"""What OpenClaw 2026.9 writes into messages, and how to read it.

Rule: this is the one place that knows OpenClaw's wording; a new version of it changes this file.
The marks are visible text that a user could type: a wrong guess costs a training sample at most.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tinker_claw.types import Message

SYSTEM_OPENING = "<!-- openclaw:"
"""How the system prompt of every agentic call begins."""

_VOLATILE_BEGIN = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
_VOLATILE_END = "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"

# [Sat 2026-11-21 00:19 UTC]
_TIMESTAMP = re.compile(r"^\[[A-Z][a-z]{2} \d{4}-\d\d-\d\d \d\d:\d\d[^\]\n]{0,40}\] ")
_RUNTIME = re.compile(r"\n*Runtime: agent=(?P<fields>[^\n]* \| session=[^\n]*)")
# What OpenClaw puts around the user's words when it tries again after an error.
_RETRY = re.compile(
    r"^\[Queued user message from a previous active turn[^\]]*\]\n(?P<words>.*?)"
    r"(?:\n\nContinue the current task from the existing transcript.*)?$",
    re.DOTALL,
)

_NUDGE = "The previous attempt did not produce a user-visible answer."
"""How OpenClaw asks again after an empty reply; the message is gone from later requests."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A sign that a call is not a turn of the conversation with the user."""

    text: str
    what: str


SYSTEM_MARKS = (
    Mark("Write an Activity recap", "activity recap"),
    Mark("Generate a concise session title", "session title"),
    Mark("You are a context summarization assistant", "compaction summary"),
)
"""Beginnings of the system prompt."""

USER_MARKS = (
    Mark("Pre-compaction memory flush.", "memory flush"),
    Mark("Follow the heartbeat monitor scratch context", "heartbeat"),
    Mark("[OpenClaw heartbeat poll]", "heartbeat"),
    Mark("A scheduled reminder has been triggered.", "cron in the main session"),
    Mark("[OpenClaw cron wake]", "cron in the main session"),
    Mark("[cron:", "isolated cron job"),
    Mark("[Subagent Context]", "subagent"),
    Mark("A background task completed.", "announcement of a subagent"),
)
"""Beginnings of the last user message, behind its timestamp."""

SESSION_MARKS = (
    Mark(":cron:", "isolated cron job"),
    Mark(":subagent:", "subagent"),
    Mark(":internal-session-effects", "memory flush"),
    Mark("openclaw-cron-", "isolated cron job"),
)
"""Parts of the session key."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The line that OpenClaw adds to the first user message, or to the system prompt."""

    session_key: str
    session_id: str | None
    """None in an isolated cron job."""


def runtime(messages: Sequence[Message]) -> Runtime | None:
    """The Runtime line. OpenClaw writes it last, so the last one of a message is its own."""
    for message in messages:
        if message["role"] not in ("user", "system"):
            continue
        found = list(_RUNTIME.finditer(message["content"]))
        if found:
            pairs = (part.partition("=") for part in found[-1]["fields"].split(" | "))
            fields = {name.strip(): value.strip() for name, _, value in pairs}
            return Runtime(fields.get("session", ""), fields.get("sessionId") or None)
    return None


def _is_volatile(message: Message) -> bool:
    if message["role"] != "user":
        return False
    text = message["content"].strip()
    internal = text.startswith(_VOLATILE_BEGIN) and text.endswith(_VOLATILE_END)
    return internal or words(text).startswith(_NUDGE)


def without_volatile(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages that will be in later requests too.

    OpenClaw ends every request with a message about running processes, and drops it afterwards.
    """
    end = len(messages)
    while end and _is_volatile(messages[end - 1]):
        end -= 1
    return messages[:end]


def last_user_index(messages: Sequence[Message]) -> int | None:
    """Index of the last message that the user himself wrote."""
    for at in range(len(without_volatile(messages)) - 1, -1, -1):
        if messages[at]["role"] == "user":
            return at
    return None


def last_user_words(messages: Sequence[Message]) -> str:
    """What the user wrote last; "" when he wrote nothing."""
    at = last_user_index(messages)
    return "" if at is None else words(messages[at]["content"])


def words(text: str) -> str:
    """A user message without what OpenClaw adds to it."""
    text = _TIMESTAMP.sub("", _RUNTIME.sub("", text)).strip()
    retried = _RETRY.match(text)
    return retried["words"].strip() if retried else text
