"""What OpenClaw 2026.9 writes into messages, and how to read it; what Claude Code and Codex write
beside a user's words is the same to everybody.

Rule: this is the one place that knows agents' wording; a new version of one changes this file.
The marks are visible text that a user could type, so none of them decides alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from tinker_claw.formats.base import parts_of
from tinker_claw.types import Message

SYSTEM_OPENING = "<!-- openclaw:"
"""How the system prompt of every agentic call begins."""
FLUSH = "Pre-compaction memory flush."

_VOLATILE_BEGIN = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
_VOLATILE_END = "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
_EVENT = "[Internal task completion event]"
_INTER_SESSION = "\n[Inter-session message] "
_NOT_USER = " isUser=false"
_LINE = "Runtime: agent="

# [Sat 2026-11-21 00:19 UTC], before what a user typed
_STAMP = re.compile(r"\[[A-Z][a-z]{2} \d{4}-\d\d-\d\d \d\d:\d\d[^\]\n]{0,40}\](?: |\Z)")
# Sender (untrusted metadata): and a block of JSON; channels put it before the user's words.
_METADATA = re.compile(
    r"[^\n]{1,80}\((?:untrusted|data, not)[^)\n]{0,80}\):\n```json\n.*?\n```\s*", re.DOTALL
)
# The clock at the end of prompts that nobody typed.
_CLOCK = re.compile(r"\nReference UTC: \d{4}-\d\d-\d\d \d\d:\d\d UTC\s*")
# What OpenClaw puts before a message that got no complete answer. Behind that message and a blank
# line stands how it goes on: with OpenClaw's own words, after an error, or with the user's next.
_FRAME = re.compile(r"\[Queued user message from a previous active turn[^\]]*\]\n")
_AGAIN = "\n\nContinue the current task from the existing transcript"
_MOST_SPLITS = 32
# What Claude Code and Codex tell the model of the date, of files and of themselves: a part of a
# user's message, or all of one, which nobody typed.
_NOTE = re.compile(
    r"\s*<(?P<kind>system-reminder|environment_context)>.*</(?P=kind)>\s*", re.DOTALL
)
_NUDGE = "The previous attempt did not produce a user-visible answer."
"""How OpenClaw asks again after an empty reply; the message is gone from later requests."""
_SUMMARY = "The conversation history before this point was compacted into the following summary:"


@dataclass(frozen=True, slots=True)
class SystemMark:
    """How the system prompt of a call that is no agent's begins."""

    text: str
    what: str
    traced: bool
    """It belongs to a turn, and shares its trace."""


SYSTEM_MARKS = (
    SystemMark("Write an Activity recap", "recap", traced=False),
    SystemMark("Generate a concise session title", "title", traced=False),
    SystemMark("You are a title generator.", "title", traced=False),  # opencode's
    SystemMark("You are a context summarization assistant", "compaction", traced=True),
)
ON_ITS_OWN = (
    (re.compile(r"openclaw-cron-[0-9a-f]+"), "isolated cron"),
    (re.compile(r"slug-generator-[-0-9a-f]+(?::\d+)?"), "utility"),
)
"""Names of sessions without a conversation."""

_PROMPTS = (
    ("Follow the heartbeat monitor scratch context", "heartbeat"),
    ("A scheduled reminder has been triggered.", "cron"),
)
_SHORT = {"[OpenClaw heartbeat poll]": "heartbeat", "[OpenClaw cron wake]": "cron"}
"""What the prompts become in later histories."""
_SILENCE = frozenset({"", "NO_REPLY", "HEARTBEAT_OK"})
"""Replies that no user gets to see."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The line that OpenClaw adds to the first user message, or to the system prompt."""

    session_key: str
    session_id: str | None
    """None in an isolated cron job."""


@dataclass(frozen=True, slots=True)
class Automation:
    """A user message that no user wrote."""

    what: str
    by: str
    """What it was recognised by."""
    short: bool = False
    """As it stands in later histories."""


def runtime(messages: Sequence[Message], *, in_user_message: bool) -> Runtime | None:
    """The Runtime line: the last line of the first user message or of a part of it, or else one of
    the system prompt.

    Args:
        in_user_message: whether such a line of a user message can be OpenClaw's.
    """
    user = next((m["content"] for m in messages if m["role"] == "user"), None)
    if in_user_message and user is not None:
        lines = [part[at:] for part in parts_of(user) if (at := _line_at(part)) is not None]
        if lines:
            return _fields(lines[-1])
    if messages[0]["role"] == "system":
        for part in reversed(parts_of(messages[0]["content"])):
            at = part.rfind(_LINE)
            if at == 0 or (at > 0 and part[at - 1] == "\n"):
                return _fields(part[at:].partition("\n")[0])
    return None


def _line_at(text: str) -> int | None:
    """Where the line begins that ends `text`."""
    at = text.rfind(_LINE)
    if at < 0 or (at and text[at - 1] != "\n") or "\n" in text[at:].rstrip():
        return None
    return at if " | session=" in text[at:] else None


def _without_line(text: str) -> str:
    """A user message without Runtime lines and notes; what its parts say stands on lines of its
    own."""
    parts = [part for part in parts_of(text) if not _NOTE.fullmatch(part)]
    kept = [part if (at := _line_at(part)) is None else part[:at] for part in parts]
    return kept[0] if len(parts) == 1 else "\n".join(part for part in kept if part.strip())


def _fields(line: str) -> Runtime | None:
    pairs = (part.partition("=") for part in line.split(" | "))
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    if "session" not in fields:
        return None
    return Runtime(fields["session"], fields.get("sessionId") or None)


def is_stamped(text: str) -> bool:
    """A user message with the timestamp that OpenClaw puts before what a user typed."""
    at = 0
    while found := _METADATA.match(text, at):
        at = found.end()
    return _STAMP.match(text, at) is not None


def automation(text: str) -> Automation | None:
    """Whether a user message is a prompt of OpenClaw's own, by more than one sign."""
    text = _without_line(text).rstrip()
    if _STAMP.match(text) is None:
        clock = text.rfind("\nReference UTC: ")
        if clock >= 0 and _CLOCK.fullmatch(text, clock):
            what = next((what for mark, what in _PROMPTS if text.startswith(mark)), "automated")
            named = "its opening words and " if what != "automated" else ""
            return Automation(what, f"{named}the clock at its end")
    elif what := _SHORT.get(_STAMP.sub("", text, count=1).strip()):
        return Automation(what, "the words that stand for it", short=True)
    at = text.rfind(_INTER_SESSION)
    if at >= 0 and _NOT_USER in text[at:].split("\n", 2)[1]:
        return Automation("announcement", "a message from another session")
    return None


def summary_index(messages: Sequence[Message]) -> int | None:
    """Index of the summary that stands for compacted messages; None: nothing was compacted.

    It comes first, and without the timestamp of what a user typed.
    """
    first = next((at for at, m in enumerate(messages) if m["role"] == "user"), None)
    if first is None or not messages[first]["content"].startswith(_SUMMARY):
        return None
    return first


def is_silent(reply: Message) -> bool:
    """A reply that no user gets to see."""
    return not reply.get("tool_calls") and reply["content"].strip() in _SILENCE


def is_framed(text: str) -> bool:
    """A user message in the frame of a retry."""
    framed = _framed(_unwrapped(text))
    return framed is not None and _AGAIN in framed


def queued(text: str) -> list[tuple[str, str]]:
    """What a user message may be made of, where the user went on before they were answered:
    what they said then, and what they say now. A blank line stands between them, and in either
    others may."""
    framed = _framed(_unwrapped(_without_line(text)))
    if framed is None or _AGAIN in framed:
        return []
    cuts = islice(re.finditer("\n\n", framed), _MOST_SPLITS)
    return [(framed[: cut.start()].strip(), framed[cut.end() :].strip()) for cut in cuts]


def sayings(text: str) -> list[str]:
    """All that the user's words in a message may begin with: those, too, that got no answer."""
    framed = _framed(_unwrapped(_without_line(text)))
    if framed is None:
        return [words(text)]
    return [_unwrapped(part) for part in framed.split("\n\n")]


def is_nudge(message: Message, before: Message | None) -> bool:
    """A demand for the visible answer that an empty reply was not.

    The empty reply is in no history: what a user types comes after an assistant's message.
    """
    if message["role"] != "user" or before is None or before["role"] not in ("user", "tool"):
        return False
    return _unwrapped(message["content"]).startswith(_NUDGE)


def is_volatile(message: Message) -> bool:
    """Of running processes and the like: gone with the next request, or with the user's next
    words."""
    if message["role"] != "user":
        return False
    text = message["content"].strip()
    return text.startswith(_VOLATILE_BEGIN) and text.endswith(_VOLATILE_END)


def _volatile_from(messages: Sequence[Message]) -> int:
    end = len(messages)
    while end and is_volatile(messages[end - 1]):
        end -= 1
    return end


def reports_event(messages: Sequence[Message]) -> bool:
    """OpenClaw's last message tells of a task that has ended, or of another session."""
    return any(
        _EVENT in m["content"] or _INTER_SESSION[1:] in m["content"]
        for m in messages[_volatile_from(messages) :]
    )


def nudged(messages: Sequence[Message]) -> bool:
    """The request asks again after an empty reply."""
    end = _volatile_from(messages)
    return end > 1 and is_nudge(messages[end - 1], messages[end - 2])


def without_volatile(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages that will be in later requests too.

    OpenClaw ends every request with a message about running processes, and drops it afterwards; on
    some wires it stays where it is until the user goes on, see `is_volatile`.
    """
    end = _volatile_from(messages)
    while end > 1 and is_nudge(messages[end - 1], messages[end - 2]):
        end -= 1
    return messages[:end]


def last_user_index(messages: Sequence[Message]) -> int | None:
    """Index of the last message that the user himself wrote."""
    for at in range(len(without_volatile(messages)) - 1, -1, -1):
        if messages[at]["role"] == "user" and not is_volatile(messages[at]):
            return at
    return None


def last_user_words(messages: Sequence[Message]) -> str:
    """What the user wrote last; "" when they wrote nothing."""
    at = last_user_index(messages)
    return "" if at is None else words(messages[at]["content"])


def words(text: str) -> str:
    """A user message without what OpenClaw adds to it."""
    text = _unwrapped(_without_line(text))
    framed = _framed(text)
    if framed is None:
        return text
    if _AGAIN in framed:
        return _unwrapped(framed.rpartition(_AGAIN)[0])
    return _unwrapped(framed.partition("\n\n")[2] or framed)


def _framed(text: str) -> str | None:
    """What stands in the frame around a message that was not answered; None: there is no frame."""
    frame = _FRAME.match(text)
    return text[frame.end() :] if frame else None


def _unwrapped(text: str) -> str:
    """Without timestamp and metadata, in whatever order they stand before the words."""
    text, at = text.strip(), 0
    while found := _STAMP.match(text, at) or _METADATA.match(text, at):
        at = found.end()
    return text[at:].strip()
