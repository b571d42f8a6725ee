"""Decide which parts of a request must not be kept.

Rule: decided before anything is written. Nothing that was said in private is kept, and a prompt
that holds a secret is not kept as tokens either: tokens are text in another form.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from threading import Lock
from typing import Any

from cachetools import LRUCache

from tinker_claw.conversation.attribution import Attribute, read, request_indexes
from tinker_claw.conversation.classify import flagged
from tinker_claw.formats.base import GenerationRequest, parts_of
from tinker_claw.gateway.limits import ComputeRounds
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
from tinker_claw.privacy.redact import Redactor, name_digest
from tinker_claw.served import Identity, RequestKind
from tinker_claw.telemetry import log
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import Kind, Message, Tool, Writer, cached, is_cached

TRACES = 4096
TEXTS = 28_000
"""Texts whose findings are cached, in 16 MB: every request repeats its history."""
_BARE = 6
"""Fewest characters of a secret that is sought without the form in which it stood."""
OF_THE_SYSTEM = "a secret of the system prompt"
_LONG = 20_000
"""Characters that are searched in a thread: on the event loop they would take 10 ms."""
_EACH = 100
"""Characters of a long text that take as long as the search of a short one."""
_OF_ANOTHER = frozenset({RequestKind.FLUSH, RequestKind.SUBAGENT, RequestKind.UTILITY})
"""Calls with keys of their own, and with words from the session that they were made for."""
_Key = tuple[int, int]
AFTERWARDS = TurnRefusal(Reason.AFTER_PRIVATE)


class SessionPrivacy:
    """Record of private sessions, and cache of the secrets found in texts."""

    def __init__(self, turns: TurnTable, redactor: Redactor, compute: ComputeRounds) -> None:
        self._turns = turns
        self._redactor = redactor
        self._sessions = turns.private_sessions()
        self._traces = LRUCache[tuple[str, str], Privacy](TRACES)
        self._held = LRUCache[_Key, str](TEXTS)
        self._lock = Lock()  # large requests are searched in a thread
        self.near_misses = 0
        """Requests since the start that made a session private by a near miss of the marker."""
        self.compute = compute

    def privacy(
        self,
        user: str,
        identity: Identity,
        headers: Mapping[str, str],
        request: GenerationRequest,
        named: Attribute,
    ) -> Privacy:
        """Return the privacy of a request, which its session has from now on.

        The input of a side call is a transcript, in whatever form, or belongs to a turn.

        Args:
            named: gives every piece of a message its writer: only an owner ends what is private.
        """
        messages = request.messages
        users = (m for m in reversed(messages) if m["role"] == "user")
        markers = (_marker_by(m, named) for m in users)
        earlier = self._stored(user, identity)
        privacy = earlier
        if flagged(headers, "x-private"):
            privacy = Privacy.PRIVATE
        elif (marker := next(filter(None, markers), None)) is not None:
            privacy = marker.privacy
            if privacy is Privacy.PRIVATE and not marker.exact and earlier is not privacy:
                self.near_misses += 1
                log.warning("private.near_miss", user=user, meaning=NEAR_MISS)
        # What a side call shows of a session does not say whether that is still private. A turn of
        # a named conversation does, also where its client calls it side or asks for a version.
        own = identity.named and identity.call.kind is Kind.MAIN
        if privacy and (own or identity.kind is Kind.MAIN):
            self._remember(user, identity, privacy)
        if identity.kind is Kind.SIDE and (
            privacy
            or any(cached(_mentions, message) for message in messages)
            # Its input may be of any session of its user, and the marker long summarised, unless
            # its key is that of the session that it is about.
            or (
                (not identity.named or identity.by_trace or identity.call in _OF_ANOTHER)
                and any(user == of for of, _ in self._sessions)
            )
        ):
            return Privacy.PRIVATE
        return privacy

    async def look_at(self, request: GenerationRequest) -> None:
        """Search much new text in a thread, then wait for a round of the event loop.

        From then on it is known what the request holds.
        """
        held = self._held_by
        new = (message for message in request.messages if not is_cached(held, message))
        size = sum(_EACH + len(text) for message in new for text in _texts(message))
        tools = bool(request.tools) and not is_cached(self._held_by_tools, request.tools)
        if tools or size >= _LONG:
            await self.compute.aside(lambda: self.holds(request))
        await self.compute.own_round()

    async def redact_any(self, text: str) -> str:
        """Redact a text so that it may be kept; a long one is searched in a thread."""
        if len(text) < _LONG:
            return self.redact(text)
        return await self.compute.aside(lambda: self._redactor.redact(text))

    def holds(self, request: GenerationRequest) -> str | None:
        """Describe a secret or personal data in a request; None: there is none."""
        stops = map(self.holds_text, request.stop)
        messages = (cached(self._held_by, message) for message in request.messages)
        description = next(filter(None, chain(stops, messages)), None)
        if description or not request.tools:
            return description
        return cached(self._held_by_tools, request.tools)

    def search(
        self, request: GenerationRequest, named: Attribute
    ) -> tuple[str | None, tuple[str, ...]]:
        """Describe a secret in a request's words or results; return its other secrets, too: those
        in the system prompt, and in files that a harness puts before the conversation.

        The former ends what its session teaches. The latter are in every prompt of an agent whose
        workspace has a key in it.
        """
        if self.holds(request) is None:
            return None, ()
        before, others = _before_the_conversation(request.messages, named)
        each = (self._redactor.values(text) for text in before if self.holds_text(text))
        secrets = tuple(
            dict.fromkeys(value for values in each for value in values if len(value) >= _BARE)
        )

        def stops(text: str) -> str | None:
            has_secret = any(secret in text for secret in secrets)
            return self.holds_text(text) or (OF_THE_SYSTEM if has_secret else None)

        holds = next(filter(None, map(stops, chain(request.stop, others))), None)
        if holds is None and request.tools:
            holds = cached(self._held_by_tools, request.tools)
        return holds, secrets

    def _held_by(self, message: Message) -> str | None:
        return next(filter(None, map(self.holds_text, _texts(message))), None)

    def _held_by_tools(self, tools: Sequence[Tool]) -> str | None:
        # This takes a tenth of what JSON takes.
        packed = marshal.dumps([dict(tool) for tool in tools], 2)
        return self._holds((hash(packed), len(packed)), _strings(tools))

    def holds_text(self, text: str) -> str | None:
        """Describe a secret or personal data in a text; None: there is none."""
        return self._holds(_key(text), [text])

    def redact(self, text: str) -> str:
        """Redact a text so that it may be kept."""
        return text if self.holds_text(text) is None else self._redactor.redact(text)

    def name(self, name: str) -> str:
        """Return a client's name for something as it may be kept, the same for the same name."""
        return name if self.holds_text(name) is None else name_digest(name)

    def identity(self, identity: Identity, headers: Mapping[str, str]) -> Identity:
        """Return an identity that may be kept: without secrets in what the client names."""
        name, attempt, where = self.name, identity.attempt, identity.surface
        if attempt is not None:
            task, group = (value and name(value) for value in (attempt.task, attempt.group))
            attempt = replace(attempt, task=task, group=group)
        channel = where.channel and name(where.channel)
        # The program's name is a piece of the header, which may be cut within a secret.
        client = identity.client if self.holds_text(headers.get("user-agent", "")) is None else ""
        return replace(
            identity,
            key=name(identity.key),
            reason=self.redact(identity.reason),
            attempt=attempt,
            surface=replace(where, because=self.redact(where.because), channel=channel),
            client=client,
        )

    async def redacted(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with redacted messages, to name a session by."""
        messages = request.messages
        kept = [{**m, "content": await self.redact_any(m["content"])} for m in messages]
        return replace(request, messages=tuple(kept))

    def _holds(self, key: _Key, texts: Iterable[str]) -> str | None:
        with self._lock:
            description = self._held.get(key)
        if description is None:
            description = next(filter(None, map(self._redactor.holds, texts)), "")
            with self._lock:
                self._held[key] = description
        return description or None

    def _stored(self, user: str, identity: Identity) -> Privacy:
        by_key = self._sessions.get((user, hidden(user, identity.key)), Privacy.OPEN)
        if by_key is Privacy.OPEN and identity.trace is not None:
            return self._traces.get((user, identity.trace), Privacy.OPEN)
        return by_key

    def _remember(self, user: str, identity: Identity, privacy: Privacy) -> None:
        if identity.trace is not None:
            self._traces[user, identity.trace] = privacy
        name = (user, hidden(user, identity.key))
        if identity.named and self._sessions.get(name) is not privacy:
            # Stored, so that it outlives restarts and compactions; nothing else is stored.
            self._turns.mark_private(user, identity.key, privacy)
            self._sessions[name] = privacy


def without(text: str, secrets: Iterable[str]) -> str:
    """Return a text in which known secrets are cut out."""
    for secret in secrets:
        text = text.replace(secret, "[redacted: a secret of the system prompt]")
    return text


def _key(text: str) -> _Key:
    """Cache key of a text: eighty system prompts as keys would fill the cache by themselves.

    Python's hash has a new key in every process, and is computed once per string object.
    """
    return hash(text), len(text)


def _before_the_conversation(
    messages: Sequence[Message], named: Attribute
) -> tuple[list[str], list[str]]:
    """Return the texts that stand before the conversation, and all others."""
    before, others, opening = list[str](), list[str](), True
    first = next(iter(request_indexes(messages)), 0)
    for at, message in enumerate(messages):
        opening = opening and message["role"] in ("system", "user") and at <= first
        if not opening:
            others += _texts(message)
        elif message["role"] == "system":
            before.append(message["content"])
        else:
            rest = message["content"]
            for piece in named(message):
                if piece.writer is Writer.HARNESS:
                    before.append(piece.text)
                    rest = rest.replace(piece.text, "\n", 1)
            others.append(rest)
    return before, others


def _texts(message: Message) -> Iterator[str]:
    yield message["content"]
    if thought := message.get("reasoning_content"):
        yield thought
    for call in message.get("tool_calls", ()):
        yield call["function"]["arguments"]


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


def _strings(value: Any) -> Iterator[str]:
    """Yield every text in a value, names included; with a stack, because tools may be deep."""
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
