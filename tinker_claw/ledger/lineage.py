"""Versions as a line that is gone on from, gone back on, or held still.

Rule: versions are never taken back, and ids only grow. What was trained in versions that a rollback
has left behind stays trained there; what they sampled and nobody has trained on yet expires, for
the weights that learn have never been theirs.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from tinker_claw.ledger.database import Database
from tinker_claw.ledger.reading import Rows
from tinker_claw.types import PolicyVersion

_PINNED = "pinned"
"""The key in `meta`."""


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A version, and what it is to the run."""

    version: PolicyVersion
    created_at: float
    made_by_step: int | None
    """None: by a start, or by a rollback."""
    samples: int
    """That this step trained on."""
    live: bool
    """The newest version descends from it, or is it."""
    pinned: bool
    serving: bool
    """It answers, or will when the gateway runs."""


class Pin:
    """The version that answers whatever is learned meanwhile."""

    def __init__(self, database: Database) -> None:
        self._db = database

    @property
    def version(self) -> int | None:
        """None: the newest answers."""
        return pinned(self._db)

    def to(self, version_id: int) -> None:
        with self._db.transaction() as tx:
            tx.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_PINNED, str(version_id)))

    def end(self) -> None:
        with self._db.transaction() as tx:
            end_pin(tx)


def pinned(rows: Rows) -> int | None:
    value = rows.one("SELECT value FROM meta WHERE key = ?", _PINNED)
    return None if value is None else int(value)


def end_pin(tx: sqlite3.Connection) -> None:
    """Within a transaction: the newest version answers again."""
    tx.execute("DELETE FROM meta WHERE key = ?", (_PINNED,))


def read_versions(rows: Rows) -> list[VersionRecord]:
    """All versions of a run, oldest first."""
    found = rows.rows(
        "SELECT versions.*, steps.id AS made_by_step, (SELECT COUNT(*) FROM step_samples "
        "WHERE step_id = steps.id) AS samples "
        "FROM versions LEFT JOIN steps ON steps.version = versions.id ORDER BY versions.id"
    )
    parents = {row["id"]: row["parent"] for row in found}
    line, at = set[int](), max(parents, default=None)
    pin = pinned(rows)
    serving = at if pin is None else pin
    while at is not None:
        line.add(at)
        at = parents[at]
    return [
        VersionRecord(
            version=PolicyVersion(
                *(row[name] for name in ("id", "parent", "step", "state_ref", "sampler_ref"))
            ),
            created_at=row["created_at"],
            made_by_step=row["made_by_step"],
            samples=row["samples"],
            live=row["id"] in line,
            pinned=row["id"] == pin,
            serving=row["id"] == serving,
        )
        for row in found
    ]


def expire_left_behind(tx: sqlite3.Connection) -> int:
    """Take samples out of the queue whose version was left behind by a rollback; how many."""
    sampled_by = tx.execute(
        "SELECT DISTINCT policy_version FROM samples JOIN turns ON turns.id = turn_id "
        "WHERE state = 'queued'"
    ).fetchall()
    newest = tx.execute("SELECT MAX(id) FROM versions").fetchone()[0]
    return sum(
        tx.execute(
            "UPDATE samples SET state = 'expired' WHERE state = 'queued' AND EXISTS "
            "(SELECT 1 FROM turns WHERE turns.id = turn_id AND policy_version = ?)",
            (version,),
        ).rowcount
        for (version,) in sampled_by
        if not _leads_to(tx, version, newest)
    )


def _leads_to(tx: sqlite3.Connection, version: int, newest: int) -> bool:
    """Whether the newest version descends from this one, or did until a crash lost its step.

    The lost step's version counts as its parent: its samples are queued again and go on.
    """
    while True:
        at = newest
        while at > version:  # a parent's id is always lower
            at = _parent(tx, at)
        if at == version:
            return True
        step = tx.execute("SELECT status FROM steps WHERE version = ?", (version,)).fetchone()
        if step is None or step["status"] != "void":
            return False
        version = _parent(tx, version)


def _parent(tx: sqlite3.Connection, version: int) -> int:
    row = tx.execute("SELECT parent FROM versions WHERE id = ?", (version,)).fetchone()
    return -1 if row["parent"] is None else int(row["parent"])
