"""Gains of replies from hints: how much a hint raises the teacher's logprob of a reply.

Rule: a reply has one gain, a number without words; its current verdict decides whether it counts as
accepted. A reply is scored after the prompt of the first try: where the user asked for it again,
that prompt holds no correction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinker_claw.ledger.database import LedgerTable, Rows

RECENT = 2000
"""Newest turns among which accepted replies are looked for."""
MOST = 256
"""Most gains kept for a user; beyond it the older half is deleted, since wishes and policies
change. (Deleting one at a time would pair all others anew each time, another chance of a false
claim.)"""
_TRIES = 16
"""Turns of a session among which the first try is looked for."""


Gains = Sequence[tuple[bool, float]]
"""Gains of one user's replies, oldest first: whether it was accepted, and nats per token."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A reply that its user accepted."""

    turn_id: int
    opening: int
    """Turn with whose prompt it is scored; the same turn where it was the first try."""
    told: str | None
    """Text that the teacher would be told about that first try; None: not known."""


class GainTable(LedgerTable):
    """Table of gains, written by judging, and of replies to measure."""

    def user_of(self, session_id: int) -> str:
        return self._db.one("SELECT user FROM sessions WHERE id = ?", session_id)

    def add(self, user: str, gains: Mapping[int, float]) -> None:
        """Write gains by turn; beyond the limit, drop the older half of a user's."""
        with self._db.transaction() as tx:
            tx.executemany(
                "INSERT OR REPLACE INTO gains (turn_id, user, gain) "
                "SELECT id, ?, ? FROM turns "
                "WHERE id = ? AND blanked IS NOT 'forgotten'",  # it may be meanwhile
                [(user, gain, turn_id) for turn_id, gain in gains.items()],
            )
            tx.execute(
                "DELETE FROM gains WHERE user = ?1 AND turn_id IN (SELECT turn_id FROM gains "
                "WHERE user = ?1 ORDER BY turn_id LIMIT ?2 / 2) AND ?2 < "
                "(SELECT COUNT(*) FROM gains WHERE user = ?1)",
                (user, MOST),
            )

    def of(self, user: str) -> Gains:
        return read_gains(self._db, user).get(user, ())

    def opening(self, turn_id: int) -> int:
        """Return the first try at this turn's request: the turn itself, unless the user rejected
        the one before it."""
        rows = self._db.rows(
            "SELECT earlier.id, value FROM turns "
            "JOIN turns AS earlier ON earlier.session_id = turns.session_id "
            "AND earlier.kind = turns.kind AND earlier.idx < turns.idx "
            "JOIN next_states ON next_states.turn_id = earlier.id AND role = 'user' "
            "LEFT JOIN verdicts ON verdicts.turn_id = earlier.id "
            "WHERE turns.id = ? ORDER BY earlier.idx DESC LIMIT ?",
            turn_id,
            _TRIES,
        )
        for row in rows:
            if row["value"] != -1:
                break
            turn_id = row["id"]
        return turn_id

    def accepted(self, user: str, *, again: bool) -> Accepted | None:
        """Return the newest reply that the user accepted and that can be measured.

        Args:
            again: whether it may have been measured before.
        """
        rows = self._db.rows(
            "SELECT turns.id FROM verdicts CROSS JOIN turns ON turns.id = verdicts.turn_id "
            "JOIN sessions ON sessions.id = session_id "
            "JOIN next_states ON next_states.turn_id = turns.id AND role = 'user' "
            "LEFT JOIN gains ON gains.turn_id = turns.id "
            "WHERE verdicts.turn_id > (SELECT MAX(id) FROM turns) - ? AND value = 1 "
            "AND sessions.user = ? AND kind = 'main' AND blanked IS NULL AND LENGTH(tokens) > 1 "
            "AND (? OR gains.turn_id IS NULL) ORDER BY turns.id DESC LIMIT 8",
            RECENT,
            user,
            again,
        )
        for row in rows:
            opening = self.opening(row["id"])
            first = self._db.row(
                "SELECT COALESCE(NULLIF(samples.hint, ''), NULLIF(hints.text, '')) AS told "
                "FROM turns LEFT JOIN samples ON samples.turn_id = turns.id "
                "LEFT JOIN hints ON hints.turn_id = turns.id AND rank = 0 "
                "WHERE turns.id = ? AND hint_at IS NOT NULL AND blanked IS NULL",
                opening,
            )
            if first is not None:
                return Accepted(row["id"], opening, first["told"])
        return None


def read_gains(rows: Rows, user: str | None = None) -> Mapping[str, Gains]:
    """Return the gains by user, of one user or of all."""
    found: dict[str, list[tuple[bool, float]]] = {}
    for row in rows.rows(
        "SELECT user, gain, value FROM gains JOIN verdicts ON verdicts.turn_id = gains.turn_id "
        "WHERE value AND (?1 IS NULL OR user = ?1) ORDER BY user, gains.turn_id",
        user,
    ):
        found.setdefault(row["user"], []).append((row["value"] > 0, row["gain"]))
    return found
