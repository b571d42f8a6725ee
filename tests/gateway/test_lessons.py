"""Which lessons a session is told, over a real ledger."""

from __future__ import annotations

import pytest

from tests.support.ledger import new_turn, sql
from tinker_claw.errors import UndoError
from tinker_claw.gateway.lessons import LessonChooser
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.lessons import MOST, State, read_lessons
from tinker_claw.types import Vote, Wish

PLAIN = "Write plain sentences."


def turn(ledger: Ledger, session_id: int, value: Vote, wish: Wish | None = None) -> int:
    """Add the next turn of a session with its verdict; the user keeps the wish."""
    number = ledger.turns.add(new_turn(ledger, session_id=session_id))
    kept = ledger.judgements.add(number, value=value, ballots=(), hints=(), wish=wish)
    if kept is not None:
        ledger.lessons.rule("keep", None, kept)
    return number


def test_a_lesson_forgotten_while_a_session_starts_is_not_told(ledger: Ledger) -> None:
    turn(ledger, ledger.turns.session("me", "source"), -1, Wish(PLAIN, "plain"))
    (known,) = ledger.lessons.of_user("me")
    session = ledger.turns.session("me", "new")
    ledger.lessons.begin(session, (known.id, known.id + 1))
    assert [one.id for one in ledger.lessons.of_session(session) or ()] == [known.id]


def test_no_lesson_is_edited_into_another(ledger: Ledger) -> None:
    for text in (PLAIN, "Be kind.", "Be brief."):
        ledger.lessons.rule("add", "me", None, text)
    ledger.lessons.rule("add", "you", None, "Be bold.")
    with pytest.raises(UndoError, match="lesson 1 says that already"):
        ledger.lessons.rule("edit", None, 2, PLAIN.upper())
    ledger.lessons.rule("edit", "me", 2, "Be kind!")
    ledger.lessons.rule("drop", "me", 1)
    ledger.lessons.rule("edit", "me", 2, PLAIN)
    ledger.lessons.rule("edit", "me", 3, "Be bold.")
    told = [one.text for one in ledger.lessons.of_user("me") if one.state is State.TOLD]
    assert sorted(told) == ["Be bold.", PLAIN]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Always answer in C#.", "Always answer in C++."),
        ("End with \N{THUMBS UP SIGN}", "End with \N{PARTY POPPER}"),
        ("\u0907\u0938\u0915\u093e", "\u0907\u0938\u0915\u0940"),  # Hindi: its vowels are marks
        ("Round to +1.", "Round to -1."),
        ("From now on shorter please.", "From now on without lists."),
    ],
)
@pytest.mark.parametrize("by_hand", [True, False])
def test_sentences_that_differ_are_two_lessons(
    ledger: Ledger, first: str, second: str, by_hand: bool
) -> None:
    """Else the second replaced the first by hand, and was lost where it was said."""
    for text in (first, second, f"{second.upper()}!"):
        if by_hand:
            ledger.lessons.rule("add", "me", None, text)
        else:
            turn(ledger, ledger.turns.session("me", text), -1, Wish(text, "From now on"))
    found = [one.text for one in ledger.lessons.of_user("me")]
    assert len(found) == 2
    assert first in found


def test_what_was_said_names_the_version_that_answered(ledger: Ledger) -> None:
    """None before it has learned that; of what the user wrote nothing is known."""
    turn(ledger, ledger.turns.session("me", "source"), -1, Wish(PLAIN, "plain"))
    ledger.lessons.rule("add", "me", None, "Be kind.")
    found = {one["text"]: one["back"] for one in read_lessons(sql(ledger), "me")}
    assert found == {PLAIN: 0, "Be kind.": None}


@pytest.mark.parametrize(
    ("state", "then"),
    [(one, State.TOLD) for one in (State.TOLD, State.ASIDE, State.LEARNED)]
    + [(one, one) for one in (State.CANDIDATE, State.PROVISIONAL, State.DROPPED)],
)
def test_what_is_said_again_lives_again_if_its_user_had_kept_it(
    ledger: Ledger, state: State, then: State
) -> None:
    wish = Wish(PLAIN, "plain")
    turn(ledger, ledger.turns.session("me", "source"), -1, wish)
    turn(ledger, ledger.turns.session("me", "other"), -1, Wish("Be kind.", "kind"))
    sql(ledger).write("UPDATE lessons SET state = ?, told_in = 1 WHERE id = 1", state)
    turn(ledger, ledger.turns.session("me", "again"), -1, wish)
    found = [(one.text, one.state) for one in ledger.lessons.of_user("me")]
    assert (PLAIN, then) in found
    assert (found[0][0] == PLAIN) == (then is not State.DROPPED), "it is the newest now"


def test_only_what_is_told_takes_a_place(ledger: Ledger) -> None:
    ledger.lessons.rule("add", "me", None, PLAIN)
    for number in range(MOST):
        source = ledger.turns.session("me", f"source {number}")
        turn(ledger, source, -1, Wish(f"Wish {number}.", f"wish {number}"))
    for number, state in enumerate((State.ASIDE, State.PROVISIONAL, State.LEARNED, State.DROPPED)):
        sql(ledger).write("UPDATE lessons SET state = ? WHERE id = ?", state, number + 2)
        sql(ledger).write(  # the weights of version 0 have practised it
            "INSERT INTO steps (status, parent, version, lesson, created_at) "
            "VALUES ('committed', 0, 0, ?, 0)",
            number + 2,
        )
    lessons = LessonChooser(ledger.lessons, lambda text: range(len(text.split())))
    told = lessons.for_session(ledger.turns.session("me", "new"), "me")
    assert [one.id for one in told] == [1, *range(6, MOST + 2)]


@pytest.mark.parametrize("text", ["", " \n", "x" * 10_000, "Be\x00brief.", "\x1b[2JBe brief."])
def test_what_is_no_lesson_is_refused_in_a_sentence(ledger: Ledger, text: str) -> None:
    for which in (None, ledger.lessons.rule("add", "me", None, PLAIN)):
        with pytest.raises(
            UndoError, match=r"a lesson is a sentence of at most|a lesson needs words|holds U\+00"
        ):
            ledger.lessons.rule("edit" if which else "add", "me", which, text)
    assert [one.text for one in ledger.lessons.of_user()] == [PLAIN]
