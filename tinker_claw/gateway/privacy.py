"""Decide once a turn what of its request may be kept.

Rule: decided before anything is written. Nothing that was said in private is kept, and a prompt
that holds a secret is not kept as tokens either: tokens are text in another form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from cachetools import LRUCache

from tinker_claw.conversation.attribution import Attribute, read
from tinker_claw.conversation.classify import flagged, gather, opening_key
from tinker_claw.formats.base import GenerationRequest, parts_of
from tinker_claw.gateway.secrets import SecretSearch
from tinker_claw.ledger.turns import TurnTable, hidden
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
from tinker_claw.types import Kind, Message, Writer, cached
from tinker_claw.why import Why

TRACES = 4096
_OF_ANOTHER = frozenset({RequestKind.FLUSH, RequestKind.SUBAGENT, RequestKind.UTILITY})
"""Calls with keys of their own, and with words from the session that they were made for."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a request may be kept."""

    privacy: Privacy
    secret: str | None = None
    """Description of a secret in its words, results or tools; None: there is none."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Secrets that stood in the prompt before anybody spoke; never stored."""
    key: str | None = None
    """Name of its session, where that is a digest of messages which hold a secret."""

    @property
    def is_open(self) -> bool:
        """Nothing in it was said in private."""
        return self.privacy is Privacy.OPEN

    @property
    def tokens(self) -> bool:
        """Whether the prompt's tokens may be kept."""
        return self.is_open and self.secret is None

    @property
    def untrained_because(self) -> str | None:
        """Reason why its turn cannot be trained on; None: it can."""
        if self.privacy is Privacy.AFTER:
            return Why.AFTER_PRIVATE.says()
        return None if self.secret is None else Why.HOLDS.says(self.secret)


@dataclass(frozen=True, slots=True)
class _Signs:
    """Signs in a request that something in it is private."""

    header: bool
    """It has the header X-Private."""
    line: Privacy | None
    """What the newest line `/private` or `/private off` says; None: there is none."""
    session: Privacy
    """The privacy of its session, or of its trace, so far."""
    transcript: Callable[[], bool]
    """Return whether it is a side call that shows the line somewhere."""
    any_session: Callable[[], bool]
    """Return whether it is a side call that may be about any session of its user, who has had a
    private one with a name: the line may long be summarised."""


_OPEN, _PRIVATE, _AFTER = Privacy
_CASES: Final[Sequence[tuple[Callable[[_Signs], bool], Privacy, Privacy]]] = (
    # the sign; the privacy of its session from then on; that of a side call
    (lambda signs: signs.header, _PRIVATE, _PRIVATE),
    (lambda signs: signs.line is _PRIVATE, _PRIVATE, _PRIVATE),
    (lambda signs: signs.line is _AFTER, _AFTER, _PRIVATE),
    (lambda signs: signs.session is _PRIVATE, _PRIVATE, _PRIVATE),
    (lambda signs: signs.session is _AFTER, _AFTER, _PRIVATE),
    (lambda signs: signs.transcript(), _OPEN, _PRIVATE),
    (lambda signs: signs.any_session(), _OPEN, _PRIVATE),
    (lambda signs: True, _OPEN, _OPEN),
)
"""Cases of privacy; the first whose sign is there decides. The input of a side call is a
transcript, or belongs to a turn, so it is private where the session has been."""


class SessionPrivacy:
    """Record of private sessions, by which it is decided what is kept."""

    def __init__(self, turns: TurnTable, secrets: SecretSearch) -> None:
        self._turns = turns
        self._secrets = secrets
        self._sessions = turns.private_sessions()
        self._traces = LRUCache[tuple[str, str], Privacy](TRACES)
        self.near_misses = 0
        """Requests since the start that made a session private by a near miss of the marker."""

    async def decide(
        self,
        user: str,
        identity: Identity,
        headers: Mapping[str, str],
        request: GenerationRequest,
        named: Attribute,
    ) -> Kept:
        """Decide what of a request may be kept; its session has that privacy from now on.

        Args:
            named: gives every piece of a message its writer: only an owner ends what is private.
        """
        is_side, messages = identity.kind is Kind.SIDE, request.messages
        header, earlier = flagged(headers, "x-private"), self._stored(user, identity)
        users = (m for m in reversed(messages) if m["role"] == "user")
        marker = next(filter(None, (_marker_by(m, named) for m in users)), None)
        signs = _Signs(
            header,
            marker and marker.privacy,
            earlier,
            lambda: is_side and any(cached(_mentions, message) for message in messages),
            lambda: (
                is_side
                # Its key is not that of the session that it is about.
                and (not identity.named or identity.by_trace or identity.call in _OF_ANOTHER)
                and any(user == of for of, _ in self._sessions)
            ),
        )
        session, side_call = next(case[1:] for case in _CASES if case[0](signs))
        if marker and not (marker.exact or header) and earlier is not Privacy.PRIVATE:
            self.near_misses += 1
            log.warning("private.near_miss", user=user, meaning=NEAR_MISS)
        # What a side call shows of a session does not say whether that is still private. A turn of
        # a named conversation does, also where its client calls it side or asks for a version.
        own = identity.named and identity.call.kind is Kind.MAIN
        if session is not Privacy.OPEN and (own or not is_side):
            self._record(user, identity, session)
        privacy = side_call if is_side else session
        if privacy is Privacy.PRIVATE:
            return Kept(privacy)
        secrets, key = await self._secrets.search(request, named), None
        if secrets is None:
            return Kept(privacy)
        if not identity.named and identity.key != SIDE_KEY:
            messages = await self._secrets.redact_messages(request.messages)
            key = opening_key(gather(replace(request, messages=messages), headers))
        return Kept(privacy, *secrets, key)

    def _stored(self, user: str, identity: Identity) -> Privacy:
        by_key = self._sessions.get((user, hidden(user, identity.key)), Privacy.OPEN)
        if by_key is Privacy.OPEN and identity.trace is not None:
            return self._traces.get((user, identity.trace), Privacy.OPEN)
        return by_key

    def _record(self, user: str, identity: Identity, privacy: Privacy) -> None:
        if identity.trace is not None:
            self._traces[user, identity.trace] = privacy
        name = (user, hidden(user, identity.key))
        if identity.named and self._sessions.get(name) is not privacy:
            # Stored, so that it outlives restarts and compactions; nothing else is stored.
            self._turns.mark_private(user, identity.key, privacy)
            self._sessions[name] = privacy


def _mentions(message: Message) -> bool:
    """Return whether a transcript in a side call may hold the marker; cached on the message."""
    return mentioned(parts_of(message["content"]))


def note_marks(message: Message) -> None:
    """Search a message for marks of privacy; cached on it."""
    if message["role"] == "user":
        cached(_marker, message)
    cached(_mentions, message)


def _marker_by(message: Message, named: Attribute) -> Marker | None:
    """Return the newest marker in a user's message; only an owner's may end privacy."""
    marker = cached(_marker, message)
    if marker is None or marker.privacy is not Privacy.AFTER:
        return marker
    writers = {piece.writer for piece in named(message)}
    if Writer.OWNER not in writers:
        return marked(text for text in read(message).sayings if not ends(text))
    return marker


def _marker(message: Message) -> Marker | None:
    """Return the newest marker in a user's message, by any writer; cached on it."""
    return marked(read(message).sayings) if may_mark(message["content"]) else None
