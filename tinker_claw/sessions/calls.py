"""What a request is for.

Rule: a mark that a user could type never decides alone. Beside it stands something that only the
client writes: its system prompt, the session's key, the set of tools, the missing timestamp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tinker_claw.sessions.openclaw import (
    FLUSH,
    ON_ITS_OWN,
    SYSTEM_MARKS,
    SYSTEM_OPENING,
    Runtime,
    automation,
    is_framed,
    is_stamped,
    last_user_index,
    nudged,
    reports_event,
    runtime,
    without_volatile,
    words,
)
from tinker_claw.types import Kind
from tinker_claw.wire import ChatRequest


class Call(StrEnum):
    """What a request is for; the first five may be trained on."""

    USER = "user turn"
    TOOL = "tool loop"
    RETRY = "retry"
    REASK = "re-ask"
    CLIENT = "client turn"
    """Of a program that says nothing of itself."""
    RECAP = "recap"
    TITLE = "title"
    COMPACTION = "compaction"
    FLUSH = "memory flush"
    HEARTBEAT = "heartbeat"
    CRON = "cron"
    """In the main session."""
    ALONE = "isolated cron"
    SUBAGENT = "subagent"
    ANNOUNCEMENT = "announcement"
    """What another session has to say: the result of a subagent, as a rule."""
    AUTOMATED = "automated"
    """A prompt that nobody typed, of no kind that is known here."""
    INFER = "infer"
    """`openclaw infer model run`: a single question."""
    UTILITY = "utility"
    """A call of OpenClaw's without tools, of no kind that is known here."""

    @property
    def kind(self) -> Kind:
        return Kind.MAIN if self in _MAIN else Kind.SIDE


_MAIN = frozenset({Call.USER, Call.TOOL, Call.RETRY, Call.REASK, Call.CLIENT})
_BY_NAME = {call.value: call for call in Call}
_FLUSH_TOOLS = frozenset({"read", "write"})
_SDK = "OpenAI/JS"
"""How the user agent of OpenClaw's HTTP client begins."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A call, and by what it was recognised."""

    call: Call
    by: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What identification goes by, read from the request once."""

    request: ChatRequest
    headers: Mapping[str, str]
    trace: str | None
    affinity: str | None
    """The value that names the session in headers or body, as it came."""
    line: Runtime | None
    """None also where only a user can have written it."""
    agent: bool
    """OpenClaw's agent speaks: by its system prompt, or by its Runtime line."""

    @property
    def system(self) -> str:
        first = self.request.messages[0]
        return first["content"].lstrip() if first["role"] == "system" else ""


def read(
    request: ChatRequest, headers: Mapping[str, str], trace: str | None, affinity: str | None
) -> Evidence:
    """Gather the evidence."""
    first = request.messages[0]
    opening = first["role"] == "system" and first["content"].lstrip().startswith(SYSTEM_OPENING)
    # Anyone can paste such a line; OpenClaw's agent has a system prompt of its own, or a trace.
    line = runtime(request.messages, in_user_message=opening or trace is not None)
    return Evidence(request, headers, trace, affinity, line, opening or line is not None)


def recognise(seen: Evidence) -> Sign:
    """What the request is for."""
    if not seen.request.tools:
        sign = _utility(seen)
        if sign is not None:
            return sign
    if not seen.agent:
        return _client(seen)
    return _by_session(seen) or _by_prompt(seen) or _main(seen)


def _utility(seen: Evidence) -> Sign | None:
    """Calls with a system prompt of their own, one question, and neither tools nor agent."""
    roles = [message["role"] for message in seen.request.messages]
    if seen.agent or roles != ["system", "user"]:
        return None
    for mark in SYSTEM_MARKS:
        # A compaction belongs to a turn; recaps and titles run beside it, without a trace.
        if seen.system.startswith(mark.text) and (mark.traced or seen.trace is None):
            how = "" if mark.traced else " and trace"
            return Sign(_BY_NAME[mark.what], f"its system prompt, one question, no tools{how}")
    return None


def _client(seen: Evidence) -> Sign:
    request = seen.request
    if request.messages[-1]["role"] == "tool":
        return Sign(Call.TOOL, "it ends in the result of a tool")
    alone = len(request.messages) == 1 and request.messages[0]["role"] == "user"
    named = seen.affinity is not None or "x-session-id" in seen.headers
    bare = not request.tools and seen.trace is None and not named
    like = request.stream and request.include_usage and request.max_tokens is not None
    if alone and bare and like and seen.headers.get("user-agent", "").startswith(_SDK):
        return Sign(
            Call.INFER,
            "a single question from OpenClaw's SDK, without system prompt, tools and trace "
            "(X-Session-Id says otherwise)",
        )
    return Sign(Call.CLIENT, "nothing marks it as a side call")


def _by_session(seen: Evidence) -> Sign | None:
    """Sessions that are not the user's have keys of their own."""
    key = seen.line.session_key if seen.line else ""
    area = key.split(":")[2:3]
    if area == ["subagent"]:
        return Sign(Call.SUBAGENT, f"its session {key}")
    if area == ["cron"]:
        return Sign(Call.ALONE, f"its session {key}")
    if area == ["internal-session-effects"]:
        return Sign(Call.FLUSH, f"its session {key}")
    value = seen.affinity or (seen.line and seen.line.session_id) or ""
    for form, what in ON_ITS_OWN:
        if form.fullmatch(value):
            return Sign(_BY_NAME[what], f"its session {value}")
    return None


def _by_prompt(seen: Evidence) -> Sign | None:
    """Prompts that OpenClaw writes itself."""
    messages = seen.request.messages
    at = last_user_index(messages)
    if at is None:
        return None
    prompt = messages[at]["content"]
    tools = {tool["function"]["name"] for tool in seen.request.tools}
    if tools and tools <= _FLUSH_TOOLS and words(prompt).startswith(FLUSH):
        return Sign(Call.FLUSH, "its prompt, and no tools but read and write")
    found = automation(prompt)
    if found is None or found.short:
        # The short form stands in histories only: here somebody typed it.
        return None
    call = _BY_NAME[found.what]
    if call is not Call.ANNOUNCEMENT:
        return Sign(call, f"{found.by}, and no timestamp of a user's message")
    # While it is being answered, OpenClaw's last message speaks of it, too.
    if at + 1 < len(without_volatile(messages)) or reports_event(messages):
        return Sign(call, found.by)
    return None


def _main(seen: Evidence) -> Sign:
    messages = seen.request.messages
    kept = without_volatile(messages)
    at = last_user_index(messages)
    stamped = at is not None and is_stamped(messages[at]["content"])
    who = "OpenClaw's agent"
    if not seen.request.tools and not (stamped and seen.trace):
        return Sign(Call.UTILITY, f"{who}, but neither tools nor a user's message in a trace")
    if nudged(messages):
        return Sign(Call.REASK, f"{who} asks again after an empty reply")
    if kept[-1:] and kept[-1]["role"] == "tool":
        return Sign(Call.TOOL, f"{who}, with the result of a tool")
    if at is not None and is_framed(messages[at]["content"]):
        return Sign(Call.RETRY, f"{who}, with the user's message in the frame of a retry")
    what = "a user's message and its timestamp" if stamped else "a message of no automatic kind"
    return Sign(Call.USER, f"{who}, with {what}")
