"""The spend table and its sums."""

from __future__ import annotations

from tests.support.ledger import new_turn, of_step, of_turn, sql
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.spend import Bill, Spent
from tinker_claw.types import Usage


def test_bills_add_up_by_turn_step_and_purpose(ledger: Ledger) -> None:
    serve = Bill("serve", Usage(prefill=100, sampled=10), 0.5)
    turn = ledger.turns.add(new_turn(ledger), serve)
    step = ledger.steps.begin(0, [])
    ledger.spend.add(Bill("judge", Usage(prefill=30, cached=60, sampled=9), 0.25), turn_id=turn)
    ledger.spend.add(Bill("train", Usage(trained=109), 1.0), step_id=step)
    ledger.spend.add(Bill("serve", Usage(prefill=7), None))
    assert of_turn(ledger, turn) == Usage(prefill=130, cached=60, sampled=19)
    assert of_step(ledger, step) == Usage(trained=109)
    assert ledger.spend.total() == Spent(
        Usage(prefill=137, cached=60, sampled=19, trained=109), 1.75, Usage(prefill=7)
    )
    assert ledger.spend.total(purpose="serve") == Spent(
        Usage(prefill=107, sampled=10), 0.5, unpriced=Usage(prefill=7)
    )
    assert ledger.spend.total(purpose="teacher") == Spent()


def test_sums_can_begin_at_a_time(ledger: Ledger) -> None:
    ledger.spend.add(Bill("serve", Usage(prefill=1), 1.0))
    (row,) = sql(ledger).rows("SELECT created_at FROM spend")
    later = row["created_at"] + 1
    assert ledger.spend.total(since=row["created_at"]).usd == 1.0
    assert ledger.spend.total(since=later) == Spent()
    assert ledger.spend.total(until=row["created_at"]) == Spent()
