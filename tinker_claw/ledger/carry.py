"""Start a ledger with what an older one has learned: its newest policy state and its lessons.

Rule: the older ledger is only read, and the new directory appears whole or not at all. Turns and
everything that was made of them stay where they are. What was private stays so.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tinker_claw.errors import LedgerError
from tinker_claw.ledger.database import CARRIED_FROM, FILE, Database, Rows, insert, open_read_only
from tinker_claw.ledger.lessons import State
from tinker_claw.ledger.reference import ACCEPTED, ANSWERS
from tinker_claw.ledger.turns import mark_private, read_private
from tinker_claw.ledger.versions import LINE

_VAIN: Final = "vain"
_LESSON: Final = ("id", "user", "text", "words", "created_at", "changed_at")
_BOUND: Final = ("model", "method", "backend", "lora_rank")
"""Keys of `meta` that tie a ledger to a run."""

_LINE: Final = f"{LINE} SELECT versions.* FROM line JOIN versions USING (id) ORDER BY n DESC"
"""SQL of the newest version and its ancestors, oldest first."""
_STEPS: Final = """
SELECT * FROM steps WHERE status = 'committed' AND version IN (SELECT value FROM json_each(?))
ORDER BY id
"""
"""SQL of the steps that made some versions: their metrics, and the method's state."""
_BILLS: Final = """
SELECT spend.created_at, purpose, steps.id AS step_id, prefill, cached, sampled, trained, usd
FROM spend LEFT JOIN steps ON steps.id = step_id AND status = 'committed'
  AND steps.version IN (SELECT value FROM json_each(?)) ORDER BY spend.id
"""
"""SQL of what was billed, by the steps of some versions, or none: a budget goes on with it."""


@dataclass(frozen=True, slots=True)
class CarriedRun:
    """Contents of a new ledger."""

    version: int
    """Newest version of the older ledger, which keeps its number."""
    step: int
    """Its committed steps since the base."""
    lessons: int
    candidates: int
    """Lessons of these that no user has kept yet."""
    unnamed_owners: int
    """Chat channels whose first sender taught the older run, and whom the new one does not know."""


def carry(old: Path, new: Path) -> CarriedRun:
    """Write what `old` has learned into the empty directory `new`.

    Version 0 and the newest version keep their weights, as files or at the service; those between
    are listed without.

    Args:
        old: data directory that no gateway uses.

    Raises:
        LedgerError: `old` is no ledger, too old or without a version, or `new` cannot be written.
        OSError: weights cannot be copied.
    """
    with open_read_only(old / FILE, oldest=CARRIED_FROM) as rows, rows.moment():
        line = [dict(version) for version in rows.rows(_LINE)]
        if not line:
            raise LedgerError(f"{rows.path} has no version yet: there is nothing to carry")
        versions = [version["id"] for version in line]
        of_line = json.dumps(versions)
        lessons = [*_lessons(rows)]
        meta = rows.pairs("SELECT key, value FROM meta")
        _copy_weights(old, new, meta, line)
        with closing(Database(new)) as database, database.transaction() as tx:
            accepted = int(meta.get(ACCEPTED, 0))
            for key in (*_BOUND, *((ACCEPTED, ANSWERS) if accepted in versions else ())):
                if key in meta:
                    tx.execute("INSERT INTO meta VALUES (?, ?)", (key, meta[key]))
            _insert_all(tx, "versions", line)
            _insert_all(tx, "steps", map(dict, rows.rows(_STEPS, of_line)))
            _insert_all(tx, "lessons", lessons)
            _insert_all(tx, "spend", map(dict, rows.rows(_BILLS, of_line)))
            # Else what is said in them from now on would be kept.
            for (user, key), private in read_private(rows).items():
                mark_private(tx, user, key, private)
            # A new lesson gets no number that a step practised as another.
            newest_lesson = rows.one("SELECT seq FROM sqlite_sequence WHERE name = 'lessons'")
            tx.execute("DELETE FROM sqlite_sequence WHERE name = 'lessons'")
            tx.execute("INSERT INTO sqlite_sequence VALUES ('lessons', ?)", (newest_lesson or 0,))
        candidates = sum(lesson["state"] is State.CANDIDATE for lesson in lessons)
        newest = line[-1]
        return CarriedRun(
            newest["id"], newest["step"], len(lessons), candidates, _unnamed_owners(rows)
        )


def _lessons(rows: Rows) -> Iterable[dict[str, Any]]:
    """Yield the lessons that are still of use, as rows of this schema."""
    for row in rows.rows("SELECT * FROM lessons ORDER BY id"):
        lesson = dict(row)
        state = _state(lesson["state"], kept=bool(lesson.get("kept", True)))
        if state is not None:
            yield {name: lesson[name] for name in _LESSON} | {"state": state}


def _state(state: str, *, kept: bool) -> State | None:
    """Return the state in which a lesson is carried; None: it is left.

    One that only the judge took for a lasting wish becomes a candidate: it is told once its user
    keeps it. Version 11 ended a lesson told in vain, even one that its user had kept.
    """
    if state in (State.DROPPED, State.ASIDE):
        return None
    if not kept:
        return None if state == _VAIN else State.CANDIDATE
    return State.TOLD if state == _VAIN else State(state)


def _copy_weights(
    old: Path, new: Path, meta: Mapping[str, str], line: Sequence[Mapping[str, Any]]
) -> None:
    """Copy the folders of the first and the newest version, where the run trained here.

    Raises:
        LedgerError: the newest version's state is not there.
    """
    if meta["backend"] != "local":
        return
    if not (old / "states" / line[-1]["state_ref"]).is_dir():
        raise LedgerError(f"the state of v{line[-1]['id']} is missing in {old / 'states'}")
    for version in (line[0], line[-1]):
        states = Path("states", version["state_ref"])
        for folder in (states, Path("adapters", version["sampler_ref"])):
            if (old / folder).is_dir():  # a rollback's version has those of an earlier one
                shutil.copytree(old / folder, new / folder, dirs_exist_ok=True)


def _unnamed_owners(rows: Rows) -> int:
    """Return the number of channels with an owner who is stored as a digest alone."""
    columns = rows.column("SELECT name FROM pragma_table_info('channels')")
    if "first" not in columns:
        return 0
    return rows.one("SELECT COUNT(*) FROM channels WHERE first IS NOT NULL")


def _insert_all(tx: sqlite3.Connection, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
    for row in rows:
        insert(tx, table, row)
