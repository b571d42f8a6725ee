"""Gains: their user, the reply to measure next, and their fate when turns are forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stories import TEACHER, Told
from tinker_claw.ledger.gains import MOST
from tinker_claw.ledger.prune import from_turn, in_session
from tinker_claw.ledger.samples import TEACHES_NOTHING
from tinker_claw.types import NextState


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.ledger.close()


def test_gains_are_a_users_by_what_their_verdicts_say_the_oldest_first(told: Told) -> None:
    gains = told.ledger.gains
    good, bad, other = told.judged("a", 1), told.judged("b", -1), told.judged("c", 1)
    gains.add("me", {good: 0.25, bad: -0.5})
    gains.add("me", {other: 0.125})
    gains.add("her", {told.judged("d", 1): 9.0})
    assert gains.of("me") == [(True, 0.25), (False, -0.5), (True, 0.125)]
    assert not gains.of("nobody")
    gains.add("me", {good: 1.0})
    assert gains.of("me") == [(True, 1.0), (False, -0.5), (True, 0.125)], "of a reply there is one"


def test_the_older_half_goes_where_there_are_too_many(told: Told) -> None:
    hers = told.judged("hers", 1)
    told.ledger.gains.add("her", {hers: 1.0})
    rows = [told.judged("many", 1) for _ in range(MOST + 1)]
    told.ledger.gains.add("me", {turn: float(n) for n, turn in enumerate(rows[:MOST])})
    assert len(told.ledger.gains.of("me")) == MOST
    told.ledger.gains.add("me", {rows[MOST]: 0.5})
    found = [gain for _, gain in told.ledger.gains.of("me")]
    assert found == [*map(float, range(MOST // 2, MOST)), 0.5]
    assert told.ledger.gains.of("her") == [(True, 1.0)]


def test_a_matter_begins_where_the_user_had_rejected_nothing(told: Told) -> None:
    first = told.judged("s", -1)
    again, saved = told.judged("s", -1), told.judged("s", 1)
    new, asked = told.judged("s", -1), told.judged("s", 1)
    opening = told.ledger.gains.opening
    found = [opening(turn) for turn in (first, again, saved, new, asked)]
    assert found == [first, first, first, new, new]


def test_what_tools_returned_neither_begins_a_matter_nor_accepts_a_reply(told: Told) -> None:
    wrong = told.judged("s", -1)
    call = told.turn("s")
    told.ledger.turns.add_next_state(call, NextState("tool", "no such file"))
    told.judge(call, -1)
    done = told.judged("s", 1)
    assert told.ledger.gains.opening(done) == wrong
    ran = told.turn("t")
    told.ledger.turns.add_next_state(ran, NextState("tool", "ok"))
    told.judge(ran, 1)
    found = told.ledger.gains.accepted("me", again=False)
    assert found is not None
    assert (found.turn_id, found.opening) == (done, wrong)


def test_the_newest_reply_that_was_accepted_and_not_measured_is_next(told: Told) -> None:
    gains = told.ledger.gains
    assert gains.accepted("me", again=True) is None
    early, late = told.judged("a", 1), told.judged("b", 1)
    told.judged("c", -1)
    told.judged("no place", 1, hint_at=None)
    found = [gains.accepted("me", again=False)]
    gains.add("me", {late: 0.0})
    found += [gains.accepted("me", again=again) for again in (False, True)]
    assert [one.turn_id for one in found if one] == [late, early, late]
    assert gains.accepted("her", again=True) is None


def test_what_was_told_of_the_first_try_is_remembered(told: Told) -> None:
    told.sampled("s", -1, TEACHER)
    told.judged("s", 1)
    found = told.ledger.gains.accepted("me", again=False)
    assert found is not None
    assert found.told == TEACHER.hint


@pytest.mark.parametrize("trained", [False, True])
def test_forgetting_takes_gains_along_for_good(told: Told, trained: bool) -> None:
    turn, sample = told.sampled("a", 1, TEACHER)
    kept = told.judged("b", 1)
    told.ledger.gains.add("me", {turn: 0.5, kept: 0.25})
    if trained:
        told.step(sample)
    told.ledger.forget(in_session("a", None))
    assert told.ledger.gains.of("me") == [(True, 0.25)]
    told.ledger.gains.add("me", {turn: 0.5})
    assert told.ledger.turns._db.rows("SELECT 1 FROM gains WHERE turn_id = ?", turn) == []
    told.ledger.forget(from_turn(kept))
    assert told.ledger.turns._db.rows("SELECT 1 FROM gains") == []


@pytest.mark.parametrize("rewards_count", [True, False])
def test_what_is_queued_is_weighed_anew_but_not_what_a_step_has_in_hand(
    told: Told, rewards_count: bool
) -> None:
    samples = told.ledger.samples
    turn, _ = told.sampled("queued", -1, TEACHER)
    told.sampled("no hint", 1)
    hint_only = told.judged("hint only", 0, TEACHER.hint)
    samples.add(hint_only, None, TEACHER)
    _, begun = told.sampled("begun", -1, TEACHER)
    told.ledger.steps.begin(told.version.id, [begun])
    samples.weigh("her", 0.0, rewards_count=rewards_count)
    samples.weigh("me", 0.5, rewards_count=rewards_count)
    assert [s.teacher and s.teacher.weight for s in samples.oldest(9)] == [0.5, None, 0.5, 1.0]
    samples.weigh("me", 0.0, rewards_count=rewards_count)
    left = {s.turn_id: s.teacher and s.teacher.weight for s in samples.oldest(9)}
    assert hint_only not in left
    assert left.get(turn) == (0.0 if rewards_count else None)
    why = "SELECT untrained_because FROM turns WHERE id = ?"
    assert told.ledger.turns._db.one(why, hint_only) == TEACHES_NOTHING
