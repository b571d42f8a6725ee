"""The queue of turns to judge, score and make samples of.

Rule: what waits follows from turns, next states and verdicts. A row of `jobs` is a turn whose last
try failed: its failed tries and when the next one is due, so that a restart keeps both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinker_claw.ledger.database import LedgerTable
from tinker_claw.ledger.turns import OPEN, refuse, reopen
from tinker_claw.turn_state import Reason, TurnRefusal

TRIES = 3
"""Failed tries after which a turn is set aside."""
SET_ASIDE = TurnRefusal(Reason.UNJUDGED, "`tinker-claw rejudge` tries again")
"""Why such a turn is not trained."""
_LONGEST = 2000
"""Most characters kept of an error."""
_JOBS = """
SELECT turns.id AS turn_id, episode > 0 AS episode, verdicts.turn_id IS NOT NULL AS judged,
  COALESCE(tries, 0) AS tries, COALESCE(due_at, 0.0) AS due_at
FROM turns CROSS JOIN sessions ON sessions.id = session_id
  LEFT JOIN verdicts ON verdicts.turn_id = turns.id LEFT JOIN jobs ON jobs.turn_id = turns.id
WHERE turns.state = 'judging' ORDER BY due_at, turns.id
"""
_SET_ASIDE = """
SELECT turns.id FROM turns JOIN next_states ON turn_id = turns.id
WHERE reason = ? AND LENGTH(tokens) > 1 AND text <> '' ORDER BY turns.id
"""


@dataclass(frozen=True, slots=True)
class JudgingJob:
    """A turn that can become a sample."""

    turn_id: int
    episode: bool
    judged: bool
    tries: int
    """Failed tries for which the turn is to blame."""
    due_at: float
    """When it may be tried, in seconds since 1970; 0: no try has failed."""


class JobTable(LedgerTable):
    """Turns to judge, and their failed tries."""

    def due(self) -> list[JudgingJob]:
        """Return the turns in state `judging`: those never tried first, oldest first, then those
        that are due earliest."""
        return [JudgingJob(*row) for row in self._db.rows(_JOBS)]

    def postpone(self, turn_id: int, tries: int, due_at: float, error: str) -> bool:
        """Record a failed try, of which the last sets the turn aside. False: the turn was forgotten
        or settled meanwhile, and nothing is written."""
        with self._db.transaction() as tx:
            written = tx.execute(
                f"INSERT INTO jobs SELECT id, ?2, ?3, ?4 FROM turns WHERE id = ?1 AND {OPEN} "
                "ON CONFLICT (turn_id) DO UPDATE SET tries = ?2, due_at = ?3, error = ?4",
                (turn_id, tries, due_at, error[:_LONGEST]),
            ).rowcount
            if written and tries >= TRIES:
                refuse(tx, SET_ASIDE, "id = ?", turn_id)
        return written > 0

    def take_up(self, turn_ids: Sequence[int] | None) -> list[int]:
        """Reopen turns that were set aside, to be judged again; return their ids.

        Args:
            turn_ids: turns to choose from; None: all. Those without their text stay aside.
        """
        with self._db.transaction() as tx:
            set_aside = [row["id"] for row in tx.execute(_SET_ASIDE, (Reason.UNJUDGED,))]
            again = [turn_id for turn_id in set_aside if turn_ids is None or turn_id in turn_ids]
            for turn_id in again:
                reopen(tx, turn_id)
        return again
