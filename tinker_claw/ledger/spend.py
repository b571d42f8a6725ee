"""Bills of a service, and their sums.

Rule: the cost of serving a turn is written in the turn's own transaction. The cost of judging, of
the teacher or of a step is written when it ends, however it ends: a void step costs money, too.
"""

from __future__ import annotations

import math
import sqlite3
import time
from dataclasses import astuple, dataclass
from itertools import takewhile
from typing import Literal, get_args

from tinker_claw.ledger.database import LedgerTable
from tinker_claw.types import Usage

Purpose = Literal["serve", "judge", "teacher", "train"]
NOTHING = Usage()
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
_SUMS = """
SELECT TOTAL(usd), COALESCE(SUM(prefill), 0), COALESCE(SUM(cached), 0), COALESCE(SUM(sampled), 0),
  COALESCE(SUM(trained), 0), COALESCE(SUM(prefill) FILTER (WHERE usd IS NULL), 0),
  COALESCE(SUM(cached) FILTER (WHERE usd IS NULL), 0),
  COALESCE(SUM(sampled) FILTER (WHERE usd IS NULL), 0),
  COALESCE(SUM(trained) FILTER (WHERE usd IS NULL), 0)
FROM spend WHERE created_at >= ?1 AND created_at < ?2 AND (?3 IS NULL OR purpose = ?3)
  AND (?4 OR step_id IS NULL OR step_id NOT IN (SELECT id FROM steps WHERE lesson IS NOT NULL))
"""
"""SQL of the columns of `Spent`: dollars, all tokens, and those without a price."""


@dataclass(frozen=True, slots=True)
class Bill:
    """Tokens billed for one purpose, and their cost."""

    purpose: Purpose
    usage: Usage
    usd: float | None
    """Cost in dollars; None: the price was not known."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Sum of bills."""

    usage: Usage = NOTHING
    usd: float = 0.0
    """Dollars of the bills whose price was known."""
    unpriced: Usage = NOTHING
    """Tokens of the bills without a price."""

    def plus(self, bill: Bill) -> Spent:
        unpriced = bill.usage if bill.usd is None else NOTHING
        usd = self.usd + (bill.usd or 0.0)
        return Spent(self.usage + bill.usage, usd, self.unpriced + unpriced)


def write_bill(
    tx: sqlite3.Connection, bill: Bill, *, turn_id: int | None = None, step_id: int | None = None
) -> None:
    """Add a bill within a transaction; a turn forgotten meanwhile is left out."""
    tx.execute(
        "INSERT INTO spend (created_at, purpose, turn_id, step_id, prefill, cached, sampled, "
        "trained, usd) VALUES (?, ?, (SELECT id FROM turns WHERE id = ?), ?, ?, ?, ?, ?, ?)",
        (time.time(), bill.purpose, turn_id, step_id, *astuple(bill.usage), bill.usd),
    )


class SpendTable(LedgerTable):
    """Table of bills and their sums."""

    def add(self, bill: Bill, *, turn_id: int | None = None, step_id: int | None = None) -> None:
        with self._db.transaction() as tx:
            write_bill(tx, bill, turn_id=turn_id, step_id=step_id)

    def total(
        self,
        since: float = 0.0,
        until: float = math.inf,
        purpose: Purpose | None = None,
        *,
        practice: bool = True,
    ) -> Spent:
        """Return everything billed in a time (seconds since 1970), or for one purpose.

        Args:
            practice: whether to include steps that practised a lesson.
        """
        ((usd, *sums),) = self._db.rows(_SUMS, since, until, purpose, practice)
        return Spent(Usage(*sums[:4]), usd, Usage(*sums[4:]))

    def of_newest_steps(self, most: int) -> tuple[int, Usage, Usage]:
        """Return the number of samples of the newest committed steps, and the tokens billed for
        learning and for serving meanwhile.

        That time begins with the end of the step before them and ends with the last. Void steps
        are included, practice is left out, and so are steps that were carried here without samples.
        """
        steps = self._db.rows(
            "SELECT finished_at, (SELECT COUNT(*) FROM step_samples WHERE step_id = id) AS samples "
            "FROM steps WHERE status = 'committed' AND lesson IS NULL ORDER BY id DESC LIMIT ?",
            most + 1,
        )
        counted = list(takewhile(lambda step: step["samples"], steps[:most]))
        if not counted:
            return 0, NOTHING, NOTHING
        since = steps[len(counted)]["finished_at"] if len(steps) > len(counted) else 0.0
        until = counted[0]["finished_at"]
        billed = [self.total(since, until, purpose, practice=False).usage for purpose in PURPOSES]
        return sum(step["samples"] for step in counted), sum(billed[1:], NOTHING), billed[0]
