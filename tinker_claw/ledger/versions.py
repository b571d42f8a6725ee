"""Policy versions: their lineage, rollbacks, and the pinned one.

Rule: versions are never deleted, and ids only grow. Samples trained in versions that a rollback
left behind stay trained there; untrained samples of those versions expire, since the live weights
never sampled them.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import asdict, replace
from typing import Any

from tinker_claw.ledger.database import LedgerTable, Rows, insert, set_meta
from tinker_claw.ledger.lessons import tell_again
from tinker_claw.ledger.turns import refuse
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import PolicyVersion

_PINNED = "pinned"
"""Key in `meta`."""
LINE = """
WITH RECURSIVE line (id, n) AS (SELECT id, 1 FROM versions WHERE id = (SELECT MAX(id) FROM versions)
  UNION ALL SELECT parent, n + 1 FROM versions JOIN line USING (id) WHERE parent IS NOT NULL)
"""
"""SQL of the newest version as number 1, and its ancestors as 2, 3 ..."""


def live_versions(rows: Rows) -> frozenset[int]:
    """Return the newest version and all its ancestors; a rollback leaves the others behind."""
    return frozenset(rows.column(f"{LINE} SELECT id FROM line"))


def expire_left_behind(tx: sqlite3.Connection) -> int:
    """Expire queued samples of versions that a rollback left behind; return how many."""
    return refuse(
        tx,
        TurnRefusal(Reason.LEFT_BEHIND),
        f"state IN ('queued', 'held') AND policy_version NOT IN ({LINE} SELECT id FROM line)",
    )


def read_versions(rows: Rows) -> list[dict[str, Any]]:
    """Return all versions of a run, oldest first, with their state.

    `samples`: those of the step that made it; `made_by_step` is None where a start or a rollback
    did. `live`: it is `newest` or an ancestor of it. `serving`: it answers, or will when the
    gateway runs.
    """
    version_rows = rows.rows(
        "SELECT versions.id, versions.parent, step, versions.created_at, steps.id AS made_by_step, "
        "(SELECT COUNT(*) FROM step_samples WHERE step_id = steps.id) AS samples, state_ref, "
        "sampler_ref FROM versions LEFT JOIN steps ON steps.version = versions.id "
        "ORDER BY versions.id"
    )
    live, pin = live_versions(rows), pinned(rows)
    newest = max(live, default=None)
    serving = newest if pin is None else pin
    return [
        {
            **dict(row),
            "live": row["id"] in live,
            "newest": row["id"] == newest,
            "pinned": row["id"] == pin,
            "serving": row["id"] == serving,
        }
        for row in version_rows
    ]


def read_version(rows: Rows, version_id: int) -> PolicyVersion | None:
    """Return a version; None: there is none of that number."""
    return _version(rows, "WHERE id = ?", version_id)


def _version(rows: Rows, which: str, *values: Any) -> PolicyVersion | None:
    row = rows.row(
        f"SELECT id, parent, step, state_ref, sampler_ref FROM versions {which}", *values
    )
    return PolicyVersion(**row) if row else None


def pinned(rows: Rows) -> int | None:
    """Return the pinned version; None: the newest answers."""
    return rows.one("SELECT CAST(value AS INTEGER) FROM meta WHERE key = ?", _PINNED)


class VersionTable(LedgerTable):
    """Table of versions, and the pinned one, which answers whatever is learned meanwhile."""

    def newest(self) -> PolicyVersion | None:
        return _version(self._db, "ORDER BY id DESC LIMIT 1")

    def get(self, version_id: int) -> PolicyVersion | None:
        return read_version(self._db, version_id)

    def add_first(self, *, state_ref: str, sampler_ref: str) -> PolicyVersion:
        """Add version 0: the base with an adapter that changes nothing yet."""
        with self._db.transaction() as tx:
            return insert_version(tx, PolicyVersion(0, None, 0, state_ref, sampler_ref))

    def pin(self, version_id: int | None) -> None:
        """Pin a version; None: the newest answers again."""
        with self._db.transaction() as tx:
            set_meta(tx, _PINNED, version_id)

    def roll_back(self, to: PolicyVersion) -> PolicyVersion:
        """Add a version with the weights of `to`, from which learning goes on; end a pin.

        The steps since then remain in a lineage that is left behind: their samples count as trained
        and are not queued again.
        """
        with self._db.transaction() as tx:
            set_meta(tx, _PINNED, None)
            return go_on_from(tx, to)

    def republish(self, version: PolicyVersion, sampler_ref: str) -> PolicyVersion:
        """Record the weights of a version under another sampler, as the old one is gone; return the
        version."""
        self._db.write("UPDATE versions SET sampler_ref = ? WHERE id = ?", sampler_ref, version.id)
        return replace(version, sampler_ref=sampler_ref)


def go_on_from(tx: sqlite3.Connection, to: PolicyVersion) -> PolicyVersion:
    """Add a version with the weights of `to`; lessons that these have not practised are told
    again."""
    version = insert_version(tx, replace(to, parent=to.id))
    expire_left_behind(tx)
    tell_again(tx, version.id)
    return version


def insert_version(tx: sqlite3.Connection, version: PolicyVersion) -> PolicyVersion:
    """Insert a version under the next id, instead of its own; return it."""
    next_id = tx.execute("SELECT COALESCE(MAX(id) + 1, 0) FROM versions").fetchone()[0]
    version = replace(version, id=next_id)
    insert(tx, "versions", asdict(version) | {"created_at": time.time()})
    return version
