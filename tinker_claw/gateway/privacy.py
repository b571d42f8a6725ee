"""Decide once a turn what of its request may be kept.

Rule: decided before anything is written. Nothing that was said in private is kept, and a prompt
that holds a secret is not kept as tokens either: tokens are text in another form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cachetools import LRUCache

from tinker_claw.conversation.attribution import Attribute, read
from tinker_claw.conversation.classify import flagged, gather, opening_key
from tinker_claw.formats.base import GenerationRequest
from tinker_claw.gateway.secrets import SecretSearch
from tinker_claw.images import parts_of
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.turns import hidden, read_private
from tinker_claw.privacy.marker import (
    NEAR_MISS,
    Marker,
    Privacy,
    ends,
    marked,
    may_mark,
    mentioned,
)
from tinker_claw.served import SIDE_KEY, Identity, RequestKind
from tinker_claw.telemetry import log
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import Kind, Message, Writer, cached

TRACES = 4096
_OF_ANOTHER = frozenset({RequestKind.FLUSH, RequestKind.SUBAGENT, RequestKind.UTILITY})
"""Calls with keys of their own, and with words from the session that they were made for."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Decision what of a request may be kept."""

    privacy: Privacy
    reason: TurnRefusal | None = None
    """Why its tokens are not kept, and its turn is not trained; None: they are, if it is open."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Secrets that stood in the prompt before anybody spoke; never stored."""
    key: str | None = None
    """Name of its session, where that is a digest of messages which hold a secret."""

    @property
    def is_open(self) -> bool:
        """Return whether nothing in it was said in private."""
        return self.privacy is Privacy.OPEN


_OPEN, _PRIVATE, _ONCE_PRIVATE = Privacy


class SessionPrivacy:
    """Record of private sessions, by which it is decided what is kept."""

    def __init__(self, ledger: Ledger, secrets: SecretSearch) -> None:
        self._turns = ledger.turns
        self._secrets = secrets
        self._sessions = read_private(ledger.rows)
        self._traces = LRUCache[tuple[str, str], Privacy](TRACES)
        self.near_misses = 0
        """Requests since the start that made a session private by a near miss of the marker."""

    async def decide(
        self,
        user: str,
        identity: Identity,
        headers: Mapping[str, str],
        request: GenerationRequest,
        writers_of: Attribute,
    ) -> Kept:
        """Decide what of a request may be kept; its session has that privacy from now on.

        Args:
            writers_of: gives every piece of a message its writer; only an owner ends what is
                private.
        """
        is_side, earlier = identity.kind is Kind.SIDE, self._stored(user, identity)
        header, users = flagged(headers, "x-private"), reversed(request.messages)
        marker = next(filter(None, (_marker_by(m, writers_of) for m in users)), None)
        line = marker and marker.privacy
        # The input of a side call is a transcript, or belongs to a turn; unless its key is that of
        # the session that it is about, it may be of any of its user's.
        shows_line = is_side and any(cached(_mentions, message) for message in request.messages)
        about_any = (
            not identity.has_own_name or identity.by_trace or identity.request_kind in _OF_ANOTHER
        )
        had_one = is_side and about_any and any(user == of for of, _ in self._sessions)
        cases = (
            # The sign; the privacy of its session from then on; that of a side call. The first
            # sign that is there decides. "A private session" in docs/privacy.md describes them.
            (header, _PRIVATE, _PRIVATE),
            (line is _PRIVATE, _PRIVATE, _PRIVATE),
            (line is _ONCE_PRIVATE, _ONCE_PRIVATE, _PRIVATE),
            (earlier is _PRIVATE, _PRIVATE, _PRIVATE),
            (earlier is _ONCE_PRIVATE, _ONCE_PRIVATE, _PRIVATE),
            (shows_line, _OPEN, _PRIVATE),
            (had_one, _OPEN, _PRIVATE),
            (True, _OPEN, _OPEN),
        )
        session, side_call = next(case[1:] for case in cases if case[0])
        if marker and not (marker.exact or header) and earlier is not _PRIVATE:
            self.near_misses += 1
            log.warning("private.near_miss", user=user, meaning=NEAR_MISS)
        # What a side call shows of a session does not say whether that is still private. A turn of
        # a named conversation does, also where its client calls it side or asks for a version.
        own = identity.has_own_name and identity.request_kind.kind is Kind.MAIN
        if session is not _OPEN and (own or not is_side):
            self._record(user, identity, session)
        privacy = side_call if is_side else session
        if privacy is _PRIVATE:
            return Kept(privacy)
        after = TurnRefusal(Reason.AFTER_PRIVATE) if privacy is _ONCE_PRIVATE else None
        searched, key = await self._secrets.search(request, writers_of), None
        if searched is None:
            return Kept(privacy, after)
        secret, secrets = searched
        if not identity.has_own_name and identity.key != SIDE_KEY:
            messages = await self._secrets.redact_messages(request.messages)
            key = opening_key(gather(replace(request, messages=messages), headers))
        held = TurnRefusal(Reason.HOLDS, secret) if secret else None
        return Kept(privacy, after or held, secrets, key)

    def _stored(self, user: str, identity: Identity) -> Privacy:
        by_key = self._sessions.get((user, hidden(user, identity.key)), Privacy.OPEN)
        if by_key is Privacy.OPEN and identity.trace is not None:
            return self._traces.get((user, identity.trace), Privacy.OPEN)
        return by_key

    def _record(self, user: str, identity: Identity, privacy: Privacy) -> None:
        if identity.trace is not None:
            self._traces[user, identity.trace] = privacy
        name = (user, hidden(user, identity.key))
        if identity.has_own_name and self._sessions.get(name) is not privacy:
            # Stored, so that it outlives restarts and compactions; nothing else is stored.
            self._turns.mark_private(user, identity.key, privacy)
            self._sessions[name] = privacy


def _mentions(message: Message) -> bool:
    """Return whether a transcript in a side call may hold the marker; cached on the message."""
    return mentioned(part.text for part in parts_of(message))


def note_marks(message: Message) -> None:
    """Search a message for marks of privacy; cached on it."""
    if message["role"] == "user":
        cached(_marker, message)
    cached(_mentions, message)


def _marker_by(message: Message, writers_of: Attribute) -> Marker | None:
    """Return the newest marker in a user's message; only an owner's may end privacy."""
    marker = cached(_marker, message) if message["role"] == "user" else None
    if marker is None or marker.privacy is not Privacy.ONCE_PRIVATE:
        return marker
    writers = {piece.writer for piece in writers_of(message)}
    if Writer.OWNER not in writers:
        return marked(text for text in read(message).sayings if not ends(text))
    return marker


def _marker(message: Message) -> Marker | None:
    """Return the newest marker in a user's message, by any writer; cached on it."""
    return marked(read(message).sayings) if may_mark(message["content"]) else None
