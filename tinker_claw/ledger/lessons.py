"""Lessons: what users said about how they want replies, added to prompts of later sessions.

Rule: the lessons of a session are chosen once, when it starts, and stored; one that has a turn and
none stored is told none. Only lessons that the user ends or edits change at once.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Literal

from tinker_claw.errors import UndoError
from tinker_claw.evidence import CLAIM, Rate, TwoRates
from tinker_claw.ledger.database import LedgerTable, Rows, insert
from tinker_claw.ledger.firsts import ACCEPTED, FIRSTS
from tinker_claw.types import Wish
from tinker_claw.wishes import BLANKS, LONGEST, hidden

UNTOLD = "[[], 0, 0, []]"
"""`turns.told` of a turn whose lessons were forgotten: they are not in its prompt any more."""
MOST = 8
"""Most lessons that a session is told, or a judge shown."""
_MARKS = re.compile(r"[\s.,;:!?…。！？、，；：\"'“”„«»‹›‘’]+")
"""What makes no other sentence of the same words; "C++", "C#" and two emojis do."""

_PRACTISED = """
WITH RECURSIVE line (id) AS (VALUES (?1)
  UNION ALL SELECT parent FROM versions JOIN line USING (id) WHERE parent IS NOT NULL)
SELECT lesson FROM line JOIN steps ON steps.version = line.id
WHERE status = 'committed' AND lesson IS NOT NULL
"""
"""SQL of the lessons that the weights of a version have practised."""
VERDICTS = f"""
(SELECT {ACCEPTED} AS good, sessions.created_at AS at FROM {FIRSTS}
WHERE sessions.user = lessons.user AND sessions.lessons <> '[]'
  AND lessons.id IN (SELECT value FROM json_each(turns.told, '$[0]'))
ORDER BY sessions.id DESC LIMIT 24)
"""
"""SQL of the newest verdicts on a row of `lessons`: of first judged turns that were told it."""
_COMPARED = f"""
SELECT EXISTS (SELECT 1 FROM json_each(turns.told, '$[0]') WHERE value = ?2), {ACCEPTED}
FROM {FIRSTS} WHERE sessions.user = ?1
"""
"""SQL of all first judged turns of a user: whether they were told a lesson, and accepted."""

Rule = Literal["keep", "edit", "drop", "add"]


class State(StrEnum):
    """State of a lesson: it decides whether new sessions are told it."""

    CANDIDATE = "candidate"
    """Not told: the judge takes it for a wish that lasts, and its user has not kept it."""
    TOLD = "told"
    ASIDE = "aside"
    """Not told, since the user has said otherwise (`replaced_by`)."""
    PROVISIONAL = "provisional"
    """Practised and not told; their user's next sessions confirm it."""
    LEARNED = "learned"
    """Not told, since the model does it without."""
    DROPPED = "dropped"
    """Not told, since the user does not want it."""


NOT_TOLD = State.CANDIDATE, State.ASIDE, State.DROPPED
"""States whose lessons are not told, whatever the weights have learned."""
_AGAIN = """
CASE WHEN state NOT IN ('aside', 'learned') THEN state
  WHEN told_in IS NULL THEN 'candidate' ELSE 'told' END
"""
"""SQL of the state of a lesson that counts again: no judge's word alone has it told."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A row of `lessons`; see schema.sql."""

    id: int
    user: str
    text: str
    words: str
    turn_id: int | None
    state: State
    replaced_by: int | None
    told_in: int | None
    created_at: float
    changed_at: float


class LessonTable(LedgerTable):
    """Table of lessons, and of what each session is told."""

    def of_user(self, user: str | None = None) -> list[Lesson]:
        """Return the lessons of a user, or all, newest first."""
        return of_user(self._db, user)

    def text(self, lesson: int) -> str | None:
        """Return the words of a lesson; None: there is no such lesson."""
        return self._db.one("SELECT text FROM lessons WHERE id = ?", lesson)

    def of_session(self, session_id: int) -> list[Lesson] | None:
        """Return the lessons that a session is told; None: that is not decided yet."""
        chosen = self._db.one("SELECT lessons FROM sessions WHERE id = ?", session_id)
        if chosen is None:
            return None
        rows = self._db.rows(
            "SELECT lessons.* FROM json_each(?) JOIN lessons ON lessons.id = value ORDER BY key",
            chosen,
        )
        return [lesson for lesson in map(lesson_of, rows) if lesson.state not in NOT_TOLD]

    def practised(self, version: int) -> set[int]:
        """Return the lessons that the weights of a version have practised."""
        return {*self._db.column(_PRACTISED, version)}

    def for_judge(self, turn_id: int) -> list[Lesson]:
        """Return the newest lessons of a turn's user that the judge is shown."""
        rows = self._db.rows(
            "SELECT * FROM lessons WHERE state NOT IN ('aside', 'dropped') AND user = (SELECT user "
            "FROM turns JOIN sessions ON sessions.id = session_id WHERE turns.id = ?) "
            "ORDER BY created_at DESC, id DESC LIMIT ?",
            turn_id,
            MOST,
        )
        return [lesson_of(row) for row in rows]

    def begin(self, session_id: int, lesson_ids: Iterable[int]) -> list[int]:
        """Store the ids of a session's lessons, unless they are stored; none where it has begun
        already. Return those that were never told before."""
        with self._db.transaction() as tx:
            tx.execute(
                "UPDATE sessions SET lessons = CASE WHEN EXISTS (SELECT 1 FROM turns "
                "WHERE session_id = ?1 AND kind = 'main') THEN '[]' ELSE ?2 END "
                "WHERE id = ?1 AND lessons IS NULL",
                (session_id, json.dumps([*lesson_ids])),
            )
            new = tx.execute(
                "UPDATE lessons SET told_in = ?1 WHERE told_in IS NULL AND id IN (SELECT value "
                "FROM sessions, json_each(sessions.lessons) WHERE sessions.id = ?1) RETURNING id",
                (session_id,),
            )
            return [id for (id,) in new.fetchall()]

    def rule(
        self,
        rule: Rule,
        user: str | None,
        which: int | None,
        text: str = "",
        *,
        turn_id: int | None = None,
    ) -> int:
        """Keep, edit, drop or add a lesson, at once; return its id. One that is there is not added
        again: it is told in the new words, as the newest.

        Args:
            user: whose lesson it must be; None: anybody's.
            which: the lesson's id; None to add one.
            text: the new words.
            turn_id: the reply after which it is added; None: the user wrote it elsewhere.

        Raises:
            UndoError: there is no such lesson, or its words cannot be one.
        """
        writes = rule in ("add", "edit")
        words = BLANKS.sub(" ", text).strip() if writes else ""
        if writes and not words:
            raise UndoError("a lesson needs words")
        if len(words) > LONGEST:
            raise UndoError(
                f"a lesson is a sentence of at most {LONGEST} characters; these are {len(words)}"
            )
        if (odd := hidden(words)) is not None:
            raise UndoError(
                f"this text holds U+{ord(odd):04X}, which nobody sees or which changes its "
                "direction; write it without that character"
            )
        with self._db.transaction() as tx:
            if rule == "add":
                user = user or ""
                if (which := _same(tx, user, words)) is None:
                    return _insert(tx, user, Wish(words, ""), turn_id, State.TOLD)
            if rule == "edit" and (twin := _same(tx, user, words, edited=which)) is not None:
                raise UndoError(
                    f"lesson {twin} says that already; keep it, and drop lesson {which}"
                )
            state = State.DROPPED if rule == "drop" else State.TOLD
            done = tx.execute(
                "UPDATE lessons SET text = CASE ?1 WHEN '' THEN text ELSE ?1 END, state = ?2, "
                "replaced_by = NULL, changed_at = ?3, created_at = IIF(?6, ?3, created_at) "
                "WHERE id = ?4 AND user = COALESCE(?5, user)",
                (words, state, time.time(), which, user, rule == "add"),
            ).rowcount
        if not done or which is None:
            raise UndoError(f"there is no lesson {which}; `tinker-claw lessons` lists them")
        return which


def of_user(rows: Rows, user: str | None) -> list[Lesson]:
    """Return the lessons of a user, or all, newest first."""
    lesson_rows = rows.rows(
        "SELECT * FROM lessons WHERE user = COALESCE(?, user) ORDER BY created_at DESC, id DESC",
        user,
    )
    return [lesson_of(row) for row in lesson_rows]


_RUNS = """
SELECT steps.id, status, parent, version, error,
  (SELECT lessons.id FROM lessons WHERE lessons.id = lesson) AS lesson,
  metrics -> '$.practice' AS figures,
  (SELECT json_group_object(purpose, json(turns)) FROM (SELECT purpose, json_group_array(turn_id)
    AS turns FROM step_prompts WHERE step_id = steps.id GROUP BY purpose)) AS turns
FROM steps WHERE steps.lesson IS NOT NULL AND (steps.lesson = ?1
  OR id IN (SELECT step_id FROM step_prompts WHERE turn_id = ?2)) ORDER BY id
"""


def read_runs(
    rows: Rows, *, lesson: int | None = None, turn: int | None = None
) -> list[dict[str, Any]]:
    """Return the steps that practised a lesson, or rest on a turn, oldest first, with their turns
    by purpose. None: `figures` where none was committed, `lesson` where it was forgotten."""
    runs = map(dict, rows.rows(_RUNS, lesson, turn))
    return [
        run | {name: json.loads(run[name] or "null") for name in ("figures", "turns")}
        for run in runs
    ]


def read_lessons(rows: Rows, user: str | None) -> list[dict[str, Any]]:
    """Return the lessons of a user, newest first, with the steps that practised each as `runs`.

    `vain`: how fewer replies were accepted with it than without; None: that is not shown. `back`:
    the version that answered when it was said, so that none before has learned it; None: the user
    wrote it. `first`: the first turn that was told it; None: none was yet.

    Args:
        user: only theirs; None: everybody's.
    """
    back = rows.pairs(
        "SELECT lessons.id, policy_version FROM lessons JOIN turns ON turns.id = turn_id"
    )
    first = rows.pairs(
        "SELECT lessons.id, MIN(turns.id) FROM lessons JOIN turns ON session_id = told_in "
        "AND turns.kind = 'main' GROUP BY 1"
    )
    return [
        {
            **asdict(lesson),
            "back": back.get(lesson.id),
            "first": first.get(lesson.id),
            "vain": told_in_vain(rows, lesson),
            "runs": read_runs(rows, lesson=lesson.id),
        }
        for lesson in of_user(rows, user)
    ]


def told_in_vain(rows: Rows, lesson: Lesson) -> str | None:
    """Say how fewer replies were accepted with a lesson than without, among the first judged turns
    of its user; None: these do not show that."""
    if lesson.state is not State.TOLD:
        return None
    shares = with_lesson, without_lesson = Rate(), Rate()
    for with_it, accepted in rows.rows(_COMPARED, lesson.user, lesson.id):
        shares[not with_it].add(accepted)
    if (
        with_lesson.value >= without_lesson.value
        or TwoRates(with_lesson, without_lesson).e_value < CLAIM
    ):
        return None
    return (
        f"{with_lesson.good:g} of {with_lesson.of} replies were accepted with it, and "
        f"{without_lesson.good:g} of {without_lesson.of} without"
    )


def learn(
    tx: sqlite3.Connection,
    turn_id: int,
    wish: Wish | None,
    repeats: int | None = None,
    contradicts: int | None = None,
) -> int | None:
    """Store the wish that followed a turn as a candidate; return its id, None: it is none.

    A lesson that was said again is the newest. It is told again if its user had kept it, unless
    they dropped it, or it is provisional: the next verdicts decide about that. One that is
    contradicted is set aside.

    Args:
        repeats: id of the lesson that was said again; else it is the one of the same sentence.
        contradicts: id of the lesson that the wish contradicts.
    """
    if wish is None and repeats is None:
        return None
    owner = tx.execute(
        "SELECT user FROM turns JOIN sessions ON sessions.id = session_id "
        "WHERE turns.id = ? AND private <> 1 AND kind = 'main' AND episode = 0",
        (turn_id,),
    ).fetchone()
    if owner is None:
        return None
    (user,), new = owner, None
    newest = repeats or (wish and _same(tx, user, wish.text))
    if newest is None and wish is not None:
        newest = new = _insert(tx, user, wish, turn_id, State.CANDIDATE)
    else:
        tx.execute(
            "UPDATE lessons SET created_at = ?1, replaced_by = NULL, "
            f"changed_at = IIF(state = 'provisional', changed_at, ?1), state = {_AGAIN} "
            "WHERE id = ?2 AND user = ?3 AND state <> 'dropped'",
            (time.time(), newest, user),
        )
    if wish is not None and contradicts is not None:
        tx.execute(
            "UPDATE lessons SET state = 'aside', changed_at = ?2, "
            "replaced_by = (SELECT id FROM lessons WHERE id = ?1) WHERE id = ?3 AND id <> ?1 "
            "AND user = ?4 AND state <> 'dropped'",
            (newest, time.time(), contradicts, user),
        )
    return new


def unlearn(tx: sqlite3.Connection, turns: str) -> None:
    """Delete the lessons from these turns, a JSON array; what they set aside is told again."""
    deleted = "(SELECT id FROM lessons WHERE turn_id IN (SELECT value FROM json_each(?)))"
    tx.execute(
        f"UPDATE lessons SET state = {_AGAIN} WHERE state = 'aside' AND replaced_by IN {deleted}",
        (turns,),
    )
    tx.execute(f"DELETE FROM lessons WHERE id IN {deleted}", (turns,))


def practise(tx: sqlite3.Connection, step_id: int) -> bool:
    """Make a told lesson provisional, as its step practised it; False: its user has ended it
    meanwhile."""
    changed = tx.execute(
        "UPDATE lessons SET state = 'provisional', changed_at = ? WHERE state = 'told' "
        "AND id = (SELECT lesson FROM steps WHERE steps.id = ?)",
        (time.time(), step_id),
    )
    return changed.rowcount == 1


def tell_again(tx: sqlite3.Connection, version: int, lesson: int | None = None) -> None:
    """Tell practised lessons again that the weights of a version have not practised, or this
    one."""
    tx.execute(
        "UPDATE lessons SET state = 'told', changed_at = ?2 "
        f"WHERE state IN ('provisional', 'learned') AND (id = ?3 OR id NOT IN "
        f"({_PRACTISED}))",
        (version, time.time(), lesson),
    )


def taught_by(rows: Rows, turns: str) -> list[int]:
    """Return the turns whose prompts hold a lesson from these turns, a JSON array."""
    return rows.column(
        "SELECT DISTINCT turns.id FROM lessons CROSS JOIN turns AS source "
        "ON source.id = lessons.turn_id CROSS JOIN sessions ON sessions.id > source.session_id "
        "AND sessions.lessons <> '[]' CROSS JOIN turns ON turns.session_id = sessions.id "
        "WHERE lessons.turn_id IN (SELECT value FROM json_each(?)) AND lessons.id IN "
        "(SELECT value FROM json_each(turns.told, '$[0]')) ORDER BY turns.id",
        turns,
    )


def orphans(rows: Rows) -> list[int]:
    """Return the turns whose prompts hold a lesson that was forgotten."""
    return sorted(  # here, or SQLite would read whole turns in their order
        rows.column(
            "SELECT id FROM turns WHERE told IS NOT NULL AND EXISTS (SELECT 1 FROM "
            "json_each(told, '$[0]') WHERE value NOT IN (SELECT id FROM lessons))"
        )
    )


def _insert(
    tx: sqlite3.Connection, user: str, wish: Wish, turn_id: int | None, state: State
) -> int:
    """Insert a lesson that followed a turn, or that the user wrote (None); return its id."""
    now = time.time()
    values = asdict(wish) | {
        "user": user,
        "turn_id": turn_id,
        "state": state,
        "created_at": now,
        "changed_at": now,
    }
    return insert(tx, "lessons", values)


def _same(
    tx: sqlite3.Connection, user: str | None, text: str, edited: int | None = None
) -> int | None:
    """Return the id of the user's lesson of this sentence; None: there is none.

    Args:
        edited: a lesson of theirs; then another one that is not dropped. One prompt held both, and
            a drop of one left the other.
    """
    lessons = tx.execute(
        "SELECT id, text FROM lessons "
        "WHERE user = IIF(?2 IS NULL, ?1, (SELECT user FROM lessons WHERE id = ?2)) "
        "AND (?2 IS NULL OR (id <> ?2 AND state <> 'dropped'))",
        (user, edited),
    ).fetchall()
    return next((id for id, other in lessons if _meaning(other) == _meaning(text)), None)


def _meaning(text: str) -> str:
    """Return a sentence without case and stops; lessons that share it are the same."""
    return _MARKS.sub(" ", text.casefold()).strip()


def lesson_of(row: sqlite3.Row) -> Lesson:
    """Return the lesson in a row of `lessons`."""
    return replace(Lesson(**dict(row)), state=State(row["state"]))
