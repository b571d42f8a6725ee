"""Identify the session that a request belongs to, and the request's purpose.

Rule: a mark that a user could type never decides alone. It needs evidence that only the client
writes: its system prompt, the session's key, the set of tools, the missing timestamp. Evidence of
the session is tried from the most explicit to the least, and the first found decides. A client that
does not identify itself is taken for a person's agent: its turns are main.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tinker_claw.conversation.attribution import (
    Reading,
    asking,
    is_result,
    last_request_index,
    nudged,
    read,
    without_volatile,
)
from tinker_claw.conversation.harnesses import HARNESSES, Harness
from tinker_claw.conversation.openclaw import (
    FLUSH,
    SYSTEM_NAME,
    SYSTEM_OPENING,
    Runtime,
    reports_event,
    runtime,
    surface,
)
from tinker_claw.conversation.outright import outright
from tinker_claw.errors import RequestError
from tinker_claw.formats.base import GenerationRequest
from tinker_claw.images import parts_of
from tinker_claw.served import OPENING, SIDE_KEY, Belongs, Identity, RequestKind, Surface
from tinker_claw.types import Attempt, Kind

_FLUSH_TOOLS = frozenset({"read", "write"})
LARGEST_GROUP = 1000
"""Most sessions of one group."""
LONGEST_KEY = 256
"""Most characters; a longer one is replaced by its digest."""
_AFFINITY_HEADERS = ("thread-id", "session_id", "session-id", "x-session-affinity")
"""Headers that name the session. Codex's session-id is that of the root of a tree of threads. Not
x-client-request-id: some clients number requests with it."""
_OWN_COMPACTION = "compact"
"""Value of a child's header by which Codex marks a compaction of the conversation itself."""
_TRUE = frozenset({"1", "true", "yes", "on"})
_EPISODE = "episode"
_CHILDREN = [name for harness in HARNESSES for name in harness.children]
_CALLS = [call for harness in HARNESSES for call in harness.calls]
# Version, trace id, span id, flags (W3C Trace Context).
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?P<trace>(?!0{32})[0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_BOUNDARY = re.compile(r":\d+\Z")
_NUMBER = re.compile(r"[0-9]{1,9}")
_SESSIONS = [
    (re.compile(form), RequestKind(kind))
    for harness in HARNESSES
    for form, kind in harness.sessions.items()
]
"""Forms of the keys of sessions that are not the user's, and what they are."""
_CONTROL_UI = "openclaw-webchat-"
"""Prefix of the hash of the session's key that the Control UI sends instead of the session's id."""


def identify(request: GenerationRequest, headers: Mapping[str, str]) -> Identity:
    """Infer session, kind and purpose.

    Args:
        headers: names in lower case.

    Raises:
        RequestError: X-Turn-Type has no valid value, a group is incomplete, or an episode has no
            name.
    """
    seen = gather(request, headers)
    sign = recognise(seen)
    kind, why = _kind(sign, headers)
    key, key_source, by_trace = _session(seen, sign.request_kind, kind)
    identity = Identity(
        key=session_key(key),
        kind=kind,
        reason=f"{why}; session from {key_source}",
        request_kind=sign.request_kind,
        trace=seen.trace,
        by_trace=by_trace,
        done=flagged(headers, "x-session-done"),
        attempt=_attempt(headers) if kind is Kind.MAIN else None,
        surface=_surface(seen, sign.request_kind),
        client=_client_name(seen),
    )
    if identity.episode and not identity.has_own_name:
        raise RequestError(
            "An episode needs a name of its own: send X-Session-Id with each of its requests. "
            "Tries at one task begin alike, and could not be told apart.",
            param="X-Session-Id",
        )
    return identity


def _kind(sign: Sign, headers: Mapping[str, str]) -> tuple[Kind, str]:
    """Return the kind of a turn and why: by its header, unless that would train a side call. A step
    of an episode is a main turn."""
    value = sent(headers, "x-turn-type").lower()
    if value not in ("", _EPISODE, *Kind):
        raise RequestError(
            "The header X-Turn-Type must be main, side or episode.", param="X-Turn-Type"
        )
    inferred = f"{sign.request_kind}: {sign.by}"
    if not value:
        return sign.request_kind.kind, inferred
    explicit = Kind.MAIN if value == _EPISODE else Kind(value)
    if explicit is Kind.MAIN and sign.request_kind.kind is Kind.SIDE:
        return Kind.SIDE, (
            f"{inferred} (X-Turn-Type says {explicit}, which makes no such call trainable)"
        )
    return explicit, f"X-Turn-Type says so; it looks like a {inferred}"


def session_key(name: str) -> str:
    """Return a client's name of a session, or a digest of it if it is very long."""
    return name if len(name) <= LONGEST_KEY else hashlib.sha256(name.encode()).hexdigest()


def sent(headers: Mapping[str, str], name: str) -> str:
    """Return the value of a header; "" where it is not sent."""
    return headers.get(name, "").strip()


def flagged(headers: Mapping[str, str], name: str) -> bool:
    """Return whether a header is set to a true value."""
    return sent(headers, name).lower() in _TRUE


class Sign(NamedTuple):
    """Kind of a request, and the evidence for it."""

    request_kind: RequestKind
    by: str


@dataclass(frozen=True, slots=True)
class SessionEvidence:
    """Evidence by which a request is identified, read from it once."""

    request: GenerationRequest
    headers: Mapping[str, str]
    trace: str | None
    affinity: str | None
    """The value that names the session in headers or body, as it came."""
    source: str
    """Name of the header or field that holds the value."""
    line: Runtime | None
    """None also where only a user can have written it."""
    agent: bool
    """The client is OpenClaw's agent, by its system prompt or its Runtime line."""
    opening: bool
    """Its system prompt begins as that of the releases whose messages are known."""
    system: str
    harness: Harness | None


def gather(request: GenerationRequest, headers: Mapping[str, str]) -> SessionEvidence:
    """Gather the evidence."""
    named = ((sent(headers, name), name) for name in _AFFINITY_HEADERS)
    affinity, source = next((pair for pair in named if pair[0]), request.session or (None, ""))
    traced = _TRACEPARENT.fullmatch(sent(headers, "traceparent"))
    trace = traced["trace"] if traced else None
    first = request.messages[0]
    system = first["content"] if first["role"] == "system" else ""
    start = system.lstrip()
    opening = start.startswith(SYSTEM_OPENING)
    # Anyone can paste such a line; OpenClaw's agent has a system prompt of its own, or a trace.
    line = runtime(request.messages, in_user_message=opening or trace is not None)
    agent = opening or line is not None or start.startswith(SYSTEM_NAME)
    program = headers.get("user-agent", "").lower()
    harness = next((candidate for candidate in HARNESSES if candidate.sent(program, system)), None)
    return SessionEvidence(
        request, headers, trace, affinity, source, line, agent, opening, system, harness
    )


def recognise(seen: SessionEvidence) -> Sign:
    """Identify the purpose of a request."""
    sign = _child(seen) or _utility(seen)
    if sign is not None:
        return sign
    if seen.agent:
        sign = _by_session(seen) or _by_prompt(seen)
    return sign or _by_words(seen) or _turn(seen)


def _child(seen: SessionEvidence) -> Sign | None:
    """Recognise the agents that an agent starts, by a header of their own."""
    for name in _CHILDREN:
        if sent(seen.headers, name) not in ("", _OWN_COMPACTION):
            return Sign(RequestKind.SUBAGENT, f"the header {name}")
    return None


def _utility(seen: SessionEvidence) -> Sign | None:
    """Recognise calls with their own system prompt, one question, and neither tools nor agent."""
    if seen.agent or not seen.system:
        return None
    parts = [part.text.lstrip() for part in parts_of(seen.request.messages[0])]
    single = {message["role"] for message in seen.request.messages[1:]} == {"user"}
    alone = single and not seen.request.tools
    for call in _CALLS:
        # A compaction belongs to a turn; recaps and titles run beside it, without a trace.
        fits = (call.tools or alone) and (call.traced or seen.trace is None)
        if fits and any(part.startswith(call.opens) and call.holds in part for part in parts):
            return Sign(RequestKind(call.asks), "its system prompt")
    return None


def _by_words(seen: SessionEvidence) -> Sign | None:
    """Recognise a harness's own prompts."""
    readings = asking(seen.request.messages)
    for reading in readings:
        if reading.asks is not None:
            typed = any(reading.words for reading in readings)
            if typed and reading.asks == RequestKind.NUDGE:
                return None
            return Sign(RequestKind(reading.asks), "a prompt that its harness writes")
    return None


def _surface(seen: SessionEvidence, request_kind: RequestKind) -> Surface:
    """Return where the conversation takes place, and whose it is."""
    if request_kind is RequestKind.SUBAGENT:
        return Surface(Belongs.NOBODY, because="the prompt of another agent")
    if seen.agent and not seen.opening:
        return Surface(Belongs.NOBODY, because="no layout of OpenClaw's that is known")
    if seen.agent:
        return surface(seen.line, seen.system)
    harness = seen.harness
    if harness is None:
        return Surface(listed=not seen.system.strip())
    if harness.source is None:
        return Surface(local=True)
    place = harness.where(seen.system)
    if place in ("local", "terminal"):
        return Surface()
    because = f"a conversation of {harness.name}'s in a chat service"
    alone = harness.name.lower() if place == "direct" else ""
    return Surface(Belongs.NOBODY, because=because, group=not alone, alone=alone)


def _client_name(seen: SessionEvidence) -> str:
    """Return the name of the agent's program."""
    if seen.harness is not None:
        return seen.harness.name
    agent = seen.headers.get("user-agent", "").split("/", 1)[0].strip()
    return agent[:40] if agent.isprintable() else ""


def _by_session(seen: SessionEvidence) -> Sign | None:
    """Recognise sessions that are not the user's, by their keys."""
    line = seen.line
    names = [line and line.session_key, seen.affinity or (line and line.session_id)]
    for form, kind in _SESSIONS:
        if any(name and form.fullmatch(name) for name in names):
            return Sign(kind, "its session's name")
    return None


def _by_prompt(seen: SessionEvidence) -> Sign | None:
    """Recognise prompts that OpenClaw writes itself."""
    messages = seen.request.messages
    at = last_request_index(messages)
    if at is None:
        return None
    prompt = read(messages[at])
    tools = {tool["function"]["name"] for tool in seen.request.tools}
    if tools and tools <= _FLUSH_TOOLS and prompt.words.startswith(FLUSH):
        return Sign(RequestKind.FLUSH, "its prompt, and no tools but read and write")
    automation = prompt.automation
    # A short prompt stands in histories only: here a person typed it.
    if automation is None or automation.prompt == "short":
        return None
    request_kind = RequestKind(automation.asks)
    if request_kind is not RequestKind.ANNOUNCEMENT:
        return Sign(request_kind, "the clock at its end, and no timestamp of a user's message")
    # While it is being answered, OpenClaw's last message mentions it, too.
    if at + 1 < len(without_volatile(messages)) or reports_event(messages):
        return Sign(request_kind, "a message from another session")
    return None


def _turn(seen: SessionEvidence) -> Sign:
    """Recognise a turn of an agent's conversation, or of a client that does not identify itself."""
    messages, readings = seen.request.messages, asking(seen.request.messages)
    newest = readings[0] if readings else Reading()
    # A model without tools gets none in its user's turns either; helpers stamp no message.
    if seen.agent and not (seen.request.tools or newest.stamped or newest.queued):
        return Sign(RequestKind.UTILITY, "OpenClaw, but neither tools nor a user's message")
    rating = outright(newest.words)
    if rating is not None and not rating.asks and len(readings) == 1:
        return Sign(RequestKind.VERDICT, "the user's words are a verdict and nothing else")
    if seen.agent and nudged(messages):
        return Sign(RequestKind.REASK, "OpenClaw asks again after an empty reply")
    if any(map(is_result, without_volatile(messages)[-1:])):
        return Sign(RequestKind.TOOL, "it ends in the result of a tool")
    if not seen.agent:
        return Sign(RequestKind.CLIENT, "nothing marks it as a side call")
    if newest.retry:
        return Sign(RequestKind.RETRY, "OpenClaw, with the user's message in the frame of a retry")
    return Sign(RequestKind.USER, "OpenClaw, with a user's message")


def _session(seen: SessionEvidence, request_kind: RequestKind, kind: Kind) -> tuple[str, str, bool]:
    """Return the key, where it comes from, and whether the trace's session goes before it."""
    if key := sent(seen.headers, "x-session-id"):
        return key, "X-Session-Id", False
    session_id = seen.line.session_id if seen.line else None
    value = seen.affinity
    if value is not None and value.startswith(_CONTROL_UI):
        value = None  # turns have an id, the same on every surface; a compaction has its trace
    if value is not None:
        # It asks again after an empty reply without its system prompt, too.
        ours = seen.agent or request_kind is RequestKind.COMPACTION or nudged(seen.request.messages)
        return (_without_boundary(value, session_id) if ours else value), seen.source, False
    traced = seen.trace is not None
    if request_kind is RequestKind.FLUSH and traced and seen.line is not None:
        return seen.line.name, "its trace, or the Runtime line", True
    if seen.line is not None:
        return seen.line.name, "the Runtime line", False
    if kind is Kind.SIDE:
        return SIDE_KEY, "its trace" if traced else "nothing: none is named", traced
    return opening_key(seen), "its first messages", False


def _without_boundary(value: str, session_id: str | None) -> str:
    """Return the session's id without the number that grows when it is compacted or reset.

    To its user it is the same session; calls that compact it have no number, nor has the Runtime
    line. The histories show which turns in it belong together.
    """
    if session_id is not None and f"{session_id}:".startswith(value[: len(session_id) + 1]):
        return session_id  # also where OpenClaw has cut the value to 64 characters
    return _BOUNDARY.sub("", value) or value


def is_episode(headers: Mapping[str, str]) -> bool:
    """Return whether a request is marked as a step of an episode, by X-Turn-Type or as one of a
    group's; a person's request has priority over it, whatever else it turns out to be."""
    grouped = bool(session_key(sent(headers, "x-group-id")))
    return grouped or sent(headers, "x-turn-type").lower() == _EPISODE


def _attempt(headers: Mapping[str, str]) -> Attempt | None:
    """Read task and group."""
    size = sent(headers, "x-group-size")
    if size and not (_NUMBER.fullmatch(size) and 0 < int(size) <= LARGEST_GROUP):
        raise RequestError(
            f"The header X-Group-Size must be a number from 1 to {LARGEST_GROUP}.",
            param="X-Group-Size",
        )
    task, group = (session_key(sent(headers, name)) for name in ("x-task-id", "x-group-id"))
    if bool(group) != bool(size):
        raise RequestError(
            "A group has a name and a size, how many sessions there will be: send both "
            "X-Group-Id and X-Group-Size.",
            param="X-Group-Size" if group else "X-Group-Id",
        )
    episode = is_episode(headers)
    if not (task or episode):
        return None
    return Attempt(task or None, group or None, int(size) if size else None, episode)


def opening_key(seen: SessionEvidence) -> str:
    """Return the key of a session by its beginning: its system prompt, and a person's first words.

    Conversations that open alike share this; their turns are still told apart by what follows. What
    a harness writes beside the words changes: dates, lists of files. So does the system prompt of a
    known harness, whose name stands for it.
    """
    hasher, harness = hashlib.sha256(), seen.harness
    for message in seen.request.messages:
        if message["role"] == "user":
            text = read(message).words
        else:
            text = message["content"] if harness is None else harness.name
        hasher.update(f"{message['role']}\0{text}\0".encode())
        if message["role"] == "user" and text:
            break
    return f"{OPENING}{hasher.hexdigest()[:32]}"
