"""Episodes, and the groups in which they are compared: when their samples are queued or expire.

Rule: an episode's samples are held until all of its group have their outcome, and are then queued
in one transaction, with the outcome added to each reward. Neither a crash nor age leaves a part of
a group in the queue. A group that is never complete ends by a time limit: its episodes with an
outcome are queued as a smaller group, the others expire. A missing outcome never counts as 0.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tinker_claw.ledger.database import LedgerTable
from tinker_claw.ledger.turns import EPISODE_STEP, OPEN, OUTCOME, refuse, set_state
from tinker_claw.turn_state import Reason, TurnRefusal, TurnState

LIMIT_S = 3600.0
"""Seconds after the last activity in any session of a group until it ends: few steps of an agent
take longer, and its samples grow old while others learn."""
COMPARED = """
CASE WHEN EXISTS (SELECT 1 FROM sessions AS mate JOIN feedback ON feedback.session_id = mate.id
  WHERE mate.group_id = sessions.group_id AND mate.id <> sessions.id
    AND final = 1 AND unused IS NULL) THEN group_id END
"""
"""SQL on a row of `sessions`: the group in which its steps are compared with others; NULL where
there is none, or no other session in it has an outcome."""
_SAME = 1e-6
"""Rewards closer than this are equal, up to rounding."""

_RUNNING = """
SELECT COALESCE(group_id, -id) AS together, MAX(created_at) AS begun, COUNT(*) AS n,
  COALESCE((SELECT size FROM groups WHERE groups.id = group_id), 1) AS size,
  SUM(EXISTS (SELECT 1 FROM feedback WHERE feedback.session_id = sessions.id AND final = 1)) AS done
FROM sessions WHERE episode = 1 GROUP BY 1
"""
"""SQL of the running groups, with single episodes as groups of their own, without reading turns."""
_SESSIONS = f"""
SELECT id, group_id, ({OUTCOME}) AS outcome,
  EXISTS (SELECT 1 FROM turns WHERE turns.session_id = sessions.id AND kind = 'main'
    AND state = 'judging') AS judging,
  MAX(created_at, COALESCE((SELECT created_at FROM turns WHERE turns.session_id = sessions.id
      ORDER BY turns.id DESC LIMIT 1), 0),
    COALESCE((SELECT MAX(created_at) FROM feedback WHERE feedback.session_id = sessions.id
      AND final = 1), 0)) AS heard
FROM sessions WHERE episode = 1 AND (group_id = ?1 OR id = -?1) ORDER BY id
"""
_SAMPLED = "state IN ('queued', 'held')"


@dataclass(frozen=True, slots=True)
class Released:
    """Result of `release`."""

    expired: int
    """Number of samples expired."""
    look_at: float | None
    """Earliest time limit, in seconds since 1970; None: no group waits."""


class GroupTable(LedgerTable):
    """Table of episodes and their held samples."""

    def release(self, now: float, most: int) -> Released:
        """Queue complete groups, whose announced sessions have all come and ended, and end those
        past their time limit.

        Args:
            now: seconds since 1970.
            most: samples that a step may take; a larger group never fits into one.
        """
        expired, limits = 0, list[float]()
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
                expired += self._end(sessions, now, most)
            elif now < limit:
                limits.append(limit)
        return Released(expired, min(limits, default=None))

    def _end(self, sessions: Sequence[sqlite3.Row], now: float, most: int) -> int:
        """End a group, or a single episode; return the number of samples expired."""
        group = sessions[0]["group_id"]
        ids = [session["id"] for session in sessions]
        queued = expired = 0
        with self._db.transaction() as tx:
            for session in sessions:
                if session["outcome"] is None:
                    expired += _expire(tx, session["id"], Reason.NO_OUTCOME)
                    continue
                held = "session_id = ? AND state = 'held'"
                tx.execute(
                    "UPDATE samples SET created_at = ?, reward = ? + COALESCE(reward, 0) "
                    f"WHERE turn_id IN (SELECT id FROM turns WHERE {held})",
                    (now, session["outcome"], session["id"]),
                )
                queued += set_state(tx, TurnState.QUEUED, held, session["id"])
                _refuse(tx, session["id"], OPEN, Reason.NOT_CONTINUED)
            if group is not None:
                agreed = _expire_agreed(tx, group)
                expired += agreed
                if queued - agreed > most:
                    expired += sum(_refuse(tx, id, _SAMPLED, Reason.LARGE_GROUP) for id in ids)
            _close(tx, ids, group)
        return expired


def expire_mates(tx: sqlite3.Connection) -> int:
    """Expire the rest of groups that lost a sample to age or a rollback; return how many."""
    broken = tx.execute(
        # Materialized, as SQLite would else look at all mates for each of their samples.
        "WITH waiting (id) AS MATERIALIZED (SELECT DISTINCT group_id FROM turns "
        "CROSS JOIN sessions ON sessions.id = session_id "
        f"WHERE EXISTS (SELECT 1 FROM groups) AND {_SAMPLED} AND group_id IS NOT NULL) "
        "SELECT id FROM waiting WHERE EXISTS (SELECT 1 FROM sessions AS mate "
        "CROSS JOIN turns AS old ON old.session_id = mate.id "
        "WHERE mate.group_id = waiting.id AND old.reason IN (?, ?))",
        (Reason.TOO_OLD, Reason.LEFT_BEHIND),
    ).fetchall()
    expired = 0
    for (group,) in broken:
        mates = tx.execute("SELECT id FROM sessions WHERE group_id = ?", (group,))
        sessions = [session for (session,) in mates]
        for session in sessions:
            expired += _expire(tx, session, Reason.BROKEN_GROUP)
        _close(tx, sessions, group)
    return expired


def _expire_agreed(tx: sqlite3.Connection, group: int) -> int:
    """Expire samples at steps whose rewards all agree, so have no advantage; taught ones stay."""
    agreed = (
        f"WITH queued AS (SELECT turn_id, reward, teacher_logprobs, {EPISODE_STEP} AS step "
        "FROM sessions JOIN turns ON session_id = sessions.id JOIN samples ON turn_id = turns.id "
        "WHERE group_id = ? AND state = 'queued') "
        "SELECT turn_id FROM queued WHERE teacher_logprobs IS NULL AND step IN "
        "(SELECT step FROM queued GROUP BY step HAVING COUNT(*) > 1 "
        "AND MAX(reward) - MIN(reward) < ?)"
    )
    return refuse(tx, TurnRefusal(Reason.EQUAL_REWARDS), f"id IN ({agreed})", group, _SAME)


def _expire(tx: sqlite3.Connection, session: int, reason: Reason) -> int:
    """Refuse all of a session that is not trained yet; return how many samples."""
    _refuse(tx, session, OPEN, reason)
    return _refuse(tx, session, _SAMPLED, reason)


def _refuse(tx: sqlite3.Connection, session: int, which: str, reason: Reason) -> int:
    turns = f"session_id = ? AND kind = 'main' AND {which}"
    return refuse(tx, TurnRefusal(reason), turns, session)


def _close(tx: sqlite3.Connection, sessions: Iterable[int], group: int | None) -> None:
    tx.executemany("UPDATE sessions SET episode = 2 WHERE id = ?", [(id,) for id in sessions])
    if group is not None:
        tx.execute("UPDATE groups SET over = 1 WHERE id = ?", (group,))
