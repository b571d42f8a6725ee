"""The turns that requests may go on from.

Rule: a turn is found by the conversation that leads to it, reply included. Requests of one session
that overlap, or that are sent again, therefore never mix up one another's turns. What has left the
book is looked up in the ledger, which knows the last turn of a session.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_claw.ledger.turns import TurnTable
from tinker_claw.sessions import digests, extension, without_volatile
from tinker_claw.types import Message

CAPACITY = 128
"""Turns kept. One of 30,000 tokens takes about a megabyte."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Ids that a later prompt can begin with, as they were sampled."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    hint_at: int | None
    exact: str
    """Digest of the very messages and tools that the prompt was rendered from."""


@dataclass(frozen=True, slots=True)
class Link:
    """A request that goes on from an earlier turn."""

    turn_id: int
    reply: Message
    """The turn's reply as the client sent it back."""
    new: list[Message]
    stream: Stream | None
    """None: the ids cannot be gone on from."""


class Book:
    """Recent turns, the newest last."""

    def __init__(self, turns: TurnTable) -> None:
        self._turns = turns
        self._pages: OrderedDict[str, tuple[int, Stream | None]] = OrderedDict()

    def add(
        self,
        session_id: int,
        history: Sequence[str],
        reply: str,
        turn_id: int,
        stream: Stream | None,
    ) -> None:
        """Remember a turn by the digests of its messages and of its reply."""
        page = _page(session_id, [*history, reply])
        self._pages[page] = (turn_id, stream)
        self._pages.move_to_end(page)
        while len(self._pages) > CAPACITY:
            self._pages.popitem(last=False)

    def find(self, session_id: int, messages: Sequence[Message]) -> Link | None:
        """The turn whose reply is the last one in `messages`."""
        kept = without_volatile(messages)
        at = max((i for i, m in enumerate(kept) if m["role"] == "assistant"), default=None)
        if at is None or at + 1 == len(kept):
            return None
        entry = self._pages.get(_page(session_id, digests(kept[: at + 1])))
        if entry is not None:
            return Link(entry[0], kept[at], list(kept[at + 1 :]), entry[1])
        last = self._turns.last(session_id)
        if last is None:
            return None
        new = extension(last.history, last.reply_digest, messages)
        # The ledger does not say which messages the prompt held beyond the history.
        return Link(last.turn_id, kept[at], new, None) if new is not None else None


def _page(session_id: int, chain: Sequence[str]) -> str:
    return hashlib.sha256(f"{session_id} {' '.join(chain)}".encode()).hexdigest()


def exact_digest(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], thinking: bool | None
) -> str:
    """Of everything that a prompt is rendered from, to the letter."""
    return hashlib.sha256(json.dumps([list(messages), list(tools), thinking]).encode()).hexdigest()
