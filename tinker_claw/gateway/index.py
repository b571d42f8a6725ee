"""Index of recent turns, which requests may continue, and of open sessions.

Rule: a turn is found by the conversation that leads to it, reply included. Requests of one session
that overlap, or that are sent again, therefore never mix up one another's turns. Old tool results
may change, as calls have names. A summary may replace the beginning, if the messages behind it end
the session's last turn. Turns that left the index are looked up in the ledger, which has the last
turns of a session. All sizes are bounded.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cachetools import LRUCache

from tinker_claw.conversation.history import (
    Conversation,
    closest,
    comparisons,
    digest,
    ends,
    same,
)
from tinker_claw.errors import RequestError
from tinker_claw.ledger.turns import LastTurn, TurnTable
from tinker_claw.served import Identity, Prompt, RequestKind
from tinker_claw.types import Attempt, Kind, Message, cached

IDLE_S: Final = 6 * 3600.0
"""A session without a request for so long is closed until it goes on: a working day's breaks do
not close it, a night does."""
TURN_KEYS = 40_000
"""Keys of turns that are remembered, one to three of each; one takes about 300 bytes."""
STREAM_TOKENS = 1_500_000
"""Ids kept of the newest turns, to go on from: fifty turns of 30,000 tokens, some 15 MB, as equal
ids share one int."""
SESSIONS = 100_000
"""Most open sessions; one takes about 600 bytes. Beyond that the longest idle are closed."""
TRACES = 4096
FORGOTTEN = 4096
"""Sessions forgotten last; only requests in flight meanwhile look them up."""
_SEARCHED = 8
"""Newest turns of a session that are searched for a reply whose turn was not found."""

_LEFT_OUT: Final[Message] = {"role": "assistant", "content": ""}
"""Stands for a reply that is in the summary only."""
_RESETS: Final = "OpenClaw"
"""The client whose sessions keep their name for good, whatever their user ends and begins."""
_OWN_SESSION = frozenset({RequestKind.SUBAGENT, RequestKind.ALONE})
"""Calls that share the trace of a turn of another session."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Ids that a later prompt can begin with, as they were sampled."""

    prompt: Prompt
    tokens: tuple[int, ...]
    """Those of the reply."""
    exact: str
    """Digest of the very messages and tools that the prompt was rendered from."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A request that continues an earlier turn."""

    turn_id: int
    reply: Message
    """The turn's reply as the client sent it back."""
    new: Sequence[Message]
    stream: Stream | None
    """Ids to extend; None: they cannot be extended."""


@dataclass(slots=True)
class _Session:
    seen: float
    """When its last request came in, seconds since 1970."""
    name: tuple[str, str] | None = None
    """User and key; None: it was open when the process started, and has not come back."""
    attempt: Attempt | None = None
    """Task and group that its requests named; None: none, or none since the process started."""


class ConversationIndex:
    """Recent turns and open sessions, the newest last."""

    def __init__(
        self, turns: TurnTable, idle_s: float, now: Callable[[], float] = time.time
    ) -> None:
        """`idle_s`: a session without a request for so long is closed."""
        self._turns = turns
        self._idle_s = idle_s
        self._now = now
        self._turns_by_key = LRUCache[bytes, tuple[int, int]](TURN_KEYS)
        self._streams = LRUCache[int, _StreamEntry](STREAM_TOKENS, getsizeof=_size)
        self._ids: dict[tuple[str, str], int] = {}
        self._traces = LRUCache[tuple[str, str], int](TRACES)
        self._unfiled = LRUCache[tuple[str, str], int](TRACES)
        self._forgotten = LRUCache[int, float](FORGOTTEN)
        self._open = OrderedDict((id, _Session(seen)) for id, seen in turns.open_sessions())
        self.sweep()

    def open_session(self, user: str, identity: Identity) -> int:
        """Return the ledger's id of a request's session, which is open from now on.

        A side call that is filed by its trace keeps no session open.

        Raises:
            RequestError: it names another group than the session had so far.
        """
        self.sweep()
        trace = (user, identity.trace) if identity.trace is not None else None
        if identity.by_trace and trace is not None and trace in self._traces:
            return self._traces[trace]
        name = (user, identity.key)
        session_id = self._ids.get(name)
        if session_id is None:
            session_id = self._turns.session(user, identity.key)
        self._touch(session_id, name)
        if identity.attempt is not None:
            self._enrol(session_id, user, identity.attempt)
        if trace is not None and identity.by_trace:
            self._unfiled[trace] = session_id  # until a turn of its run tells the session
        elif trace is not None and identity.request_kind not in _OWN_SESSION:
            self._traces[trace] = session_id
            unfiled_id = self._unfiled.pop(trace, None)
            if unfiled_id is not None:
                self._turns.file(session_id, trace[1], unfiled_id)
        return session_id

    def _enrol(self, session_id: int, user: str, attempt: Attempt) -> None:
        session = self._open[session_id]
        if attempt == session.attempt:
            return
        if not self._turns.enrol(session_id, user, attempt):
            raise RequestError(
                "This session is of another group: a session is one try at one task. Give each try "
                "a session of its own (X-Session-Id).",
                param="X-Group-Id",
            )
        session.attempt = attempt

    def anew(self, session_id: int, identity: Identity, conversation: Conversation) -> int:
        """Return the session of a request: another one where its user begins anew under the name of
        an old one, as OpenClaw's `/new` does.

        Such a request continues no reply and no summary, and repeats nothing that the user has said
        in the old one.
        """
        session = self._open.get(session_id)
        resets = identity.request_kind is RequestKind.USER and identity.client == _RESETS
        if not resets or session is None or session.name is None or session.attempt is not None:
            return session_id
        if conversation.reply_at is not None or conversation.summarised is not None:
            return session_id
        before, messages = self._turns.latest(session_id), conversation.messages
        user_digests = {
            each
            for at, message in enumerate(messages)
            if message["role"] == "user"
            for each in (cached(digest, message), *conversation.chain(at, at + 1))
        }
        if not before or any(user_digests.intersection(turn.history) for turn in before):
            return session_id
        name = session.name
        self._drop({session_id})
        new = self._turns.begin_anew(session_id)
        self._touch(new, name)
        if identity.trace is not None:
            self._traces[name[0], identity.trace] = new
        return new

    def end(self, session_id: int) -> None:
        """Close a session that its client has ended."""
        self._drop({session_id})
        self._turns.close([session_id])

    def forget(self, session_id: int) -> None:
        """Forget a session's turns, including those being answered just now."""
        self._drop({session_id})
        for traces in (self._traces, self._unfiled):
            for trace in [trace for trace, at in traces.items() if at == session_id]:
                del traces[trace]
        for turn, (_, stream) in list(self._streams.items()):
            if stream.prompt.lesson_block:
                del self._streams[turn]  # the lesson may have come from this session
        self._forgotten[session_id] = time.monotonic()

    def has_forgotten(self, session_id: int, started: float) -> bool:
        """Return whether the session was forgotten after a request came in (time.monotonic())."""
        return self._forgotten.get(session_id, started) > started

    def sweep(self) -> None:
        """Close the sessions that have been idle for too long."""
        limit, idle = self._now() - self._idle_s, list[int]()
        for session_id, session in self._open.items():
            if session.seen > limit and len(self._open) - len(idle) <= SESSIONS:
                break
            idle.append(session_id)
        if idle:
            self._turns.close(idle)
            self._drop(set(idle))

    def add(
        self,
        session_id: int,
        history: Sequence[str],
        reply: str,
        turn_id: int,
        stream: Stream | None,
    ) -> None:
        """Remember a turn by the digests of its messages and of its reply."""
        for key in _keys(session_id, (*history, reply)):
            self._turns_by_key[key] = (turn_id, session_id)
        if stream is not None:
            self._streams[turn_id] = session_id, stream

    def find(
        self, session_id: int, conversation: Conversation, *, behind_summary: bool = True
    ) -> Continuation | None:
        """Find the turn whose reply is the last one in a conversation.

        Args:
            behind_summary: if a summary replaces the beginning, what follows it is enough. It may
                hold what was said in private, and nothing tells.
        """
        at, cut = conversation.reply_at, conversation.summarised if behind_summary else None
        if at is None or (cut is not None and at < cut):
            return None if cut is None else self._behind_summary(session_id, conversation, cut)
        chain = conversation.chain(0, at + 1)
        for key in _keys(session_id, chain):
            if entry := self._turns_by_key.get(key):
                return self._after(entry[0], conversation, at)
        turns = self._turns.latest(session_id)
        waiting = [turn for turn in turns if not turn.settled]
        at_turn, turn_id = closest([turn.chain for turn in waiting], chain), None
        if at_turn is not None:
            turn_id = waiting[at_turn].turn_id
        elif cut is not None:
            turn_id = self._before_summary(session_id, turns, conversation.chain(cut, at + 1))
        return None if turn_id is None else self._after(turn_id, conversation, at)

    def _behind_summary(
        self, session_id: int, conversation: Conversation, cut: int
    ) -> Continuation | None:
        """Return the session's last turn, if a summary has left nothing of its reply: the messages
        behind the summary are newer."""
        last = next(iter(self._turns.latest(session_id, most=1)), None)
        new = conversation.messages[cut:]
        if last is None or last.settled or last.followed or last.history == conversation.digests:
            return None
        return Continuation(last.turn_id, _LEFT_OUT, new, None) if new else None

    def _after(self, turn_id: int, conversation: Conversation, at: int) -> Continuation:
        """Continue this turn with what a request adds to its reply. `at`: where that stands."""
        _, stream = self._streams.get(turn_id, (0, None))
        messages = conversation.messages
        return Continuation(turn_id, messages[at], messages[at + 1 :], stream)

    def is_lost(self, session_id: int, conversation: Conversation) -> bool:
        """Return whether a request answers a reply whose turn is not found, although a turn waits
        for its next state."""
        at = conversation.reply_at
        turns = self._turns.latest(session_id, most=_SEARCHED) if at is not None else []
        if at is None or all(turn.settled or turn.followed for turn in turns):
            return False
        if turns[0].history == conversation.digests:
            return False  # it was counted when it was first sent
        reply = conversation.chain(at, at + 1)
        return not any(same([turn.reply_digest], reply) for turn in self._side(session_id))

    def _before_summary(
        self, session_id: int, turns: Sequence[LastTurn], left: Sequence[str]
    ) -> int | None:
        """Return the session's last turn if its end is what compaction has left."""
        last = next((turn for turn in turns if left and ends(turn.chain, left)), None)
        if last is None or last.settled:
            return None
        for side in self._side(session_id):
            if side.turn_id > last.turn_id and same([side.reply_digest], left[-1:]):
                return None  # it answers what was said since, in the same words, for a side call
        return last.turn_id

    def _side(self, session_id: int) -> list[LastTurn]:
        return self._turns.latest(session_id, Kind.SIDE)

    def _touch(self, session_id: int, name: tuple[str, str]) -> None:
        session = self._open.pop(session_id, None) or _Session(0.0)
        session.seen = self._now()
        session.name = name
        self._ids[name] = session_id
        self._open[session_id] = session

    def _drop(self, sessions: set[int]) -> None:
        """Drop sessions from memory, with the keys and streams of their turns."""
        for session_id in sessions:
            session = self._open.pop(session_id, None)
            if session is not None and session.name is not None:
                self._ids.pop(session.name, None)
        for key in [key for key, (_, at) in self._turns_by_key.items() if at in sessions]:
            del self._turns_by_key[key]
        for turn_id in [turn for turn, (at, _) in self._streams.items() if at in sessions]:
            del self._streams[turn_id]


_StreamEntry = tuple[int, Stream]
"""A stream with its session."""


def _size(kept: _StreamEntry) -> int:
    """Size of a stream in tokens, at most that of the cache, so that any stream fits."""
    _, stream = kept
    return min(len(stream.prompt.tokens) + len(stream.tokens), STREAM_TOKENS)


def _keys(session_id: int, chain: Sequence[str]) -> Iterator[bytes]:
    """Keys of a conversation, the strictest first, which nearly always matches; where no tool was
    called they are the same."""
    for reading in comparisons(chain):
        yield hashlib.sha256(f"{session_id} {' '.join(reading)}".encode()).digest()[:16]
