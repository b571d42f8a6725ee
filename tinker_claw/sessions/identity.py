"""Session, kind and purpose of a request.

Rule: evidence is tried from the most explicit to the least, and the first that speaks decides.
A client that tells nothing of itself is taken for a person's agent: its turns are main.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinker_claw.errors import RequestError
from tinker_claw.sessions.calls import Call, Evidence, read, recognise
from tinker_claw.types import Kind, Message
from tinker_claw.wire import ChatRequest

LONGEST_KEY = 256
"""Characters; the digest of a longer one stands for it."""
_AFFINITY_HEADERS = ("session_id", "x-session-affinity")
"""Its x-client-request-id is the same value again; other clients number requests with it."""
_TRUE = frozenset({"1", "true", "yes", "on"})
_OPENING = "opening:"
_SIDE_KEY = "side calls without a session"
# Version, trace id, span id, flags (W3C Trace Context).
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_BOUNDARY = re.compile(r":\d+")
_CONTROL_UI = "openclaw-webchat-"
"""How a hash of the session's key begins that the Control UI sends in place of the session's id."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is asking, for what, and whether it may be trained on."""

    key: str
    """Names the session, within its user."""
    kind: Kind
    reason: str
    """Why this session and this kind; none of the user's words."""
    call: Call
    trace: str | None = None
    """Of one run of the agent, as a rule one user turn; None: the client sent none."""
    by_trace: bool = False
    """The session is that of the run with this trace, where one is known, and else `key`."""
    done: bool = False
    """The client said that the session ends with this turn."""

    @property
    def named(self) -> bool:
        """The key is the client's name for the session; no other session has it."""
        return self.key != _SIDE_KEY and not self.key.startswith(_OPENING)


def identify(request: ChatRequest, headers: Mapping[str, str]) -> Identity:
    """Infer session, kind and purpose.

    Args:
        headers: names in lower case.

    Raises:
        RequestError: X-Turn-Type is neither main nor side.
    """
    trace = _trace(headers)
    value, source = _affinity(request, headers)
    seen = read(request, headers, trace, value)
    sign = recognise(seen)
    explicit = _turn_type(headers)
    kind, why = sign.call.kind, f"{sign.call}: {sign.by}"
    if explicit is Kind.MAIN and kind is Kind.SIDE:
        why = f"{why} (X-Turn-Type says main, which makes no such call trainable)"
    elif explicit is not None:
        kind, why = explicit, f"X-Turn-Type says so; it looks like a {why}"
    key, told, by_trace = _session(seen, sign.call, kind, source)
    return Identity(
        key=key if len(key) <= LONGEST_KEY else hashlib.sha256(key.encode()).hexdigest(),
        kind=kind,
        reason=f"{why}; session from {told}",
        call=sign.call,
        trace=trace,
        by_trace=by_trace,
        done=flagged(headers, "x-session-done"),
    )


def flagged(headers: Mapping[str, str], name: str) -> bool:
    """Whether a header says yes."""
    return headers.get(name, "").strip().lower() in _TRUE


def _session(seen: Evidence, call: Call, kind: Kind, source: str) -> tuple[str, str, bool]:
    """Key, where it comes from, and whether the trace's session goes before it."""
    if key := seen.headers.get("x-session-id", "").strip():
        return key, "X-Session-Id", False
    session_id = seen.line.session_id if seen.line else None
    value = seen.affinity
    if value is not None and session_id is not None and value.startswith(_CONTROL_UI):
        value = None  # the id is the same on every surface of the session
    if value is not None:
        ours = seen.agent or call is Call.COMPACTION
        return (_without_boundary(value, session_id) if ours else value), source, False
    traced = seen.trace is not None
    if call is Call.FLUSH and traced and seen.line is not None:
        return session_id or seen.line.session_key, "its trace, or the Runtime line", True
    if seen.line is not None:
        return session_id or seen.line.session_key, "the Runtime line", False
    if kind is Kind.SIDE:
        return _SIDE_KEY, "its trace" if traced else "nothing: none is named", traced
    return f"{_OPENING}{_opening(seen.request.messages)}", "its first messages", False


def _without_boundary(value: str, session_id: str | None) -> str:
    """The session's id, without the number that grows when it is compacted or reset.

    It is the same session to its user, who goes on talking; calls that compact it have no number,
    nor has the Runtime line. What belongs together within it is told by the histories.
    """
    if session_id is not None and f"{session_id}:".startswith(value[: len(session_id) + 1]):
        return session_id  # also where OpenClaw has cut the value to 64 characters
    name, colon, number = value.rpartition(":")
    return name if name and _BOUNDARY.fullmatch(colon + number) else value


def _affinity(request: ChatRequest, headers: Mapping[str, str]) -> tuple[str | None, str]:
    """The value that names the session, and where it stands."""
    for name in _AFFINITY_HEADERS:
        if value := headers.get(name, "").strip():
            return value, name
    if request.prompt_cache_key:
        return request.prompt_cache_key, "prompt_cache_key"
    return None, ""


def _trace(headers: Mapping[str, str]) -> str | None:
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", "").strip())
    return found["trace"] if found and found["trace"].strip("0") else None


def _turn_type(headers: Mapping[str, str]) -> Kind | None:
    value = headers.get("x-turn-type", "").strip().lower()
    if not value:
        return None
    if value not in (Kind.MAIN, Kind.SIDE):
        raise RequestError("The header X-Turn-Type must be main or side.", param="X-Turn-Type")
    return Kind(value)


def _opening(messages: Sequence[Message]) -> str:
    """Digest of everything up to the first user message.

    Conversations that open alike share this; their turns are still told apart by what follows.
    """
    hasher = hashlib.sha256()
    for message in messages:
        hasher.update(f"{message['role']}\0{message['content']}\0".encode())
        if message["role"] == "user":
            break
    return hasher.hexdigest()[:32]
