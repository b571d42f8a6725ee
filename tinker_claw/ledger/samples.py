"""The queue of samples that are ready to train.

Rule: a sample leaves the queue only inside the transaction that commits its step, or by expiring,
or with a turn that is forgotten. A crash in between puts nothing at risk: it is still queued.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass

from tinker_claw.ledger.codec import (
    load,
    pack_float_rows,
    pack_floats,
    unpack_float_rows,
    unpack_floats,
)
from tinker_claw.ledger.database import Database
from tinker_claw.ledger.turns import completion_of
from tinker_claw.ledger.versions import expire_left_behind, read_line
from tinker_claw.types import HintScores, Sample, Vote

TEACHES_NOTHING = "what its teacher would be told teaches nothing, as far as is known"
"""Stands as the reason why a sample is not taught, or its turn not trained."""


@dataclass(frozen=True, slots=True)
class Queued:
    """The queue in figures."""

    samples: int
    reward_mean: float | None
    """None: no sample has a reward."""
    hints: int
    """Samples with a hint."""


class SampleTable:
    """Samples, from the moment they are scored until they are trained or expire."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(
        self,
        turn_id: int,
        reward: Vote | None,
        teacher: HintScores | None,
        untaught: str | None = None,
    ) -> int:
        """Queue a sample. `untaught`: why it has no teacher, though there was something to tell."""
        with self._db.transaction() as tx:
            tx.execute("UPDATE turns SET settled = 1 WHERE id = ?", (turn_id,))
            cursor = tx.execute(
                "INSERT INTO samples (turn_id, reward, hint, untaught, weight, teacher_logprobs, "
                "teacher_targets, overlap, state, created_at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'queued', ?)",
                (
                    turn_id,
                    reward,
                    teacher.hint if teacher else None,
                    untaught,
                    teacher.weight if teacher else None,
                    pack_floats(teacher.logprobs) if teacher else None,
                    pack_float_rows(teacher.targets) if teacher else None,
                    teacher.overlap if teacher else None,
                    time.time(),
                ),
            )
        return int(cursor.lastrowid or 0)

    def weigh(self, user: str, weight: float, *, rewards_count: bool) -> None:
        """What is known by now of how well a user's teacher teaches counts for what is queued, too,
        unless a step has it in hand. What then carries no signal is no sample any more.
        """
        with self._db.transaction() as tx:
            found = tx.execute(
                "SELECT samples.id, turn_id, reward FROM samples "
                "JOIN turns ON turns.id = turn_id JOIN sessions ON sessions.id = session_id "
                "WHERE state = 'queued' AND user = ? AND teacher_logprobs IS NOT NULL "
                "AND samples.id NOT IN (SELECT sample_id FROM step_samples JOIN steps "
                "ON steps.id = step_samples.step_id WHERE status = 'intent')",
                (user,),
            ).fetchall()
            for row in found:
                if weight or (rewards_count and row["reward"] is not None):
                    tx.execute("UPDATE samples SET weight = ? WHERE id = ?", (weight, row["id"]))
                    continue
                tx.execute("DELETE FROM step_samples WHERE sample_id = ?", (row["id"],))
                tx.execute("DELETE FROM samples WHERE id = ?", (row["id"],))
                tx.execute(
                    "UPDATE turns SET untrained_because = ? WHERE id = ?",
                    (TEACHES_NOTHING, row["turn_id"]),
                )

    def waiting(self) -> int:
        """How many samples are queued."""
        return self._db.one("SELECT COUNT(*) FROM samples WHERE state = 'queued'")

    def summary(self) -> Queued:
        """What is queued, in figures."""
        row = self._db.row(
            "SELECT COUNT(*) AS samples, AVG(reward) AS reward_mean, COUNT(hint) AS hints "
            "FROM samples WHERE state = 'queued'"
        )
        return Queued(**dict(row or {}))

    def expire(self, current_step: int, max_staleness: int) -> int:
        """Take samples out that are more than `max_staleness` optimizer steps old; how many.

        Steps count along the live line of versions: what a version sampled that a rollback has left
        behind is too old at once.
        """
        with self._db.transaction() as tx:
            cursor = tx.execute(
                "UPDATE samples SET state = 'expired' WHERE state = 'queued' AND turn_id IN "
                "(SELECT turns.id FROM turns JOIN versions ON versions.id = turns.policy_version "
                "WHERE ? - versions.step > ? OR turns.blanked = 'forgotten')",
                (current_step, max_staleness),
            )
            return cursor.rowcount + expire_left_behind(tx, read_line(self._db))

    def oldest(self, count: int) -> list[Sample]:
        """The `count` oldest queued samples, fewer if there are fewer. They stay queued."""
        rows = self._db.rows(
            "SELECT samples.id AS sample_id, samples.reward, samples.hint, "
            "samples.teacher_logprobs, samples.teacher_targets, samples.overlap, samples.weight, "
            "versions.step AS policy_step, turns.* FROM samples "
            "JOIN turns ON turns.id = samples.turn_id "
            "JOIN versions ON versions.id = turns.policy_version "
            "WHERE samples.state = 'queued' ORDER BY samples.id LIMIT ?",
            count,
        )
        return [_sample(row, load(self._db, row)) for row in rows]

    def quarantine(self, sample_id: int) -> None:
        """Never train this sample: steps with it fail."""
        with self._db.transaction() as tx:
            tx.execute("UPDATE samples SET state = 'quarantined' WHERE id = ?", (sample_id,))

    def counts(self) -> dict[str, int]:
        """How many samples are in each state."""
        counts: dict[str, int] = dict.fromkeys(("queued", "trained", "expired", "quarantined"), 0)
        for row in self._db.rows("SELECT state, COUNT(*) AS n FROM samples GROUP BY state"):
            counts[row["state"]] = row["n"]
        return counts


def _sample(row: sqlite3.Row, prompt: tuple[int, ...]) -> Sample:
    return Sample(
        id=row["sample_id"],
        turn_id=row["id"],
        session_id=row["session_id"],
        policy_version=row["policy_version"],
        policy_step=row["policy_step"],
        prompt=prompt,
        completion=completion_of(row),
        reward=row["reward"],
        teacher=teacher_of(row),
    )


def teacher_of(row: sqlite3.Row) -> HintScores | None:
    """What the teacher said, from the columns of a sample and `topk` of its turn."""
    if row["teacher_logprobs"] is None:  # there was no hint, or it was dropped for its age
        return None
    return HintScores(
        hint=row["hint"],
        logprobs=unpack_floats(row["teacher_logprobs"]),
        targets=unpack_float_rows(row["teacher_targets"], row["topk"]),
        overlap=row["overlap"],
        weight=row["weight"],
    )
