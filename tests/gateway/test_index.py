"""The gateway's memory of turns and sessions: lookups, evictions and sizes."""

from __future__ import annotations

import time

import pytest

from tests.conversation.test_classify import parsed, told
from tests.support.ledger import new_turn, sql, sql_connection
from tests.support.openclaw import assistant, openclaw, user
from tinker_claw.conversation.history import Conversation, reply_digest
from tinker_claw.gateway import index as index_module
from tinker_claw.gateway.index import (
    FORGOTTEN,
    STREAM_TOKENS,
    Continuation,
    ConversationIndex,
    Stream,
)
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.served import Identity, Prompt
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import Message, Reply

HOUR = 3600.0
FIRST = parsed(openclaw("hi")).messages
ANSWERED = parsed(openclaw("hi", assistant("yo"), user("thanks"))).messages


class Clock:
    """A clock that the test sets."""

    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def named(key: str) -> Identity:
    return told({"messages": [{"role": "user", "content": "hi"}]}, x_session_id=key)


def closed(ledger: Ledger) -> list[str]:
    rows = sql(ledger).rows("SELECT key FROM sessions WHERE closed_at IS NOT NULL ORDER BY id")
    return [row["key"] for row in rows]


def put(
    index: ConversationIndex, session: int, messages: tuple[Message, ...], turn: int, size: int = 0
) -> None:
    stream = Stream(Prompt((0,) * size, None), (), "") if size else None
    index.add(session, Conversation.of(messages).digests, reply_digest(Reply("yo")), turn, stream)


def find(index: ConversationIndex, session: int) -> Continuation:
    link = index.find(session, Conversation.of(ANSWERED))
    assert link is not None
    return link


def test_sessions_are_closed_in_the_order_in_which_they_fell_silent(ledger: Ledger) -> None:
    clock = Clock(1e9)
    index = ConversationIndex(ledger.turns, HOUR, clock)
    for key in ("a", "b"):
        index.open_session("me", named(key))
    clock.at += HOUR - 1
    index.open_session("me", named("a"))
    assert closed(ledger) == []
    clock.at += 2
    index.open_session("me", named("c"))
    assert closed(ledger) == ["b"]
    clock.at += HOUR
    index.sweep()
    assert closed(ledger) == ["a", "b", "c"]


def test_a_session_keeps_its_number_and_is_not_written_again_while_it_is_open(
    ledger: Ledger,
) -> None:
    clock = Clock(1e9)
    index = ConversationIndex(ledger.turns, HOUR, clock)
    number = index.open_session("me", named("a"))
    written = sql_connection(ledger).total_changes
    assert index.open_session("me", named("a")) == number
    assert sql_connection(ledger).total_changes == written
    assert index.open_session("you", named("a")) != number
    clock.at += HOUR + 1
    assert index.open_session("me", named("a")) == number
    assert closed(ledger) == ["a"], "only the other user's"


def test_a_closed_session_leaves_memory_and_is_found_in_the_ledger(ledger: Ledger) -> None:
    clock = Clock(1e9)
    index = ConversationIndex(ledger.turns, HOUR, clock)
    session = index.open_session("me", named("s"))
    turn = ledger.turns.add(
        new_turn(
            ledger, history=Conversation.of(FIRST).digests, reply_digest=reply_digest(Reply("yo"))
        )
    )
    put(index, session, FIRST, turn, size=100)
    assert find(index, session).stream is not None
    clock.at += 9 * HOUR
    assert index.open_session("me", named("s")) == session
    link = find(index, session)
    assert (link.turn_id, link.stream) == (turn, None)
    ledger.turns.refuse(turn, TurnRefusal("settled"))
    assert index.find(session, Conversation.of(ANSWERED)) is None


def test_a_turn_behind_those_that_were_hung_up_on_is_found(ledger: Ledger) -> None:
    index = ConversationIndex(ledger.turns, HOUR)
    said = {"history": Conversation.of(FIRST).digests, "reply_digest": reply_digest(Reply("yo"))}
    turn = ledger.turns.add(new_turn(ledger, **said))
    for _ in range(3):
        ledger.turns.add(new_turn(ledger, untrained_because=Reason.HUNG_UP))
    assert find(index, index.open_session("me", named("s"))).turn_id == turn


def test_streams_are_bounded_by_their_tokens_and_turns_are_found_without_them(
    ledger: Ledger,
) -> None:
    index = ConversationIndex(ledger.turns, HOUR)
    sessions = [index.open_session("me", named(str(n))) for n in range(4)]
    for turn, session in enumerate(sessions):
        put(index, session, FIRST, turn, size=STREAM_TOKENS // 2)
    links = [find(index, session) for session in sessions]
    assert [link.turn_id for link in links] == [0, 1, 2, 3]
    assert [link.stream is not None for link in links] == [False, False, True, True]
    put(index, sessions[0], FIRST, 9, size=3 * STREAM_TOKENS)
    streams = [find(index, session).stream is not None for session in sessions]
    assert streams == [True, False, False, False], "one that is too large is there alone"


def test_a_forgotten_session_leaves_no_ids_although_its_turns_are_no_longer_found_by_name(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "TURN_KEYS", 1)
    book = ConversationIndex(ledger.turns, HOUR)
    first, second = (book.open_session("me", named(key)) for key in ("a", "b"))
    turns = list[int]()
    for session in (first, second):
        chain = Conversation.of(FIRST).digests, reply_digest(Reply("yo"))
        turn = new_turn(ledger, session_id=session, history=chain[0], reply_digest=chain[1])
        turns.append(ledger.turns.add(turn))
        put(book, session, FIRST, turns[-1], size=10)
    book.forget(first)
    link = find(book, first)
    assert (link.turn_id, link.stream) == (turns[0], None)
    assert find(book, second).stream is not None


def test_what_was_forgotten_is_remembered_for_those_who_are_being_answered(ledger: Ledger) -> None:
    book = ConversationIndex(ledger.turns, 3600)
    started = time.monotonic()
    for session in range(FORGOTTEN + 10):
        book.forget(session)
    assert book.has_forgotten(FORGOTTEN + 9, started)
    assert not book.has_forgotten(FORGOTTEN + 9, time.monotonic())
    assert not book.has_forgotten(0, started), "so many at once are not remembered"
