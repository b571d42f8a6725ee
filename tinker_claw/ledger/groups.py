"""Episodes, and the groups in which they are compared: who waits for whom, and until when.

Rule: an episode's samples are held until all of its group have their outcome, and are queued then,
all in one transaction, with the rewards that the outcomes make of their votes. Nothing that happens
in between, no crash and no age, leaves a part of a group in the queue. What never gets whole goes
by a time limit: the episodes that have an outcome are queued as a smaller group, the others expire.
A missing outcome is none; it is never taken for 0.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tinker_claw.ledger.database import Database
from tinker_claw.ledger.turns import JUDGEABLE, OUTCOME, STEP

LIMIT_S = 3600.0
"""After the last that was heard of a group, of any of its sessions: few steps of an agent take
longer, and its samples grow old while others learn."""
NO_OUTCOME = "no outcome of its episode came in time"
AGREED = "all episodes of its group had the same reward at this step"
TOO_LARGE = "its group has more samples than a step may take, eight times --batch-size"
MATE_TOO_OLD = "another sample of its group had grown too old"
PASSED = "its episode ended without going on from it"
"""Why samples or turns of an episode are not trained."""
COMPARED = """
CASE WHEN EXISTS (SELECT 1 FROM sessions AS mate JOIN feedback ON feedback.session_id = mate.id
  WHERE mate.group_id = sessions.group_id AND mate.id <> sessions.id
    AND final = 1 AND unused IS NULL) THEN group_id END
"""
"""Of a row of `sessions`, the group in which its steps are compared with others; NULL: there is
none, or it alone has an outcome there."""
_SAME = 1e-6
"""Rewards that differ by less are equal, but for how they were rounded."""

_RUNNING = """
SELECT COALESCE(group_id, -id) AS together, MAX(created_at) AS begun, COUNT(*) AS n,
  COALESCE((SELECT size FROM groups WHERE groups.id = group_id), 1) AS size,
  SUM(EXISTS (SELECT 1 FROM feedback WHERE feedback.session_id = sessions.id AND final = 1)) AS done
FROM sessions WHERE episode = 1 GROUP BY 1
"""
"""Groups, and as groups of their own the episodes of none, without a look at their turns."""
_SESSIONS = f"""
SELECT id, group_id, ({OUTCOME}) AS outcome,
  EXISTS (SELECT 1 FROM turns WHERE turns.session_id = sessions.id AND kind = 'main'
    AND settled = 0 AND {JUDGEABLE}) AS judging,
  MAX(created_at, COALESCE((SELECT created_at FROM turns WHERE turns.session_id = sessions.id
      ORDER BY turns.id DESC LIMIT 1), 0),
    COALESCE((SELECT MAX(created_at) FROM feedback WHERE feedback.session_id = sessions.id
      AND final = 1), 0)) AS heard
FROM sessions WHERE episode = 1 AND (group_id = ?1 OR id = -?1) ORDER BY id
"""
_OF = "turn_id IN (SELECT id FROM turns WHERE session_id = ?)"


@dataclass(frozen=True, slots=True)
class Released:
    """What became of episodes at a look."""

    queued: int
    """Samples."""
    expired: int
    look_at: float | None
    """When the next time limit may end, seconds since 1970; None: nothing waits for one."""


class GroupTable:
    """Sessions that are episodes, and what is held of them."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def release(self, now: float, most: int) -> Released:
        """Queue what is whole, with all that the client has announced, and all that have come; end
        what has waited for too long.

        Args:
            now: seconds since 1970.
            most: samples that a step may take; a group with more never fits into one.
        """
        queued, expired, limits = 0, 0, list[float]()
        for group in self._db.rows(_RUNNING):
            whole = group["done"] == group["n"] >= group["size"]
            limit = group["begun"] + LIMIT_S
            if not whole and now < limit:
                limits.append(limit)
                continue
            sessions = self._db.rows(_SESSIONS, group["together"])
            limit = max(session["heard"] for session in sessions) + LIMIT_S
            judging = any(session["judging"] for session in sessions)
            if not judging and (whole or now >= limit):
                some, others = self._end(sessions, most)
                queued, expired = queued + some, expired + others
            elif now < limit:
                limits.append(limit)
        return Released(queued, expired, min(limits, default=None))

    def _end(self, sessions: Sequence[sqlite3.Row], most: int) -> tuple[int, int]:
        """A group, or an episode of none, is over; how many samples are queued and expired."""
        group = sessions[0]["group_id"]
        ids = [session["id"] for session in sessions]
        queued = expired = 0
        with self._db.transaction() as tx:
            for session in sessions:
                if session["outcome"] is None:
                    expired += _expire(tx, session["id"], NO_OUTCOME)
                    _refuse(tx, session["id"], NO_OUTCOME)
                    continue
                queued += tx.execute(
                    "UPDATE samples SET state = 'queued', reward = ? + COALESCE(reward, 0) "
                    f"WHERE state = 'held' AND {_OF}",
                    (session["outcome"], session["id"]),
                ).rowcount
                _refuse(tx, session["id"], PASSED)
            if group is not None:
                gone = _expire_agreed(tx, group)
                if queued - gone > most:
                    gone += sum(_expire(tx, session, TOO_LARGE) for session in ids)
                queued, expired = queued - gone, expired + gone
            _close(tx, ids, group)
        return queued, expired


def expire_mates(tx: sqlite3.Connection) -> int:
    """Expire what is left of groups of which a sample has grown too old; how many."""
    broken = tx.execute(
        "SELECT DISTINCT group_id FROM samples CROSS JOIN turns ON turns.id = turn_id "
        "JOIN sessions ON sessions.id = session_id WHERE EXISTS (SELECT 1 FROM groups) "
        "AND state IN ('queued', 'held') AND group_id IS NOT NULL "
        "AND EXISTS (SELECT 1 FROM sessions AS mate "
        "CROSS JOIN turns AS old ON old.session_id = mate.id "
        "CROSS JOIN samples AS gone ON gone.turn_id = old.id "
        "WHERE mate.group_id = sessions.group_id AND gone.state = 'expired' "
        "AND gone.expired_because IS NULL)"
    ).fetchall()
    expired = 0
    for (group,) in broken:
        found = tx.execute("SELECT id FROM sessions WHERE group_id = ?", (group,)).fetchall()
        for (session,) in found:
            expired += _expire(tx, session, MATE_TOO_OLD)
            _refuse(tx, session, MATE_TOO_OLD)
        _close(tx, [session for (session,) in found], group)
    return expired


def _expire_agreed(tx: sqlite3.Connection, group: int) -> int:
    """Where all rewards of a step agree none is better than the others: only a teacher teaches."""
    return tx.execute(
        "UPDATE samples SET state = 'expired', expired_because = ? WHERE state = 'queued' "
        "AND teacher_logprobs IS NULL AND turn_id IN (WITH queued AS ("
        f"SELECT turn_id, reward, {STEP} AS step FROM sessions "
        "JOIN turns ON session_id = sessions.id JOIN samples ON turn_id = turns.id "
        "WHERE group_id = ? AND state = 'queued') "
        "SELECT turn_id FROM queued WHERE step IN (SELECT step FROM queued "
        "GROUP BY step HAVING COUNT(*) > 1 AND MAX(reward) - MIN(reward) < ?))",
        (AGREED, group, _SAME),
    ).rowcount


def _expire(tx: sqlite3.Connection, session: int, why: str) -> int:
    return tx.execute(
        "UPDATE samples SET state = 'expired', expired_because = ? "
        f"WHERE state IN ('queued', 'held') AND {_OF}",
        (why, session),
    ).rowcount


def _refuse(tx: sqlite3.Connection, session: int, why: str) -> None:
    """Turns that are neither samples nor refused will not be."""
    tx.execute(
        "UPDATE turns SET settled = 1, untrained_because = ? "
        "WHERE session_id = ? AND kind = 'main' AND settled = 0",
        (why, session),
    )


def _close(tx: sqlite3.Connection, sessions: Iterable[int], group: int | None) -> None:
    tx.executemany("UPDATE sessions SET episode = 2 WHERE id = ?", [(id,) for id in sessions])
    if group is not None:
        tx.execute("UPDATE groups SET over = 1 WHERE id = ?", (group,))
