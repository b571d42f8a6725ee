"""Bills of a ledger, row by row."""

from __future__ import annotations

from typing import Any

from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.spend import PURPOSES, Bill, Purpose, Spent
from tinker_claw.types import Usage


def billed(ledger: Ledger, where: str = "1", *values: Any) -> Spent:
    """Sum of some rows."""
    spent = Spent()
    for row in ledger._db.rows(f"SELECT * FROM spend WHERE {where}", *values):
        usage = Usage(row["prefill"], row["cached"], row["sampled"], row["trained"])
        spent = spent.plus(Bill(row["purpose"], usage, row["usd"]))
    return spent


def of_turn(ledger: Ledger, turn: int) -> Usage:
    return billed(ledger, "turn_id = ?", turn).usage


def of_step(ledger: Ledger, step: int) -> Usage:
    return billed(ledger, "step_id = ?", step).usage


def by_purpose(ledger: Ledger) -> dict[Purpose, Spent]:
    return {purpose: ledger.spend.total(purpose=purpose) for purpose in PURPOSES}
