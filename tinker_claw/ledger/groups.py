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
from tinker_claw.ledger.turns import JUDGEABLE, OUTCOME, STEP
from tinker_claw.why import Because, Why

LIMIT_S = 3600.0
"""Seconds after the last activity in any session of a group until it ends: few steps of an agent
take longer, and its samples grow old while others learn."""
NO_OUTCOME = Why.NO_OUTCOME.says()
AGREED = Why.AGREED.says()
TOO_LARGE = Why.TOO_LARGE.says()
MATE_TOO_OLD = Why.MATE_TOO_OLD.says()
PASSED = Why.LATER.says()
"""Reason why samples or turns of an episode are not trained."""
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
    """Result of `release`: numbers of samples queued and expired."""

    queued: int
    """Number of samples queued."""
    expired: int
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
                some, others = self._end(sessions, now, most)
                queued, expired = queued + some, expired + others
            elif now < limit:
                limits.append(limit)
        return Released(queued, expired, min(limits, default=None))

    def _end(self, sessions: Sequence[sqlite3.Row], now: float, most: int) -> tuple[int, int]:
        """End a group, or a single episode; return the number of samples queued and expired."""
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
                    "UPDATE samples SET state = 'queued', created_at = ?, "
                    f"reward = ? + COALESCE(reward, 0) WHERE state = 'held' AND {_OF}",
                    (now, session["outcome"], session["id"]),
                ).rowcount
                _refuse(tx, session["id"], PASSED)
            if group is not None:
                withdrawn = _expire_agreed(tx, group)
                if queued - withdrawn > most:
                    withdrawn += sum(_expire(tx, session, TOO_LARGE) for session in ids)
                queued, expired = queued - withdrawn, expired + withdrawn
            _close(tx, ids, group)
        return queued, expired


def expire_mates(tx: sqlite3.Connection) -> int:
    """Expire the rest of groups that lost a sample to age or a rollback; return how many."""
    broken = tx.execute(
        # Materialized, as SQLite would else look at all mates for each of their samples.
        "WITH waiting (id) AS MATERIALIZED (SELECT DISTINCT group_id FROM samples "
        "CROSS JOIN turns ON turns.id = turn_id JOIN sessions ON sessions.id = session_id "
        "WHERE EXISTS (SELECT 1 FROM groups) AND state IN ('queued', 'held') "
        "AND group_id IS NOT NULL) "
        "SELECT id FROM waiting WHERE EXISTS (SELECT 1 FROM sessions AS mate "
        "CROSS JOIN turns AS old ON old.session_id = mate.id "
        "CROSS JOIN samples AS gone ON gone.turn_id = old.id "
        "WHERE mate.group_id = waiting.id AND gone.state = 'expired' "
        "AND COALESCE(gone.expired_why, ?1) = ?1)",
        (Why.LEFT_BEHIND,),
    ).fetchall()
    expired = 0
    for (group,) in broken:
        mates = tx.execute("SELECT id FROM sessions WHERE group_id = ?", (group,))
        sessions = [session for (session,) in mates]
        for session in sessions:
            expired += _expire(tx, session, MATE_TOO_OLD)
            _refuse(tx, session, MATE_TOO_OLD)
        _close(tx, sessions, group)
    return expired


def _expire_agreed(tx: sqlite3.Connection, group: int) -> int:
    """Expire samples at steps whose rewards all agree, so have no advantage; taught ones stay."""
    return tx.execute(
        "UPDATE samples SET state = 'expired', expired_because = ?, expired_why = ? "
        "WHERE state = 'queued' "
        "AND teacher_logprobs IS NULL AND turn_id IN (WITH queued AS ("
        f"SELECT turn_id, reward, {STEP} AS step FROM sessions "
        "JOIN turns ON session_id = sessions.id JOIN samples ON turn_id = turns.id "
        "WHERE group_id = ? AND state = 'queued') "
        "SELECT turn_id FROM queued WHERE step IN (SELECT step FROM queued "
        "GROUP BY step HAVING COUNT(*) > 1 AND MAX(reward) - MIN(reward) < ?))",
        (AGREED, AGREED.why, group, _SAME),
    ).rowcount


def _expire(tx: sqlite3.Connection, session: int, because: Because) -> int:
    return tx.execute(
        "UPDATE samples SET state = 'expired', expired_because = ?, expired_why = ? "
        f"WHERE state IN ('queued', 'held') AND {_OF}",
        (because, because.why, session),
    ).rowcount


def _refuse(tx: sqlite3.Connection, session: int, because: Because) -> None:
    """Refuse the session's open turns, which will never be samples."""
    tx.execute(
        "UPDATE turns SET settled = 1, untrained_because = ?, why = ? "
        "WHERE session_id = ? AND kind = 'main' AND settled = 0",
        (because, because.why, session),
    )


def _close(tx: sqlite3.Connection, sessions: Iterable[int], group: int | None) -> None:
    tx.executemany("UPDATE sessions SET episode = 2 WHERE id = ?", [(id,) for id in sessions])
    if group is not None:
        tx.execute("UPDATE groups SET over = 1 WHERE id = ?", (group,))
