"""What a service billed.

Rule: what serving a turn cost is written in the turn's own transaction. What judging, the teacher
or a step cost is written when it ends, however it ends: a void step has cost its money, too.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tinker_claw.ledger.database import Database
from tinker_claw.types import Usage

Purpose = Literal["serve", "judge", "teacher", "train"]
NOTHING = Usage()
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


@dataclass(frozen=True, slots=True)
class Bill:
    """Tokens billed for one purpose, and what they cost."""

    purpose: Purpose
    usage: Usage
    usd: float | None
    """None: the price was not known."""


@dataclass(frozen=True, slots=True)
class Spent:
    """A sum of bills."""

    usage: Usage = NOTHING
    usd: float = 0.0
    """Of the bills whose price was known."""
    unpriced: Usage = NOTHING
    """Tokens of the others."""

    def plus(self, bill: Bill) -> Spent:
        if bill.usd is None:
            return Spent(self.usage + bill.usage, self.usd, self.unpriced + bill.usage)
        return Spent(self.usage + bill.usage, self.usd + bill.usd, self.unpriced)


def write(
    tx: sqlite3.Connection, bill: Bill, *, turn_id: int | None = None, step_id: int | None = None
) -> None:
    """Add a bill within a transaction; a turn that was forgotten meanwhile is not named."""
    usage = bill.usage
    tx.execute(
        "INSERT INTO spend (created_at, purpose, turn_id, step_id, prefill, cached, sampled, "
        "trained, usd) VALUES (?, ?, (SELECT id FROM turns WHERE id = ?), ?, ?, ?, ?, ?, ?)",
        (
            *(time.time(), bill.purpose, turn_id, step_id),
            *(usage.prefill, usage.cached, usage.sampled, usage.trained, bill.usd),
        ),
    )


class SpendTable:
    """Bills, and their sums."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, bill: Bill, *, turn_id: int | None = None, step_id: int | None = None) -> None:
        with self._db.transaction() as tx:
            write(tx, bill, turn_id=turn_id, step_id=step_id)

    def total(self, since: float = 0.0) -> Spent:
        """Everything billed, from a time on (seconds since 1970)."""
        return self._sum("created_at >= ?", since)

    def by_purpose(self, since: float = 0.0) -> dict[Purpose, Spent]:
        return {
            purpose: self._sum("created_at >= ? AND purpose = ?", since, purpose)
            for purpose in PURPOSES
        }

    def of_turn(self, turn_id: int) -> Spent:
        """What serving, judging and teaching one turn cost."""
        return self._sum("turn_id = ?", turn_id)

    def of_step(self, step_id: int) -> Spent:
        """What one step cost, the scores that it needed included."""
        return self._sum("step_id = ?", step_id)

    def _sum(self, where: str, *values: Any) -> Spent:
        row = self._db.row(
            "SELECT TOTAL(usd) AS usd, "
            + ", ".join(
                f"COALESCE(SUM({name}), 0) AS {name}, "
                f"COALESCE(SUM({name} * (usd IS NULL)), 0) AS unpriced_{name}"
                for name in _KINDS
            )
            + f" FROM spend WHERE {where}",
            *values,
        )
        if row is None:
            return Spent()
        return Spent(
            usage=Usage(**{name: row[name] for name in _KINDS}),
            usd=row["usd"],
            unpriced=Usage(**{name: row[f"unpriced_{name}"] for name in _KINDS}),
        )


_KINDS = ("prefill", "cached", "sampled", "trained")
