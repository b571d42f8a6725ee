"""The queue of samples that are ready to train.

Rule: a sample is trained only inside the transaction that commits its step; after a crash before
that it is still queued. It also leaves the queue by expiring, where its batch is set aside, its
reply rated anew or its turn forgotten. Samples of an episode enter it when their group is complete
(`groups`).
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tinker_claw.ledger.codec import (
    flat,
    load_prompt,
    pack_floats,
    pack_ids,
    rows_of,
    unpack_floats,
    unpack_ids,
)
from tinker_claw.ledger.database import LedgerTable, Rows, insert
from tinker_claw.ledger.groups import COMPARED, expire_mates
from tinker_claw.ledger.images import images_of
from tinker_claw.ledger.turns import (
    EPISODE_STEP,
    check_kept,
    completion_of,
    refuse,
    set_state,
    told_of,
)
from tinker_claw.ledger.versions import expire_left_behind
from tinker_claw.turn_state import Reason, TurnRefusal, TurnState
from tinker_claw.types import HintScores, JudgedBy, Lacks, Sample


@dataclass(frozen=True, slots=True)
class QueuedSample:
    """A queued sample, reduced to the facts that decide its place in a batch."""

    id: int
    session: int
    user: str
    judge: JudgedBy
    reward: float | None
    lacks: Lacks | None
    """What it needs beside it to teach anything; None: nothing."""
    group: int | None
    queued_at: float
    """When it was queued, in seconds since 1970."""


NO_GRADIENT = TurnRefusal(Reason.NOTHING_BETTER)
"""Why samples of such a batch are not trained."""
STEPS_FAILED = TurnRefusal(Reason.STEPS_FAILED)
JUDGED_BY = """
CASE WHEN episode <> 0 THEN 'outcome' WHEN COALESCE(role, '') IN ('tool', 'other')
  AND NOT EXISTS (SELECT 1 FROM verdicts WHERE verdicts.turn_id = turns.id
    AND score IS NOT NULL) THEN 'tools' ELSE 'user' END
"""
"""SQL on a turn with its next state: who judged it. Explicit feedback is a user's."""
MOST_BARE = 64
"""Newest rejections that wait for a better reply."""
MOST_PLAIN = 256
"""Newest plain acceptances that wait for a rejection, a hint or an explicit rating."""
_QUEUED = """
FROM turns CROSS JOIN samples ON samples.turn_id = turns.id
  JOIN sessions ON sessions.id = turns.session_id
  JOIN versions ON versions.id = turns.policy_version
  LEFT JOIN next_states ON next_states.turn_id = turns.id
WHERE state = 'queued' AND (?1 IS NULL OR samples.id IN (SELECT value FROM json_each(?1)))
ORDER BY samples.id
"""


class SampleTable(LedgerTable):
    """Table of samples, from scoring until they are trained or expire."""

    def add(
        self,
        turn_id: int,
        reward: float | None,
        teacher: HintScores | None,
        untaught: TurnRefusal | None = None,
        lacks: Lacks | None = None,
    ) -> int:
        """Queue a turn as a sample, or hold it while its episode runs. A turn of an ended episode
        comes too late.

        Args:
            reward: for an episode's turn the mean of its votes, without the outcome.
            untaught: why it has no teacher's scores, though there was a text to tell.
            lacks: what it needs beside it to teach anything; None: nothing.
        """
        scores = dict[str, object]()
        if teacher is not None:
            scores = {
                "hint": teacher.hint,
                "teacher_logprobs": pack_floats(teacher.logprobs),
                "teacher_targets": pack_floats(flat(teacher.targets)),
                "teacher_ids": pack_ids(flat(teacher.topk_ids)),
                "teacher_own": pack_floats(flat(teacher.topk_logprobs)),
                "teacher_reply": pack_ids(teacher.reply),
                "teacher_text": teacher.text,
                "overlap": teacher.overlap,
            }
        with self._db.transaction() as tx:
            check_kept(tx, turn_id)
            row = tx.execute(
                "SELECT episode FROM turns JOIN sessions ON sessions.id = session_id "
                "WHERE turns.id = ?",
                (turn_id,),
            ).fetchone()
            if row["episode"] == 2:
                refuse(tx, TurnRefusal(Reason.EPISODE_OVER), "id = ?", turn_id)
            else:
                state = TurnState.HELD if row["episode"] else TurnState.QUEUED
                beside = lacks and f"with {lacks} beside it"
                set_state(tx, state, "id = ?", turn_id, detail=beside)
            values = {
                "turn_id": turn_id,
                "reward": reward,
                "untaught": untaught and str(untaught),
                "lacks": lacks,
                **scores,
                "created_at": time.time(),
            }
            return insert(tx, "samples", values)

    def queued(self) -> int:
        """Return the number of queued samples."""
        return self._db.one("SELECT COUNT(*) FROM turns WHERE state = 'queued'")

    def expire(self, current_step: int, max_staleness: int) -> int:
        """Expire samples that are more than `max_staleness` optimizer steps old, bare rejections
        but the newest 64, and plain acceptances but the newest 256: they are refused, with the
        reason. Return how many.

        Steps count along the live line of versions: samples of a version that a rollback left
        behind are too old at once. A group expires as one.
        """
        with self._db.transaction() as tx:
            too_old = refuse(
                tx,
                TurnRefusal(Reason.TOO_OLD),
                "state IN ('queued', 'held') AND "
                "(SELECT ? - step FROM versions WHERE versions.id = policy_version) > ?",
                current_step,
                max_staleness,
            )
            older = (
                "id IN (SELECT turn_id FROM samples JOIN turns ON turns.id = turn_id "
                "WHERE state = 'queued' AND lacks = ? ORDER BY samples.id DESC LIMIT -1 OFFSET ?)"
            )
            left_behind = expire_left_behind(tx)
            bare = refuse(tx, NO_GRADIENT, older, Lacks.BETTER, MOST_BARE)
            plain = refuse(tx, NO_GRADIENT, older, Lacks.REJECTION, MOST_PLAIN)
            return too_old + left_behind + bare + plain + expire_mates(tx)

    def load(self, ids: Iterable[int] | None = None) -> list[Sample]:
        """Return the queued samples among these, or all, oldest first. They stay queued."""
        among = None if ids is None else json.dumps(list(ids))
        rows = self._db.rows(
            "SELECT samples.id AS sample_id, samples.reward, samples.hint, "
            "samples.teacher_logprobs, samples.teacher_targets, samples.teacher_ids, "
            "samples.teacher_own, samples.teacher_reply, samples.teacher_text, samples.overlap, "
            f"versions.step AS policy_step, {COMPARED} AS compared, "
            f"{EPISODE_STEP} AS step, {JUDGED_BY} AS judge, sessions.user, COALESCE((SELECT weight "
            "FROM verdicts WHERE turn_id = turns.id AND episode = 0), 1.0) AS weight, "
            f"turns.* {_QUEUED}",
            among,
        )
        return [_sample(self._db, row) for row in rows]

    def queued_of(self, version: int) -> list[int]:
        """Return the ids of queued samples whose replies this version sampled."""
        return self._db.column(
            "SELECT samples.id FROM turns JOIN samples ON turn_id = turns.id "
            "WHERE state = 'queued' AND policy_version = ?",
            version,
        )

    def still_queued(self, samples: Sequence[Sample]) -> bool:
        """Return whether all of them are still queued: feedback on a reply takes its sample out."""
        return len(samples) == self._db.one(
            "SELECT COUNT(*) FROM samples JOIN turns ON turns.id = turn_id "
            "WHERE state = 'queued' AND samples.id IN (SELECT value FROM json_each(?))",
            json.dumps([sample.id for sample in samples]),
        )

    def refuse(self, sample_ids: Iterable[int], refusal: TurnRefusal) -> None:
        """Take these samples out of the queue, if they are in it."""
        with self._db.transaction() as tx:
            these = (
                "state = 'queued' AND id IN "
                "(SELECT turn_id FROM samples WHERE id IN (SELECT value FROM json_each(?)))"
            )
            refuse(tx, refusal, these, json.dumps([*sample_ids]))


def read_queue(rows: Rows) -> list[QueuedSample]:
    """Return all queued samples, oldest first, without their tokens."""
    sample_rows = rows.rows(
        f"SELECT samples.id, session_id AS session, user, {JUDGED_BY} AS judge, reward, lacks, "
        f'group_id AS "group", samples.created_at AS queued_at {_QUEUED}',
        None,
    )
    return [QueuedSample(**row) for row in sample_rows]


def usable(waiting: Sequence[QueuedSample]) -> list[QueuedSample]:
    """Return the samples that a step may take now. Verdicts are compared with those of the same
    judge: a bare rejection needs a better reply that is none, and a plain acceptance a sample that
    is none."""
    best = defaultdict[JudgedBy, float](lambda: -math.inf)
    for other in waiting:
        if other.group is None and other.lacks != Lacks.BETTER and other.reward is not None:
            best[other.judge] = max(best[other.judge], other.reward)
    able = [
        sample
        for sample in waiting
        if sample.lacks != Lacks.BETTER or (sample.reward or 0.0) < best[sample.judge]
    ]
    judges = {other.judge for other in able if other.lacks != Lacks.REJECTION}
    return [sample for sample in able if sample.judge in judges]


def ready(waiting: Sequence[QueuedSample], batch_size: int) -> int:
    """Return how many queued samples steps could take: what tools have judged is at most half of
    each."""
    judges = Counter(sample.judge for sample in usable(waiting))
    not_by_tools = judges.total() - judges["tools"]
    return not_by_tools + min(judges["tools"], max(batch_size // 2, not_by_tools))


def _sample(rows: Rows, row: sqlite3.Row) -> Sample:
    return Sample(
        id=row["sample_id"],
        turn_id=row["id"],
        session_id=row["session_id"],
        policy_version=row["policy_version"],
        policy_step=row["policy_step"],
        prompt=load_prompt(rows, row),
        completion=completion_of(row),
        reward=row["reward"],
        teacher=_teacher(row),
        bucket=None if row["compared"] is None else (row["compared"], row["step"]),
        judge=row["judge"],
        weight=row["weight"],
        user=row["user"],
        lesson_block=told_of(row),
        images=images_of(rows, row["id"]),
    )


def _teacher(row: sqlite3.Row) -> HintScores | None:
    if row["teacher_logprobs"] is None:  # there was no hint, or it was dropped for its age
        return None
    logprobs, ids = unpack_floats(row["teacher_logprobs"]), unpack_ids(row["teacher_ids"])
    own = len(ids) // len(logprobs)  # --opd-topk may have changed since the reply was sampled
    return HintScores(
        hint=row["hint"],
        logprobs=logprobs,
        targets=rows_of(unpack_floats(row["teacher_targets"]), row["topk"]),
        overlap=row["overlap"],
        topk_ids=rows_of(ids, own),
        topk_logprobs=rows_of(unpack_floats(row["teacher_own"]), own),
        reply=unpack_ids(row["teacher_reply"]),
        text=row["teacher_text"],
    )
