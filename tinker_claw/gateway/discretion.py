"""What of a request must not be kept.

Rule: decided before anything is written. Of what was said in private nothing is kept, and a prompt
that holds a secret is not kept as tokens either: tokens are text in another form.
"""

from __future__ import annotations

import marshal
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from tinker_claw.ledger.turns import TurnTable
from tinker_claw.privacy import Privacy, Redactor, marked, mentioned
from tinker_claw.sessions import Identity, flagged, words
from tinker_claw.sessions.memo import Memo
from tinker_claw.types import Kind, Message
from tinker_claw.wire import ChatRequest

TRACES = 4096
_CAPACITY = 16_000_000
"""Bytes that it may take to remember what texts hold; histories come again and again."""
AFTERWARDS = "its prompt holds what was said in private"


class Discretion:
    """Knows which sessions are private, and what texts hold."""

    def __init__(self, turns: TurnTable, redactor: Redactor) -> None:
        self._turns = turns
        self._redactor = redactor
        self._sessions = turns.private_sessions()
        self._traces: OrderedDict[tuple[str, str], Privacy] = OrderedDict()
        self._held: Memo[str] = Memo(_CAPACITY)

    def privacy(
        self, user: str, identity: Identity, headers: Mapping[str, str], request: ChatRequest
    ) -> Privacy:
        """Whether a request is private, which its session then is from now on.

        What a side call is given is a transcript, in whatever form, or belongs to a turn.
        """
        messages = request.messages
        known = self._known(user, identity)
        found = known
        if flagged(headers, "x-private"):
            found = Privacy.PRIVATE
        elif (told := marked(_said(messages))) is not None:
            found = told
        if identity.kind is Kind.SIDE and (found or mentioned(m["content"] for m in messages)):
            # It does not say whether the session itself is still private.
            return Privacy.PRIVATE
        if found is not Privacy.OPEN:
            self._remember(user, identity, found, known)
        return found

    def holds(self, request: ChatRequest) -> str | None:
        """What in a request must not be kept, for a sentence; None: nothing."""
        for message in request.messages:
            for text in _texts(message):
                if held := self._holds(text, text):
                    return held
        if held := next(filter(None, map(self._redactor.holds, request.stop)), None):
            return held
        if not request.tools:
            return None
        # As a key this takes a tenth of what JSON takes.
        tools = [dict(tool) for tool in request.tools]
        return self._holds(marshal.dumps(tools, 2), tools)

    def holds_text(self, text: str) -> str | None:
        """The same of a text that comes once."""
        return self._redactor.holds(text)

    def redact(self, text: str) -> str:
        """A text as it may be kept."""
        return self._redactor.redact(text) if self._holds(text, text) else text

    def redacted(self, request: ChatRequest) -> ChatRequest:
        """The request as far as a session is named by it."""
        kept = [{**m, "content": self.redact(m["content"])} for m in request.messages]
        return replace(request, messages=tuple(kept))

    def _holds(self, key: str | bytes, value: Any) -> str | None:
        # By its digest: the texts themselves would fill the room with eighty system prompts.
        digest = blake2b(key.encode() if isinstance(key, str) else key, digest_size=16).digest()
        known = self._held.get(digest)
        if known is None:
            texts = _strings(value)
            known = next((held for text in texts if (held := self._redactor.holds(text))), "")
            self._held.put(digest, known, len(digest))
        return known or None

    def _known(self, user: str, identity: Identity) -> Privacy:
        by_key = self._sessions.get((user, identity.key), Privacy.OPEN)
        if by_key is Privacy.OPEN and identity.trace is not None:
            return self._traces.get((user, identity.trace), Privacy.OPEN)
        return by_key

    def _remember(self, user: str, identity: Identity, found: Privacy, known: Privacy) -> None:
        if identity.trace is not None:
            self._traces[user, identity.trace] = found
            self._traces.move_to_end((user, identity.trace))
            if len(self._traces) > TRACES:
                self._traces.popitem(last=False)
        if identity.named and self._sessions.get((user, identity.key)) is not found:
            # Kept: a restart or a compaction must not make it forget, and it says nothing else.
            self._turns.mark_private(user, identity.key, found)
            self._sessions[user, identity.key] = found


def _texts(message: Message) -> Iterator[str]:
    yield message["content"]
    if thought := message.get("reasoning_content"):
        yield thought
    for call in message.get("tool_calls", ()):
        yield call["function"]["arguments"]


def _said(messages: Sequence[Message]) -> Iterator[str]:
    return (words(m["content"]) for m in messages if m["role"] == "user" and _may(m["content"]))


def _may(text: str) -> bool:
    return "/private" in text or "/private" in text.lower()


def _strings(value: Any) -> Iterator[str]:
    """Every text in a value, names included; a stack, because tools may be deep."""
    stack: list[Any] = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            stack.extend(one.keys())
            stack.extend(one.values())
        elif isinstance(one, list | tuple):
            stack.extend(one)
