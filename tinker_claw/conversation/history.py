"""Whether a request goes on from an earlier turn, and what it says about it.

Rule: messages are compared by what they mean, not by their bytes: agents rewrite ids, re-serialise
arguments and trim replies. The system prompt is left out, because it changes with the date. What
the agent adds and drops on its own is no part of the conversation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from cachetools import LRUCache

from tinker_claw.conversation.openclaw import (
    automation,
    is_nudge,
    is_silent,
    is_volatile,
    last_user_index,
    queued,
    without_volatile,
    words,
)
from tinker_claw.formats.base import Joined
from tinker_claw.types import Message, NextState, Reply, noted

_TOOL = "tool "
"""Before the digest of a tool's result."""
_CALLS = " for "
"""Before the names of the calls, which the meaning does not depend on."""
_NO_NAME = re.compile(r"[^A-Za-z0-9]")
_LONGEST_NAME = 40
"""Agents cut the ids of calls to so many characters, and leave out others than these."""


class _Meaning(NamedTuple):
    """What a message says."""

    digest: str
    automatic: bool
    """Nobody wrote it."""


_MEANT = LRUCache[Hashable, _Meaning](16_000)
"""Histories are sent again with every request. By numbers, keyed anew in every process: the words
of a session that is forgotten, or was private, are not to stay here."""


def digest(message: Message) -> str:
    """A short name for what a message says, and for the calls that it makes or answers."""
    meaning = _meaning(message).digest
    if message["role"] == "tool":
        return f"{_TOOL}{meaning}{_CALLS}{_name(message['tool_call_id'])}"
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls", ())
    if not calls:
        return meaning
    return f"{meaning}{_CALLS}{','.join(_name(call['id']) for call in calls)}"


def readings(chain: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """A chain of digests in the ways in which two of them may be equal, the strictest first.

    To the letter; by its calls, whatever has become of their results, which agents shorten, drop
    and rewrite when they grow old; by the results, whatever the calls are named, which agents
    rewrite, too. Two of equal names are of one branch; so are two of equal results, as far as one
    can tell.
    """
    by_calls = tuple(name for name in chain if not name.startswith(_TOOL))
    by_results = tuple(name.partition(_CALLS)[0] for name in chain)
    return tuple(chain), by_calls, by_results


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages that user and assistant have exchanged, as later requests will show them."""

    messages: Sequence[Message]
    digests: tuple[str, ...]
    """Of each."""

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Conversation:
        """What the messages of a request come to; see `exchanged`."""
        kept = exchanged(messages)
        return cls(kept, tuple([noted(digest, message) for message in kept]))

    @property
    def reply_at(self) -> int | None:
        """Index of the reply that it goes on from; None: it goes on from none."""
        kept = self.messages
        at = next((i for i in reversed(range(len(kept))) if kept[i]["role"] == "assistant"), None)
        return None if at is None or at + 1 == len(kept) else at


def exchanged(messages: Sequence[Message]) -> list[Message]:
    """The messages of a conversation.

    Without volatile messages, and without automatic prompts to which the assistant said nothing
    that a user gets to see: OpenClaw looks after itself every half hour, and the user's next words
    are still about the last thing that they read.
    """
    kept: list[Message] = []
    prompted: int | None = None
    before: Message | None = None
    for message in without_volatile(messages):
        if message["role"] == "user":
            if is_volatile(message):
                continue
            if is_nudge(message, before):
                continue
            if prompted is not None and _unseen(kept[prompted:]):
                del kept[prompted:]
            prompted = len(kept) if noted(_is_automatic, message) else None
        kept.append(message)
        before = message
    return kept


def without_queued(messages: Sequence[Message], asked: Collection[str]) -> Sequence[Message]:
    """The messages as later requests will show them, where the user went on before an answer came.

    Args:
        asked: digests of user messages, among which may be the one without an answer.
    """
    at = last_user_index(messages)
    if at is None:
        return messages
    for before, now in queued(messages[at]["content"]):
        if digest({"role": "user", "content": before}) in asked:
            said = {**messages[at], "content": now}
            return [*messages[:at], said, *messages[at + 1 :]]
    return messages


def reply_digest(reply: Reply) -> str:
    """Digest of the message that a client makes of a reply."""
    calls = [
        {"id": c.id, "function": {"name": c.name, "arguments": c.arguments}}
        for c in reply.tool_calls
    ]
    return digest({"role": "assistant", "content": reply.text, "tool_calls": calls})


def same(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two chains of digests are equal in any reading."""
    return any(a == b for a, b in zip(readings(one), readings(other), strict=True))


def closest(chains: Sequence[Sequence[str]], seen: Sequence[str]) -> int | None:
    """Index of the chain that is equal in the strictest reading, the first of several."""
    known = [readings(chain) for chain in chains]
    for way, reading in enumerate(readings(seen)):
        for at, ways in enumerate(known):
            if ways[way] == reading:
                return at
    return None


def ends(known: Sequence[str], tail: Sequence[str]) -> bool:
    """Whether a chain of digests ends like this in any reading."""
    pairs = zip(readings(known), readings(tail), strict=True)
    return any(whole[-len(end) :] == end for whole, end in pairs)


def next_state(new_messages: Sequence[Message], replied: Message | None = None) -> NextState | None:
    """What the messages behind a turn say about it.

    The user's own words count before tool results: they have seen both. Results count when all
    of the turn's calls have one. A prompt that nobody wrote says nothing.

    Args:
        replied: the turn's reply as the client sent it back; names the tools.
    """
    users = [m for m in new_messages if m["role"] == "user" and not _is_automatic(m)]
    said = [words(m["content"]) for m in users]
    if text := "\n\n".join(part for part in said if part):
        return NextState("user", text)
    results = {m["tool_call_id"]: m["content"] for m in new_messages if m["role"] == "tool"}
    names = _tool_names(replied) if replied else dict.fromkeys(results, "tool")
    if not names or not names.keys() <= results.keys():
        return None
    return NextState.of_tools([(name, results[call_id]) for call_id, name in names.items()])


def _tool_names(message: Message) -> Mapping[str, str]:
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls", ())
    return {call["id"]: call["function"]["name"] for call in calls}


def _name(call_id: str) -> str:
    """Of a call; no part of its id, which a client may fill with anything."""
    return _named(call_id[: 2 * _LONGEST_NAME])


@lru_cache(maxsize=8192)
def _named(call_id: str) -> str:
    name = _NO_NAME.sub("", call_id)[:_LONGEST_NAME]
    return hashlib.blake2b(name.encode(), digest_size=6).hexdigest()


def _unseen(exchange: Sequence[Message]) -> bool:
    """An automatic prompt, and nothing that a user gets to see."""
    last = exchange[-1]
    return len(exchange) == 1 or (last["role"] == "assistant" and is_silent(last))


def _is_automatic(message: Message) -> bool:
    return _meaning(message).automatic


def _meaning(message: Message) -> _Meaning:
    role: str = message["role"]
    text: str = "" if role == "system" else message["content"]
    calls = tuple(
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    )
    starts = text.starts if isinstance(text, Joined) else ()
    key = (role, hash(text), len(text), starts, hash(calls))
    known = _MEANT.get(key)
    if known is None:
        known = _MEANT[key] = _read(role, text, calls)
    return known


def _read(role: str, text: str, calls: Sequence[tuple[str, str]]) -> _Meaning:
    automatic = automation(text) if role == "user" else None
    if automatic is not None and automatic.what in ("heartbeat", "cron"):
        text = f"[{automatic.what}]"  # it is rewritten once it is history
    elif role == "user":
        text = words(text)  # timestamps, and the frame of a retry, come and go
    elif role == "assistant":
        text = text.strip()
    meaning = json.dumps([role, text, [[name, _canonical(args)] for name, args in calls]])
    digest = hashlib.sha256(meaning.encode()).hexdigest()[:32]
    return _Meaning(digest, automatic is not None)


def _canonical(arguments: str) -> str:
    """Arguments regardless of spacing, order of keys and spelling of numbers."""
    try:
        # JavaScript knows floats only: 1.0 comes back as 1, and long integers come back rounded.
        return json.dumps(json.loads(arguments, parse_int=float), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
