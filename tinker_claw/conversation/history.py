"""Compare conversations: which earlier turn a request continues, and that turn's next state.

Rule: messages are compared by what they mean, not by their bytes: agents rewrite ids, re-serialise
arguments and trim replies, and send a user's messages in a row apart, as parts of one, or joined.
The system prompt is left out, because it changes with the date. What the agent adds and drops on
its own is no part of the conversation.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tinker_claw.conversation.attribution import (
    Attribute,
    is_nudge,
    is_result,
    read,
    without_volatile,
    words_of,
)
from tinker_claw.conversation.harnesses import HARNESSES
from tinker_claw.conversation.openclaw import is_silent, is_volatile
from tinker_claw.formats.fields import as_message
from tinker_claw.types import Message, NextState, Reply, Writer, cached

_SUMMARIES = tuple(
    block.opens for harness in HARNESSES for block in harness.blocks if block.replies
)
_TOOL = "tool "
"""Prefix of the digest of a tool's result."""
_CALLS = " for "
"""Separator between a digest and the names of the calls, on which the meaning does not depend."""
_NO_NAME = re.compile(r"[^A-Za-z0-9]")
_LONGEST_NAME = 40
"""Agents cut the ids of calls to this length, and drop all but these characters."""


def digest(message: Message) -> str:
    """Return a digest of what a message says, and of the calls that it makes or answers."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls", ())
    meaning = _hashed(message["role"], _meaning(message), calls)
    if message["role"] == "tool":
        return f"{_TOOL}{meaning}{_CALLS}{_name(message['tool_call_id'])}"
    if is_result(message):  # images, which an agent drops when they grow old
        return f"{_TOOL}{meaning}"
    if not calls:
        return meaning
    return f"{meaning}{_CALLS}{','.join(_name(call['id']) for call in calls)}"


def _digest_of_row(row: Sequence[Message]) -> str:
    """Return the digest of a user's messages in a row: that of one message with all their words."""
    typed = [message for message in row if read(message).automation is None] or row[-1:]
    if len(typed) == 1:
        return cached(digest, typed[0])
    return _hashed("user", "".join(map(_meaning, typed)), ())


def _hashed(role: str, text: str, calls: Sequence[Mapping[str, Any]]) -> str:
    called = [[c["function"]["name"], _canonical(c["function"]["arguments"])] for c in calls]
    return hashlib.sha256(json.dumps([role, text, called]).encode()).hexdigest()[:32]


def comparisons(chain: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the keys by which two chains of digests are compared, the strictest first.

    Exactly; by its calls, whatever has become of their results, which agents shorten, drop
    and rewrite when they grow old; by the results, whatever the calls are named, which agents
    rewrite, too. Chains with equal names belong to one branch; so, most likely, do those with equal
    results.
    """
    by_calls = tuple(name for name in chain if not name.startswith(_TOOL))
    by_results = tuple(name.partition(_CALLS)[0] for name in chain)
    return tuple(chain), by_calls, by_results


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages that user and assistant have exchanged, as later requests will show them."""

    messages: Sequence[Message]
    digests: tuple[str, ...]
    """Digest of each message; the user's messages in a row have one."""
    starts: tuple[int, ...]
    """Index of the message that each digest begins with."""
    summarised: int | None = None
    """How many of the messages stand before the newest summary; None: nothing was compacted."""

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Conversation:
        """Extract what user and assistant said from the messages of a request.

        A harness's messages are left out: notes and summaries with the replies that it gives to
        them, replies to a nudge, and volatile messages. So is an automatic prompt without an answer
        that a user gets to see. OpenClaw sends a heartbeat every half hour, and the user's next
        words are still about the last reply that they read.
        """
        kept: list[Message] = []
        prompted = None  # where an automatic prompt stands that nobody has answered yet
        summarised = None  # how many stand before the newest summary
        before: Message | None = None
        answered = False  # the harness writes the reply to the note before, too
        nudged = False  # the reply is to a nudge
        for message in without_volatile(messages):
            if message["role"] == "user" and not is_result(message):
                if is_volatile(message) or is_nudge(message, before):
                    continue
                reading = read(message)
                if reading.asks == "nudge" and not reading.words:
                    nudged = nudged or before is None or before["role"] != "user"
                    continue
                nudged = nudged and reading.note
                if reading.summary:
                    summarised = len(kept)
                if reading.note:
                    answered = reading.answered
                    continue
                if prompted is not None and (len(kept) <= prompted + 1 or is_silent(kept[-1])):
                    del kept[prompted:]
                prompted = len(kept) if reading.automation is not None else None
            before, ours, answered = message, answered, False
            if not (nudged or (ours and message["role"] == "assistant")):
                kept.append(message)
            if message["role"] == "assistant" and message["content"].startswith(_SUMMARIES):
                summarised = len(kept)
        typed = [m["role"] == "user" and not is_result(m) for m in kept]
        starts = [at for at in range(len(kept)) if not (at and typed[at] and typed[at - 1])]
        rows = pairwise((*starts, len(kept)))
        digests = [_digest_of_row(kept[begin:end]) for begin, end in rows]
        return cls(kept, tuple(digests), tuple(starts), summarised)

    def chain(self, begin: int, end: int) -> tuple[str, ...]:
        """Return the digests of the messages from `begin` to `end`."""
        first, last = (bisect_left(self.starts, at) for at in (begin, end))
        return self.digests[first:last]

    @property
    def reply_at(self) -> int | None:
        """Index of the reply that it continues; None: it continues none."""
        kept = self.messages
        at = next((i for i in reversed(range(len(kept))) if kept[i]["role"] == "assistant"), None)
        return None if at is None or at + 1 == len(kept) else at


def reply_digest(reply: Reply) -> str:
    """Return the digest of the message that a client makes of a reply."""
    return digest(as_message(reply))


def same(first: Sequence[str], second: Sequence[str]) -> bool:
    """Return whether two chains of digests are equal in any reading."""
    return any(a == b for a, b in zip(comparisons(first), comparisons(second), strict=True))


def closest(chains: Sequence[Sequence[str]], seen: Sequence[str]) -> int | None:
    """Return the index of the first chain that is equal in the strictest reading."""
    chain_readings = list(zip(*map(comparisons, chains), strict=True))
    pairs = zip(chain_readings, comparisons(seen), strict=False)
    return next((ways.index(reading) for ways, reading in pairs if reading in ways), None)


def ends(chain: Sequence[str], tail: Sequence[str]) -> bool:
    """Return whether a chain of digests ends with `tail` in any reading."""
    pairs = zip(comparisons(chain), comparisons(tail), strict=True)
    return any(whole[-len(end) :] == end for whole, end in pairs)


@dataclass(frozen=True, slots=True)
class Followup:
    """Result of reading the messages after a turn."""

    state: NextState | None = None
    """The turn's next state; None: the messages hold none."""
    unknown: bool = False
    """An unknown writer said something: no later message may be taken for the next state."""


def find_next_state(
    new_messages: Sequence[Message],
    writers_of: Attribute,
    replied: Message,
    *,
    others: bool = False,
) -> Followup:
    """Find a turn's next state in the messages after it.

    The owner's own words count before tool results: they have seen both. Results count when all of
    the turn's calls have one. What a harness writes does not count.

    Args:
        replied: the turn's reply as the client sent it back; names the tools.
        others: what other people, mails and hooks say is a next state, too.
    """
    written = [writers_of(m) for m in new_messages if m["role"] == "user"]
    owner_words = (words_of(pieces, Writer.OWNER) for pieces in written)
    pieces = [piece for message in written for piece in message]
    if any(piece.writer is Writer.UNKNOWN for piece in pieces):
        return Followup(unknown=True)
    read_writers = {Writer.QUOTATION} | ({Writer.MEMBER} if others else set())
    beside = tuple((p.writer, p.words) for p in pieces if p.writer in read_writers and p.words)
    if text := "\n\n".join(filter(None, owner_words)):
        return Followup(NextState("user", text, beside))
    if text := words_of(pieces, Writer.MEMBER) if others else "":
        return Followup(NextState("other", text, beside))
    results = {m["tool_call_id"]: m["content"] for m in new_messages if m["role"] == "tool"}
    calls: Sequence[Mapping[str, Any]] = replied.get("tool_calls", ())
    if not calls or not all(call["id"] in results for call in calls):
        return Followup()
    answers = [(call["function"]["name"], results[call["id"]]) for call in calls]
    if images := words_of(pieces, Writer.TOOL):  # OpenClaw shows those of all results after them
        answers[-1] = (answers[-1][0], f"{answers[-1][1]}\n{images}")
    return Followup(NextState.of_tools(answers))


def _name(call_id: str) -> str:
    """Return a digest of a call's id, which a client may fill with anything."""
    name = _NO_NAME.sub("", call_id)[:_LONGEST_NAME]
    return hashlib.blake2b(name.encode(), digest_size=6).hexdigest()


def _meaning(message: Message) -> str:
    """Return the text by which a message is compared."""
    role, text = message["role"], message["content"]
    if role == "user":
        reading = read(message)
        if reading.automation is not None:
            return "[prompt]"  # which a short form replaces later
        # Timestamps, context, reminders and the frame of a retry come and go, and so do the breaks
        # between messages that are joined.
        return "".join((reading.words or text).split())
    if role == "assistant":
        return text.strip()
    return "" if role == "system" else text


def _canonical(arguments: str) -> str:
    """Return arguments regardless of spacing, order of keys and spelling of numbers."""
    try:
        # JavaScript knows floats only: 1.0 comes back as 1, and long integers come back rounded.
        return json.dumps(json.loads(arguments, parse_int=float), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
