"""Session and kind of a request.

Rule: evidence is tried from the most explicit to the least, and the first that speaks decides.
A client that tells nothing of itself is taken for a person's agent: its turns are main.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinker_claw.errors import RequestError
from tinker_claw.sessions.openclaw import (
    SESSION_MARKS,
    SYSTEM_MARKS,
    SYSTEM_OPENING,
    USER_MARKS,
    Mark,
    Runtime,
    last_user_words,
    runtime,
)
from tinker_claw.types import Kind, Message
from tinker_claw.wire import ChatRequest

_AFFINITY_HEADERS = ("session_id", "x-session-affinity")
_TRUE = frozenset({"1", "true", "yes", "on"})
_SIDE_KEY = "side calls without a session"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is asking, and whether it may be trained on."""

    key: str
    """Names the session, within its user."""
    kind: Kind
    reason: str
    """Why this session and this kind."""
    done: bool = False
    """The client said that the session ends with this turn."""


def identify(request: ChatRequest, headers: Mapping[str, str]) -> Identity:
    """Infer session and kind.

    Args:
        headers: names in lower case.

    Raises:
        RequestError: X-Turn-Type is neither main nor side.
    """
    line = runtime(request.messages)
    told, source = _told_key(request, headers, line)
    side = _side_because(request, told, line)
    explicit = _turn_type(headers)
    if explicit is not None:
        kind, why = explicit, "X-Turn-Type says so"
    elif side is not None:
        kind, why = Kind.SIDE, side
    else:
        kind, why = Kind.MAIN, "no sign of a side call"
    if told is None:
        side_call = kind is Kind.SIDE
        told = _SIDE_KEY if side_call else f"opening:{_opening(request.messages)}"
        source = "no session named" if side_call else "its first messages"
    return Identity(
        key=told,
        kind=kind,
        reason=f"{why}; session from {source}",
        done=headers.get("x-session-done", "").strip().lower() in _TRUE,
    )


def _told_key(
    request: ChatRequest, headers: Mapping[str, str], line: Runtime | None
) -> tuple[str | None, str]:
    """The session that the client names, and where."""
    if key := headers.get("x-session-id", "").strip():
        return key, "X-Session-Id"
    for name in _AFFINITY_HEADERS:
        if key := headers.get(name, "").strip():
            return key, name
    if request.prompt_cache_key:
        return request.prompt_cache_key, "prompt_cache_key"
    if line is not None:
        return line.session_id or line.session_key, "the Runtime line"
    return None, ""


def _turn_type(headers: Mapping[str, str]) -> Kind | None:
    value = headers.get("x-turn-type", "").strip().lower()
    if not value:
        return None
    if value not in (Kind.MAIN, Kind.SIDE):
        raise RequestError("The header X-Turn-Type must be main or side.", param="X-Turn-Type")
    return Kind(value)


def _side_because(request: ChatRequest, told: str | None, line: Runtime | None) -> str | None:
    """Why this is a side call of OpenClaw, or None."""
    first = request.messages[0]
    system = first["content"].lstrip() if first["role"] == "system" else ""
    if mark := _begins(system, SYSTEM_MARKS):
        return f"OpenClaw's {mark.what}"
    openclaw = line is not None or system.startswith(SYSTEM_OPENING)
    if not openclaw:
        return None
    if not request.tools:
        return "an OpenClaw call without tools"
    keys = (told or "", line.session_key if line else "", (line and line.session_id) or "")
    for mark in SESSION_MARKS:
        if any(mark.text in key for key in keys):
            return f"OpenClaw's {mark.what}, by its session key"
    if mark := _begins(last_user_words(request.messages), USER_MARKS):
        return f"OpenClaw's {mark.what}"
    return None


def _begins(text: str, marks: Sequence[Mark]) -> Mark | None:
    return next((mark for mark in marks if text.startswith(mark.text)), None)


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
