"""Trial, probes and withdrawal of lessons, over a real ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from tests.ledger.test_ledger import new_turn
from tinker_claw.conversation.lessons import MOST, TRIAL, Lessons, chance_higher, is_probe, settle
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.lessons import Evidence, Lesson, State, read_lessons
from tinker_claw.types import Attempt, Vote, Wish

PLAIN = "Write plain sentences."


def turn(ledger: Ledger, session_id: int, value: Vote, wish: Wish | None = None) -> int:
    """Add the next turn of a session with its verdict."""
    number = ledger.turns.add(new_turn(ledger, session_id=session_id))
    ledger.judgements.add(
        number, value=value, verdict_ballots=(), hint_ballots=(), hints=(), wish=wish
    )
    return number


def lesson(state: State = State.TRIED, **more: object) -> Lesson:
    given = (7, "me", PLAIN, "plain", "always", 1, state, False, None, None, 0.0, 0.0)
    return Lesson(**dict(zip(Lesson.__slots__, given, strict=True)) | more)  # type: ignore[arg-type]


def seen(
    told: Sequence[int], untold: Sequence[int], gaps: Sequence[float] = (), at: float = 1.0
) -> Evidence:
    replies = [(True, bool(good), at) for good in told] + [(False, bool(g), at) for g in untold]
    return Evidence(tuple(replies), (), tuple(gaps))


def state_of(found: tuple[State, str] | None) -> State | None:
    return None if found is None else found[0]


def test_one_session_of_each_row_is_not_told() -> None:
    for state, one_in in ((State.TRIED, TRIAL), (State.TOLD, 8)):
        probes = [is_probe(3, number, state) for number in range(64)]
        rows = [sum(probes[n : n + one_in]) for n in range(0, 64, one_in)]
        assert set(rows) == {1}
    late = [is_probe(3, number, State.TOLD) for number in range(192, 192 + 320)]
    assert sum(late) == 10


def test_a_trial_ends_when_it_is_clear_whether_telling_helps() -> None:
    assert state_of(settle(lesson(), seen([1] * 8, [0] * 3))) is State.TOLD
    assert state_of(settle(lesson(), seen([0] * 8, [1] * 3))) is State.DROPPED
    assert settle(lesson(), seen([1] * 8, [1] * 3)) is None
    assert settle(lesson(), seen([0], [1] * 3)) is None, "one reply says nothing"


def test_a_lesson_is_withdrawn_when_the_model_does_it_untold() -> None:
    learned = seen([1] * 20, [1] * 8, [0.02] * 8)
    assert state_of(settle(lesson(State.TOLD), learned)) is State.LEARNED
    assert settle(lesson(State.TOLD), seen([1] * 20, [1] * 8, [0.2] * 8)) is None
    assert settle(lesson(State.TOLD), seen([1] * 20, [1] * 7, [0.02] * 8)) is None
    assert settle(lesson(State.TOLD), seen([1] * 20, [1] * 4 + [0] * 4, [0.02] * 8)) is None


def test_it_comes_back_when_replies_get_worse_without_it() -> None:
    withdrawn = lesson(State.LEARNED, changed_at=5.0)
    assert state_of(settle(withdrawn, seen([1] * 20, [0] * 4, at=6.0))) is State.TOLD
    assert settle(withdrawn, seen([1] * 20, [0] * 4, at=4.0)) is None, "that was before"


def test_what_has_come_back_is_withdrawn_by_what_is_seen_from_then_on() -> None:
    back = lesson(State.TOLD, changed_at=5.0)
    assert settle(back, seen([1] * 20, [1] * 8, [0.02] * 8, at=4.0)) is None
    again = settle(back, seen([1] * 20, [1] * 8, [0.02] * 8, at=6.0))
    assert state_of(again) is State.LEARNED


def use(ledger: Ledger, version: int) -> list[bool]:
    """Begin sessions by a version, all accepted, and measure what is told as likely untold, until
    it has learned the lesson. Return which were told."""
    lessons, told = Lessons(ledger.lessons, lambda text: text.split()), list[bool]()
    while ledger.lessons.of_user("me")[0].version != version:
        session = ledger.turns.session("me", f"by v{version}, {len(told)}")
        told.append(bool(lessons.told(session, "me", version)))
        number = turn(ledger, session, 1)
        ledger._db.write("UPDATE turns SET policy_version = ? WHERE id = ?", version, number)
        if told[-1]:
            ledger.samples.add(number, 1, None)
            ledger._db.write("UPDATE samples SET untold = 0 WHERE turn_id = ?", number)
    return told


def test_what_was_learned_and_is_said_again_is_told_again(ledger: Ledger) -> None:
    wish = Wish(PLAIN, "plain", "always")
    turn(ledger, ledger.turns.session("me", "source"), -1, wish)
    use(ledger, 0)
    turn(ledger, ledger.turns.session("me", "again"), -1, wish)
    lessons = Lessons(ledger.lessons, lambda text: text.split())
    (known,) = ledger.lessons.of_user("me")
    assert (known.state, known.reason) == (State.TOLD, "you said it again")
    assert lessons.told(ledger.turns.session("me", "next"), "me", 0) == [known]


def test_what_was_learned_before_a_rollback_is_probed_and_learned_anew_after_it(
    ledger: Ledger,
) -> None:
    """By replies of versions on the line that is left, not by those of the others."""
    turn(ledger, ledger.turns.session("me", "source"), -1, Wish(PLAIN, "plain", "always"))
    base = ledger.steps.newest_version()
    assert base is not None
    step = ledger.steps.begin(base.id, [])
    ledger.steps.commit(step, base, state_ref="s1", sampler_ref="p1", metrics={})
    use(ledger, 1)
    back = ledger.steps.roll_back(base)
    told = use(ledger, back.id)
    assert sum(told[:32]) == 28, "the others show whether it is still needed"
    assert ledger.lessons.of_user("me")[0].state is State.LEARNED


def test_chance_of_two_rates() -> None:
    assert chance_higher((0, 0), (0, 0)) == pytest.approx(0.5)
    assert chance_higher((1, 0), (0, 0)) == pytest.approx(2 / 3, abs=0.005)
    assert chance_higher((5, 0), (0, 5)) == pytest.approx(1 - 1 / 924, abs=0.005)


def test_what_was_learned_is_told_again_by_versions_that_have_not_learned_it(
    ledger: Ledger,
) -> None:
    """By an earlier one that is pinned, and by those that come after a rollback to it."""
    turn(ledger, ledger.turns.session("me", "source"), -1, Wish(PLAIN, "plain", "always"))
    (known,) = ledger.lessons.of_user("me")
    base = ledger.steps.newest_version()
    assert base is not None
    begun = ledger.steps.begin(base.id, [])
    learned = ledger.steps.commit(begun, base, state_ref="s1", sampler_ref="p1", metrics={})
    ledger.lessons.change(known, State.LEARNED, "as likely untold", learned.id)
    back = ledger.steps.roll_back(base)
    lessons = Lessons(ledger.lessons, lambda text: text.split())
    told = {
        version: bool(lessons.told(ledger.turns.session("me", f"by v{version}"), "me", version))
        for version in (base.id, learned.id, back.id)
    }
    assert told == {base.id: True, learned.id: False, back.id: True}


def test_evidence_is_of_first_replies_with_the_lesson_drawn(ledger: Ledger) -> None:
    """And not of turns that were told anything, of later replies, or of episodes."""
    old = ledger.turns.session("me", "old")
    turn(ledger, old, -1, None)
    episode = ledger.turns.session("me", "episode")
    ledger.turns.enrol(episode, "me", Attempt(task="t", episode=True))
    turn(ledger, episode, 1, None)
    turn(ledger, ledger.turns.session("me", "source"), -1, Wish(PLAIN, "plain", "always"))
    (known,) = ledger.lessons.of_user("me")
    for number, told in enumerate((True, False, None)):
        session = ledger.turns.session("me", f"s{number}")
        ledger.lessons.begin(session, {} if told is None else {known.id: told})
        turn(ledger, session, 1)
        turn(ledger, session, -1)
    found = ledger.lessons.evidence(known, 0)
    assert [(told, good) for told, good, _ in found.replies] == [(False, True), (True, True)]
    assert found.before == (False,)
    assert ledger.lessons.sessions(known) == 2


def test_each_lesson_shows_what_was_accepted_before_it_with_it_and_without(ledger: Ledger) -> None:
    """In one query for all lessons; before: of sessions that were told nothing."""
    ledger.lessons.rule("add", "me", None, "Be kind.")
    ledger.lessons.rule("add", "you", None, "Be quick.")
    kind = ledger.lessons.of_user("me")[0]
    for number, value in enumerate((-1, 1, -1)):
        turn(ledger, ledger.turns.session("me", f"old {number}"), cast("Vote", value))
    told = ledger.turns.session("me", "told another")
    ledger.lessons.begin(told, {kind.id: True})
    turn(ledger, told, 1)
    turn(ledger, ledger.turns.session("me", "source"), -1, Wish(PLAIN, "plain", "always"))
    plain = ledger.lessons.of_user("me")[0]
    for number, (drawn, value) in enumerate([(True, 0), (True, 1), (True, -1), (False, -1)]):
        session = ledger.turns.session("me", f"s{number}")
        ledger.lessons.begin(session, {plain.id: drawn})
        turn(ledger, session, cast("Vote", value))
        turn(ledger, session, -1)
    found = {one["text"]: one for one in read_lessons(ledger._db, "me")}
    assert {
        text: {name: (one["good"], one["of"]) for name, one in lesson["accepted"].items()}
        for text, lesson in found.items()
    } == {
        PLAIN: {"before": (1, 3), "told": (2, 3), "untold": (0, 1)},
        "Be kind.": {"before": (1, 3), "told": (1, 1)},
    }
    assert found[PLAIN]["back"] == 0
    assert found["Be kind."]["back"] is None
    assert ledger.lessons.evidence(plain, 0).before == (False, True, False), "and not the told one"


def test_start_of_a_session_costs_the_same_however_many_there_were(ledger: Ledger) -> None:
    """Counted in steps of SQLite's machine, over sessions that the lesson was not drawn in."""
    lessons = Lessons(ledger.lessons, lambda text: range(len(text)))
    turn(ledger, ledger.turns.session("me", "source"), -1, Wish(PLAIN, "plain", "always"))

    def steps(key: str) -> int:
        session, counted = ledger.turns.session("me", key), list[int]()
        connection = ledger._db._connection
        connection.set_progress_handler(lambda: counted.append(1), 1)
        lessons.told(session, "me", 0)
        connection.set_progress_handler(None, 1)
        return len(counted)

    first = steps("first")
    for number in range(400):
        other = ledger.turns.session("me", f"{number}")
        ledger.lessons.begin(other, {})
        turn(ledger, other, 1)
    assert steps("last") < 1.5 * first


def test_start_of_a_session_costs_the_same_however_many_lessons_have_no_room(
    ledger: Ledger,
) -> None:
    """Counted in steps of SQLite's machine: what was said in a year is not weighed each time."""
    lessons = Lessons(ledger.lessons, lambda text: range(1))
    connection, counted = ledger._db._connection, list[int]()

    def steps(said: range) -> int:
        for number in said:
            wish = Wish(f"Be brief, {number}.", f"brief {number}", "always")
            turn(ledger, ledger.turns.session("me", f"source {number}"), -1, wish)
        session = ledger.turns.session("me", f"{said}")
        counted.clear()
        connection.set_progress_handler(lambda: counted.append(1), 1)
        assert lessons.told(session, "me", 0)
        connection.set_progress_handler(None, 1)
        return len(counted)

    few = steps(range(MOST))
    assert steps(range(MOST, 8 * MOST)) < 3 * few, "it was eight times as many"


def test_a_lesson_forgotten_while_a_session_starts_is_not_told(ledger: Ledger) -> None:
    turn(ledger, ledger.turns.session("me", "source"), -1, Wish(PLAIN, "plain", "always"))
    (known,) = ledger.lessons.of_user("me")
    session = ledger.turns.session("me", "new")
    ledger.lessons.begin(session, {known.id: True, known.id + 1: True})
    assert ledger.lessons.of_session(session) == [known]


def test_what_each_user_asked_for_is_common(ledger: Ledger) -> None:
    """In the same sentence; an agent in training asks for nothing."""

    def says(user: str, text: str, words: str) -> None:
        turn(ledger, ledger.turns.session(user, text), -1, Wish(text, words, "always"))

    def common() -> set[str]:
        ids = ledger.lessons.common()
        return {f"{one.user}: {one.text}" for one in ledger.lessons.of_user() if one.id in ids}

    says("ann", PLAIN, "no lists")
    trained = ledger.turns.session("trainer", "task")
    assert ledger.turns.enrol(trained, "trainer", Attempt(episode=True))
    assert common() == {f"ann: {PLAIN}"}
    says("bob", "Write numbered lists.", "lists, please")
    assert common() == set()
    says("bob", "write plain sentences!", "No lists!")
    assert common() == {f"ann: {PLAIN}", "bob: write plain sentences!"}
    ledger.lessons.rule("drop", "bob", 3)
    assert common() == set()


def test_only_who_uses_the_policy_now_has_a_say_in_what_is_common(ledger: Ledger) -> None:
    """A user without a key any more does not count, nor does one who has never talked."""
    for user, text in (("ann", PLAIN), ("bob", "Be kind."), ("left", "Be kind.")):
        turn(ledger, ledger.turns.session(user, user), -1, Wish(text, text, "always"))
    ledger.lessons.rule("add", "admin", None, PLAIN)
    common = ledger.lessons.common
    by_user = {one.user: one.id for one in ledger.lessons.of_user()}
    assert common() == set(), "not of the three, though as many say the one thing or the other"
    assert common(("ann", "bob", "admin")) == set(), "bob never asked for it"
    assert common(("ann", "admin")) == {by_user["ann"], by_user["admin"]}
    assert common(("bob",)) == {by_user["bob"], by_user["left"]}


def test_what_was_learned_is_told_again_on_another_line(ledger: Ledger) -> None:
    """A pin or a rollback before the version that learned it has not learned it."""
    lessons = Lessons(ledger.lessons, lambda text: range(len(text)))
    turn(ledger, ledger.turns.session("me", "source"), -1, Wish(PLAIN, "plain", "always"))
    (known,) = ledger.lessons.of_user("me")
    first = ledger.steps.newest_version()
    assert first is not None
    step = ledger.steps.begin(first.id, [])
    second = ledger.steps.commit(step, first, state_ref="s1", sampler_ref="p1", metrics={})
    ledger.lessons.change(known, State.LEARNED, "so", second.id)
    told = {
        version: [one.id for one in lessons.told(ledger.turns.session("me", key), "me", version)]
        for key, version in (("pinned", first.id), ("newest", second.id))
    }
    assert told == {first.id: [known.id], second.id: []}
    back = ledger.steps.roll_back(first)
    assert [one.id for one in lessons.told(ledger.turns.session("me", "b"), "me", back.id)] == [1]


def test_what_was_learned_takes_no_place_from_what_is_told(ledger: Ledger) -> None:
    ledger.lessons.rule("add", "me", None, PLAIN)
    kept = ledger.lessons.of_user("me")
    base = ledger.steps.newest_version()
    assert base is not None
    for number in range(MOST):
        source = ledger.turns.session("me", f"source {number}")
        turn(ledger, source, -1, Wish(f"Wish {number}.", f"wish {number}", "always"))
        ledger.lessons.change(ledger.lessons.of_user("me")[0], State.LEARNED, "so", base.id)
    session = ledger.turns.session("me", "new")
    lessons = Lessons(ledger.lessons, lambda text: text.split())
    assert lessons.told(session, "me", base.id) == kept
    drawn = dict(ledger._db.pairs("SELECT lesson_id, told FROM drawn"))
    assert sum(drawn.values()) == 1, "the others are compared"
    assert len(drawn) == MOST + 1


def test_what_is_there_is_not_added_again(ledger: Ledger) -> None:
    """Else a prompt held it twice, and one drop left the other."""
    turn(ledger, ledger.turns.session("me", "source"), -1, Wish(PLAIN, "no lists", "always"))
    assert ledger.lessons.rule("add", "you", None, PLAIN) == 2
    assert ledger.lessons.rule("add", "me", None, PLAIN.upper()) == 1
    (known,) = ledger.lessons.of_user("me")
    assert (known.text, known.state, known.kept) == (PLAIN.upper(), State.TOLD, True)
    ledger.lessons.rule("keep", "me", 1, "never mind this")
    assert ledger.lessons.of_user("me")[0].text == PLAIN.upper()


def test_two_wishes_that_begin_alike_are_two_lessons(ledger: Ledger) -> None:
    for text in ("From now on shorter please.", "From now on without lists."):
        session = ledger.turns.session("me", text)
        turn(ledger, session, -1, Wish(text, "From now on", "always"))
    assert len(ledger.lessons.of_user("me")) == 2


def test_what_the_user_keeps_is_always_told(ledger: Ledger) -> None:
    lessons = Lessons(ledger.lessons, lambda text: range(len(text)))
    ledger.lessons.rule("add", "me", None, PLAIN)
    for number in range(40):
        session = ledger.turns.session("me", f"s{number}")
        assert [one.text for one in lessons.told(session, "me", 0)] == [PLAIN]
        turn(ledger, session, -1)
    assert lessons.told(ledger.turns.session("you", "s"), "you", 0) == []
