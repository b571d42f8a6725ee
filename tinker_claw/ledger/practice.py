"""Queries for practice: lessons that are due, past first messages of their owner, and the owner's
verdicts since.

Rule: a lesson is learned by its owner's verdicts, never by figures of a model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tinker_claw.evidence import Rate
from tinker_claw.ledger.database import LedgerTable
from tinker_claw.ledger.firsts import ACCEPTED, FIRSTS
from tinker_claw.ledger.lessons import VERDICTS, Lesson, State, lesson_of, tell_again
from tinker_claw.ledger.steps import Void
from tinker_claw.ledger.versions import go_on_from
from tinker_claw.turn_state import Reason
from tinker_claw.types import PolicyVersion

TWICE = 2
"""Told replies that the owner must have accepted since they said the lesson, or since it was told
again, before it is practised; of the newest, more than half. A real model that is told a wish
follows it in three of four replies at most (docs/proof.md), and only those that follow are trained.
"""
_DUE = f"""
SELECT * FROM lessons WHERE state = 'told'
  AND (SELECT SUM(good AND at >= changed_at) >= {TWICE} AND 2 * SUM(good) > COUNT(*)
    FROM {VERDICTS})
ORDER BY created_at DESC, id DESC
"""
_WHEN_TOLD = f"""
SELECT (SELECT TOTAL(good) FROM {VERDICTS}), (SELECT COUNT(*) FROM {VERDICTS})
FROM lessons WHERE id = ?
"""
_ASKED = f"""
SELECT turns.id FROM sessions CROSS JOIN turns ON session_id = sessions.id
  AND turns.kind = 'main' AND idx = 0
WHERE user = ? AND private = 0 AND secret = 0 AND episode = 0 AND asked_by = 'owner'
  AND hint_at IS NOT NULL AND (state NOT IN ('refused', 'forgotten') OR reason = '{Reason.SAMPLING}'
    OR EXISTS (SELECT 1 FROM verdicts WHERE turn_id = turns.id))  -- its prompt was fit to train
  AND NOT EXISTS (SELECT 1 FROM turn_images WHERE turn_images.turn_id = turns.id)
ORDER BY sessions.id DESC
"""
_JUDGED = f"""
SELECT {ACCEPTED} FROM {FIRSTS}
WHERE sessions.user = ?1 AND sessions.created_at >= ?2 AND policy_version >= ?3
  AND NOT EXISTS (SELECT 1 FROM json_each(sessions.lessons) AS one WHERE one.value = ?4)
ORDER BY sessions.id LIMIT ?5
"""
_ENDED = f"lesson = ?1 AND (status = 'committed' OR void IN ({Void.FAILED:d}, {Void.UNLEARNED:d}))"
"""SQL of the steps that practised a lesson to an end."""


@dataclass(frozen=True, slots=True)
class ProvisionalLesson:
    """A provisional lesson, with the versions before and after its practice."""

    lesson: Lesson
    before: int
    after: int
    accepted: tuple[bool, ...]
    """Whether untold first turns since then were accepted, oldest first."""
    when_told: Rate
    """Accepted ones of the newest first turns that were told it."""


class PracticeTable(LedgerTable):
    """Lessons that are due for practice, and those that their owner is yet to confirm."""

    def due(self) -> list[Lesson]:
        """Return the lessons whose told replies were accepted, newest first."""
        return [lesson_of(row) for row in self._db.rows(_DUE)]

    def first_turns(self, user: str) -> list[int]:
        """Return the turns of a user's past first messages, newest first; none is private or has an
        image."""
        return self._db.column(_ASKED, user)

    def runs(self, lesson: Lesson, *, since: float) -> tuple[int, int]:
        """Return how often a lesson was practised to an end, good or bad, since a time in seconds
        since 1970; and the newest turn on which any such run rested, 0 where there was none."""
        ((count, newest),) = self._db.rows(
            "SELECT COUNT(DISTINCT steps.id) FILTER (WHERE steps.created_at >= ?2), "
            "COALESCE(MAX(turn_id) FILTER (WHERE purpose IN ('practised', 'checked')), 0) "
            f"FROM steps LEFT JOIN step_prompts ON step_id = steps.id WHERE {_ENDED}",
            lesson.id,
            since,
        )
        return count, newest

    def is_practised(self, state_ref: str) -> bool:
        """Return whether a state is that of a version that a practice made."""
        return self._db.one(
            "SELECT EXISTS (SELECT 1 FROM versions JOIN steps ON steps.version = versions.id "
            "WHERE state_ref = ? AND status = 'committed' AND lesson IS NOT NULL)",
            state_ref,
        )

    def provisional(self, most: int) -> list[ProvisionalLesson]:
        """Return the provisional lessons. `most`: first turns since their practice, at most."""
        practised = list[ProvisionalLesson]()
        for row in self._db.rows("SELECT * FROM lessons WHERE state = 'provisional'"):
            lesson = lesson_of(row)
            ((before, after),) = self._db.rows(
                "SELECT parent, version FROM steps WHERE lesson = ? AND status = 'committed' "
                "ORDER BY id DESC LIMIT 1",
                lesson.id,
            )
            since = lesson.user, lesson.changed_at, after, lesson.id, most
            accepted = map(bool, self._db.column(_JUDGED, *since))
            ((good, of),) = self._db.rows(_WHEN_TOLD, lesson.id)
            practised.append(
                ProvisionalLesson(lesson, before, after, tuple(accepted), Rate(good, of))
            )
        return practised

    def confirm(self, lesson: Lesson) -> None:
        """Take a provisional lesson for learned."""
        self._db.write(
            "UPDATE lessons SET state = ?, changed_at = ? WHERE id = ? AND state = ?",
            State.LEARNED,
            time.time(),
            lesson.id,
            State.PROVISIONAL,
        )

    def unlearn(self, lesson: int, back_to: PolicyVersion | None) -> None:
        """Tell a practised lesson again; go on from the version before its practice, unless that
        is None. A pin stays."""
        with self._db.transaction() as tx:
            (newest,) = tx.execute("SELECT MAX(id) FROM versions").fetchone()
            tell_again(tx, newest, lesson)
            if back_to is not None:
                go_on_from(tx, back_to)
