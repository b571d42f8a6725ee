"""The spend table: sums and means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ledger.test_ledger import new_turn
from tinker_claw.ledger import spend
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.prune import from_turn
from tinker_claw.ledger.spend import Bill, Spent
from tinker_claw.types import NextState, Usage


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path)
    ledger.steps.add_first_version(state_ref="s0", sampler_ref="p0")
    yield ledger
    ledger.close()


def test_bills_add_up_by_turn_step_and_purpose(ledger: Ledger) -> None:
    serve = Bill("serve", Usage(prefill=100, sampled=10), 0.5)
    turn = ledger.turns.add(new_turn(ledger), serve)
    step = ledger.steps.begin(0, [])
    ledger.spend.add(Bill("judge", Usage(prefill=30, cached=60, sampled=9), 0.25), turn_id=turn)
    ledger.spend.add(Bill("train", Usage(trained=109), 1.0), step_id=step)
    ledger.spend.add(Bill("serve", Usage(prefill=7), None))
    assert ledger.spend.of_turn(turn) == Spent(Usage(prefill=130, cached=60, sampled=19), 0.75)
    assert ledger.spend.of_step(step) == Spent(Usage(trained=109), 1.0)
    assert ledger.spend.total() == Spent(
        Usage(prefill=137, cached=60, sampled=19, trained=109), 1.75, Usage(prefill=7)
    )
    by_purpose = ledger.spend.by_purpose()
    assert by_purpose["serve"] == Spent(
        Usage(prefill=107, sampled=10), 0.5, unpriced=Usage(prefill=7)
    )
    assert by_purpose["teacher"] == Spent()


def test_sums_can_begin_at_a_time(ledger: Ledger) -> None:
    ledger.spend.add(Bill("serve", Usage(prefill=1), 1.0))
    (row,) = ledger._db.rows("SELECT created_at FROM spend")
    later = row["created_at"] + 1
    assert ledger.spend.total(since=row["created_at"]).usd == 1.0
    assert ledger.spend.total(since=later) == Spent()
    assert ledger.spend.by_purpose(since=later)["serve"] == Spent()


def test_means_are_of_what_was_counted_and_none_where_nothing_was(ledger: Ledger) -> None:
    empty = ledger.means()
    assert (empty.turns, empty.prompt_tokens, empty.judge, empty.admitted) == (0, None, None, None)
    for number in range(2):
        turn = ledger.turns.add(
            new_turn(ledger, str(number)), Bill("serve", Usage(prefill=4, sampled=3), None)
        )
        ledger.turns.add_next_state(turn, NextState("user", "ok"))
        ledger.spend.add(Bill("judge", Usage(prefill=10 + 10 * number), None), turn_id=turn)
        ledger.judgements.add(turn, value=1, verdict_ballots=(), hint_ballots=(), hints=())
    ledger.spend.add(Bill("serve", Usage(prefill=4), None))  # nobody was there to read the reply
    ledger.samples.add(turn, 1, None)
    means = ledger.means()
    assert (means.turns, means.prompt_tokens, means.reply_tokens) == (2, 4.0, 3.0)
    assert means.serve == Usage(prefill=6, sampled=3)
    assert means.judge == Usage(prefill=15)
    assert (means.teacher, means.stale) == (None, None)
    assert (means.unaccepted, means.admitted, means.hinted) == (0.0, 0.5, 0.0)


def test_bills_of_forgotten_turns_are_in_no_mean_of_judging(ledger: Ledger) -> None:
    """Else a budget would have no room for judgements that seem to cost ten times as much."""
    for number in range(10):
        turn = ledger.turns.add(new_turn(ledger, "kept" if number == 0 else "gone"))
        ledger.spend.add(Bill("judge", Usage(prefill=100), None), turn_id=turn)
        ledger.spend.add(Bill("teacher", Usage(prefill=7), None), turn_id=turn)
    ledger.forget(from_turn(2))
    means = ledger.means()
    assert (means.turns, means.judge, means.teacher) == (1, Usage(prefill=100), Usage(prefill=7))
    assert ledger.spend.total().usage == Usage(prefill=1070), "all of it was billed"


def test_means_are_of_the_newest_turns(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spend, "NEWEST", 2)
    for number, (value, tokens) in enumerate(((-1, 1000), (1, 10), (1, 10))):
        served = Bill("serve", Usage(prefill=tokens), None)
        turn = ledger.turns.add(new_turn(ledger, str(number)), served)
        ledger.turns.add_next_state(turn, NextState("user", "ok"))
        ledger.spend.add(Bill("judge", Usage(prefill=tokens), None), turn_id=turn)
        ledger.judgements.add(turn, value=value, verdict_ballots=(), hint_ballots=(), hints=())
        ledger.samples.add(turn, value, None)
    means = ledger.means()
    assert (means.turns, means.serve, means.judge) == (2, Usage(prefill=10), Usage(prefill=10))
    assert (means.unaccepted, means.admitted) == (0.0, 1.0)
