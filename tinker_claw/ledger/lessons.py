"""Lessons: what users said about how they want replies, added to prompts of later sessions.

Rule: the lessons of a session are chosen once, when it starts, and stored. Only lessons that the
user drops or edits change at once.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Literal

from tinker_claw.errors import UndoError
from tinker_claw.evidence import Rate, record
from tinker_claw.ledger.database import LedgerTable, Rows, insert
from tinker_claw.types import Wish
from tinker_claw.why import Why
from tinker_claw.wishes import BLANKS, LONGEST, hidden

FORGOTTEN_LESSON = Why.FORGOTTEN_LESSON.says()
"""Reason why such a turn is not trained."""
UNTOLD = "[[], 0, 0]"
"""`turns.told` of such a turn: the lesson is not in its prompt any more."""
_MARKS = re.compile(r"\W+")
_LATELY = 256
"""Newest first replies, and told sessions, that are compared."""
_BEFORE = 8
"""First replies compared from before a lesson was known."""
_GAPS = 16
"""Newest accepted told replies whose difference is averaged."""
_SHOWN_BEFORE = 64
"""First replies from before a lesson that are shown beside those since."""
_FIRSTS = (
    "sessions CROSS JOIN turns INDEXED BY turns_by_session ON turns.session_id = sessions.id "
    "AND kind = 'main' AND idx = 0 AND episode = 0 CROSS JOIN verdicts ON turn_id = turns.id"
)
"""SQL of sessions with the verdict on their first reply; episodes are told no lessons."""
_UNTOLD = (
    "NOT EXISTS (SELECT 1 FROM drawn AS other WHERE other.session_id = sessions.id AND other.told)"
)
_LINE = (
    "WITH RECURSIVE line (id) AS (VALUES (?1) UNION ALL SELECT parent FROM versions "
    "JOIN line USING (id) WHERE parent IS NOT NULL)"
)
"""SQL of a version and its ancestors."""
_RATES = f"""
WITH firsts AS MATERIALIZED (SELECT user, sessions.id AS session_id, value >= 0 AS good,
  {_UNTOLD} AS untold FROM {_FIRSTS} WHERE user = COALESCE(?, user) AND value IS NOT NULL)
SELECT lesson_id, IIF(told, 'told', 'untold') AS name, SUM(good) AS good, COUNT(*) AS number
FROM drawn JOIN firsts USING (session_id) GROUP BY 1, 2
UNION ALL SELECT id, 'before', SUM(good), COUNT(*) FROM (
  SELECT id, good, ROW_NUMBER() OVER (PARTITION BY id ORDER BY session_id DESC) AS n
  FROM lessons JOIN firsts USING (user) WHERE untold AND session_id < COALESCE(
    (SELECT session_id FROM turns WHERE turns.id = lessons.turn_id),
    (SELECT MIN(session_id) FROM drawn WHERE lesson_id = lessons.id), session_id + 1))
WHERE n <= {_SHOWN_BEFORE} GROUP BY 1
"""

Rule = Literal["keep", "edit", "drop", "add"]


class State(StrEnum):
    """Whether new sessions are told a lesson."""

    TRIED = "tried"
    """Told in most sessions, until it is clear whether that helps."""
    TOLD = "told"
    """Told in all sessions but a few, which show whether it is still needed."""
    LEARNED = "learned"
    """No longer told, since the model does it without."""
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Lesson:
    """A row of `lessons`; see schema.sql."""

    id: int
    user: str
    text: str
    words: str
    scope: str
    turn_id: int | None
    state: State
    kept: bool
    reason: str | None
    version: int | None
    created_at: float
    changed_at: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """First replies of sessions, newest first, and how much lessons raise replies' logprobs."""

    replies: tuple[tuple[bool, bool, float], ...]
    """Whether the lesson was told, whether the reply was accepted, and when its session began."""
    before: tuple[bool, ...]
    """Whether first replies from before the lesson was known were accepted."""
    gaps: tuple[float, ...]
    """Mean of log p(told) - log p(untold) in nats a token, of accepted told replies; not read for a
    learned lesson, nor is `before`."""


class LessonTable(LedgerTable):
    """Table of lessons, and of what each session is told."""

    def of_user(self, user: str | None = None) -> list[Lesson]:
        """Return the lessons of a user, or all, newest first."""
        return of_user(self._db, user)

    def of_session(self, session_id: int) -> list[Lesson] | None:
        """Return the lessons that a session is told; None: that is not decided yet."""
        if not self._db.one("SELECT drawn FROM sessions WHERE id = ?", session_id):
            return None
        rows = self._db.rows(
            "SELECT lessons.* FROM drawn JOIN lessons ON lessons.id = lesson_id "
            "WHERE session_id = ? AND told AND state <> 'dropped' ORDER BY lessons.id",
            session_id,
        )
        return [_lesson(row) for row in rows]

    def begin(self, session_id: int, drawn: Mapping[int, bool]) -> None:
        """Store a session's lessons, unless they are stored; none where it has begun already.

        Args:
            drawn: whether a lesson is told, by its id; False leaves it out for comparison.
        """
        with self._db.transaction() as tx:
            tx.executemany(
                "INSERT INTO drawn SELECT lessons.id, sessions.id, ?2 FROM lessons JOIN sessions "
                # A lesson forgotten meanwhile is not inserted.
                "ON lessons.id = ?1 AND sessions.id = ?3 AND NOT drawn AND NOT EXISTS "
                "(SELECT 1 FROM turns WHERE session_id = ?3 AND kind = 'main')",
                [(id, told, session_id) for id, told in drawn.items()],
            )
            tx.execute("UPDATE sessions SET drawn = 1 WHERE id = ?", (session_id,))

    def common(self, users: Collection[str] | None = None) -> frozenset[int]:
        """Return the lessons that every user of the policy has. The others are only told, and not
        distilled into the shared weights.

        Args:
            users: those who may call now; None: whoever has.
        """
        talked = self._db.column(
            "SELECT name FROM (SELECT DISTINCT user AS name FROM sessions) WHERE EXISTS "
            "(SELECT 1 FROM sessions CROSS JOIN turns ON session_id = sessions.id "
            "WHERE user = name AND episode = 0)"
        )
        sharing = {user for user in talked if users is None or user in users}
        lessons = [one for one in self.of_user() if one.state is not State.DROPPED]
        wanted = defaultdict[str, set[str]](set)
        for lesson in lessons:
            wanted[_meaning(lesson.text)].add(lesson.user)
        return frozenset(
            lesson.id for lesson in lessons if sharing <= wanted[_meaning(lesson.text)]
        )

    def sessions(self, lesson: Lesson) -> int:
        """Return the number of sessions in which this lesson was told or left out."""
        return self._db.one("SELECT COUNT(*) FROM drawn WHERE lesson_id = ?", lesson.id)

    def evidence(self, lesson: Lesson, version: int) -> Evidence:
        """Return what is known of a lesson's use by a version and its ancestors."""
        replies = self._db.rows(
            f"{_LINE} SELECT drawn.told, value > 0, sessions.created_at FROM drawn "
            f"CROSS JOIN {_FIRSTS} "
            "WHERE lesson_id = ? AND sessions.id = drawn.session_id AND value <> 0 "
            "AND policy_version IN (SELECT id FROM line) "
            f"ORDER BY drawn.session_id DESC LIMIT {_LATELY}",
            version,
            lesson.id,
        )
        told = tuple((bool(told), bool(good), at) for told, good, at in replies)
        if lesson.state is State.LEARNED:  # it comes back by its replies alone
            return Evidence(told, (), ())
        before = self._db.column(
            f"SELECT value > 0 FROM {_FIRSTS} WHERE user = ? AND value <> 0 AND {_UNTOLD} AND "
            "sessions.id < (SELECT session_id FROM turns WHERE id = ?) "
            f"ORDER BY sessions.id DESC LIMIT {_BEFORE}",
            lesson.user,
            lesson.turn_id,
        )
        gaps = self._db.column(
            f"{_LINE} SELECT untold FROM drawn CROSS JOIN turns INDEXED BY turns_by_session "
            "ON turns.session_id = drawn.session_id AND kind = 'main' "
            "CROSS JOIN samples INDEXED BY samples_untold ON samples.turn_id = turns.id "
            "AND untold IS NOT NULL WHERE lesson_id = ?2 AND drawn.told AND drawn.session_id >= "
            "(SELECT MIN(session_id) FROM (SELECT session_id FROM drawn WHERE lesson_id = ?2 "
            f"AND told ORDER BY session_id DESC LIMIT {_LATELY})) "
            "AND policy_version IN (SELECT id FROM line) "
            f"ORDER BY drawn.session_id DESC, idx DESC LIMIT {_GAPS}",
            version,
            lesson.id,
        )
        return Evidence(told, tuple(map(bool, before)), tuple(gaps))

    def change(self, lesson: Lesson, state: State, reason: str, version: int | None = None) -> None:
        """Change the state of a lesson."""
        self._db.write(
            "UPDATE lessons SET state = ?, reason = ?, version = ?, changed_at = ? WHERE id = ?",
            state,
            reason,
            version,
            time.time(),
            lesson.id,
        )

    def descends(self, version: int, ancestor: int) -> bool:
        """Return whether a version is this ancestor or comes from it."""
        query = f"{_LINE} SELECT COUNT(*) FROM line WHERE id = ?"
        return self._db.one(query, version, ancestor) > 0

    def rule(self, rule: Rule, user: str | None, which: int | None, text: str = "") -> int:
        """Keep, edit, drop or add a lesson, at once; return its id. One that is there is not added
        again, but kept in the new words.

        Args:
            user: whose lesson it must be; None: anybody's.
            which: the lesson's id; None to add one.
            text: the new words.

        Raises:
            UndoError: there is no such lesson, or its words cannot be one.
        """
        writes = rule in ("add", "edit")
        words = BLANKS.sub(" ", text).strip() if writes else ""
        if writes and not 0 < len(words) <= LONGEST:
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
                user, wish = user or "", Wish(words, "", "always")
                if (which := _same(tx, user, wish)) is None:
                    return _insert(tx, user, wish, None)
            state, kept = (State.DROPPED, 0) if rule == "drop" else (State.TOLD, 1)
            done = tx.execute(
                "UPDATE lessons SET text = CASE ?1 WHEN '' THEN text ELSE ?1 END, state = ?2, "
                "kept = ?3, reason = ?4, version = NULL, changed_at = ?5 "
                "WHERE id = ?6 AND user = COALESCE(?7, user)",
                (words, state, kept, _SAID[rule], time.time(), which, user),
            ).rowcount
        if not done or which is None:
            raise UndoError(f"there is no lesson {which}; `tinker-claw lessons` lists them")
        return which


_SAID = {
    "keep": "you keep it",
    "edit": "you wrote it",
    "drop": "you dropped it",
    "add": "you wrote it",
    "again": "you said it again",
}


def of_user(rows: Rows, user: str | None) -> list[Lesson]:
    """Return the lessons of a user, or all, newest first."""
    found = rows.rows(
        "SELECT * FROM lessons WHERE user = COALESCE(?, user) ORDER BY created_at DESC, id DESC",
        user,
    )
    return [_lesson(row) for row in found]


def read_lessons(rows: Rows, user: str | None) -> list[dict[str, Any]]:
    """Return the lessons of a user, newest first, with the acceptance of first replies.

    `accepted`: shares of first replies, `before` the lesson was said, without any lesson, and since
    then with it (`told`) and without it (`untold`), where there are any. `back`: the version that
    answered when it was said, so that none before has learned it; None: the user wrote it.

    Args:
        user: only theirs; None: everybody's.
    """
    rates = defaultdict[int, dict[str, Any]](dict)
    for id, name, good, number in rows.rows(_RATES, user):
        rates[id][name] = record(Rate(good, number))
    back = rows.pairs(
        "SELECT lessons.id, policy_version FROM lessons JOIN turns ON turns.id = turn_id"
    )
    return [
        {**asdict(one), "accepted": rates[one.id], "back": back.get(one.id)}
        for one in of_user(rows, user)
    ]


def learn(tx: sqlite3.Connection, turn_id: int, wish: Wish) -> None:
    """Store the wish that followed a turn as a lesson. One that repeats a lesson's sentence is the
    same lesson, which is told again if it was learned."""
    found = tx.execute(
        "SELECT user FROM turns JOIN sessions ON sessions.id = session_id "
        "WHERE turns.id = ? AND private <> 1 AND kind = 'main' AND episode = 0",
        (turn_id,),
    ).fetchone()
    if found is None:
        return
    (user,) = found
    if (same := _same(tx, user, wish)) is None:
        _insert(tx, user, wish, turn_id)
        return
    tx.execute(
        "UPDATE lessons SET created_at = ?1, version = NULL, "
        "reason = CASE state WHEN 'learned' THEN ?2 ELSE reason END, "
        "changed_at = CASE state WHEN 'learned' THEN ?1 ELSE changed_at END, "
        "state = CASE state WHEN 'learned' THEN 'told' ELSE state END WHERE id = ?3",
        (time.time(), _SAID["again"], same),
    )


def taught_by(rows: Rows, turns: str) -> list[int]:
    """Return the turns whose prompts hold a lesson from these turns, a JSON array."""
    return rows.column(
        "SELECT DISTINCT turns.id FROM lessons CROSS JOIN drawn ON lesson_id = lessons.id "
        "AND drawn.told CROSS JOIN turns ON turns.session_id = drawn.session_id "
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


def _insert(tx: sqlite3.Connection, user: str, wish: Wish, turn_id: int | None) -> int:
    """Insert a lesson that followed a turn, or that the user wrote (None); return its id."""
    wrote, now = turn_id is None, time.time()
    values = asdict(wish) | {
        "user": user,
        "turn_id": turn_id,
        "state": State.TOLD if wrote else State.TRIED,
        "kept": wrote,
        "reason": _SAID["add"] if wrote else None,
        "created_at": now,
        "changed_at": now,
    }
    return insert(tx, "lessons", values)


def _same(tx: sqlite3.Connection, user: str, wish: Wish) -> int | None:
    """Return the id of the user's lesson of this sentence; None: there is none."""
    known = tx.execute("SELECT id, text FROM lessons WHERE user = ?", (user,)).fetchall()
    return next((id for id, text in known if _meaning(text) == _meaning(wish.text)), None)


def _meaning(text: str) -> str:
    """Return a sentence without case and marks; lessons that share it are the same."""
    return _MARKS.sub(" ", text.casefold()).strip()


def _lesson(row: sqlite3.Row) -> Lesson:
    return replace(Lesson(**dict(row)), state=State(row["state"]), kept=bool(row["kept"]))
