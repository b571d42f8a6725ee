"""Sums over a whole ledger, for a reader who wants to know how it goes.

Rule: answered from indexes and narrow tables. However long a ledger is, no row of `turns` is read
but those that are open.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinker_claw.ledger.lineage import pinned
from tinker_claw.ledger.reading import Rows

_BY_VERSION = """
SELECT policy_version, COUNT(*) AS judged, COUNT(value) AS voted, TOTAL(value = 1) AS good,
  TOTAL(value = -1) AS bad, TOTAL(idx = 0 AND value IS NOT NULL) AS firsts,
  TOTAL(idx = 0 AND value >= 0) AS accepted
FROM turns CROSS JOIN verdicts ON verdicts.turn_id = turns.id WHERE kind = 'main'
GROUP BY policy_version
"""
_OPEN = """
SELECT closed_at IS NOT NULL AS closed, next_states.turn_id IS NOT NULL AS followed,
  verdicts.turn_id IS NOT NULL AS judged, COUNT(*) AS n
FROM turns CROSS JOIN sessions ON sessions.id = session_id
  LEFT JOIN next_states ON next_states.turn_id = turns.id
  LEFT JOIN verdicts ON verdicts.turn_id = turns.id
WHERE settled = 0 GROUP BY 1, 2, 3
"""


@dataclass(frozen=True, slots=True)
class VersionFigures:
    """What was said of the replies that one policy version gave."""

    version: int
    judged: int
    voted: int
    """Judged turns with a verdict; the others had no valid vote."""
    good: int
    bad: int
    firsts: int
    """First main turns of their sessions, with a verdict."""
    accepted: int
    """Those of them whose verdict is not -1."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step."""

    id: int
    status: str
    """intent, committed or void"""
    version: int | None
    created_at: float
    finished_at: float | None
    metrics: Mapping[str, Any]
    error: str | None


@dataclass(frozen=True, slots=True)
class OpenTurns:
    """Turns that may still become samples, by what they wait for."""

    next_state: int = 0
    ended: int = 0
    """Like these, but their session is over."""
    judge: int = 0
    teacher: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """A ledger in sums."""

    run: Mapping[str, str]
    """Model, method, backend."""
    version: int | None
    """The newest; None: the run has not begun."""
    step: int
    """Optimizer steps that the newest version is away from the base."""
    sessions: int
    private: int
    """Of them, those of which nothing is recorded now."""
    main: int
    side: int
    versions: tuple[VersionFigures, ...]
    """Of those with judged turns, by id."""
    first_versions: frozenset[int]
    """Versions before any optimizer step."""
    live: frozenset[int]
    """The newest version, and all that it descends from; a rollback leaves the others behind."""
    pinned: int | None
    """The version that answers whatever is learned; None: the newest does."""
    hints: int
    """Turns with a hint."""
    samples: Mapping[str, int]
    """By state."""
    refused: Mapping[str, int]
    """Turns that are never trained, by reason."""
    open: OpenTurns
    lost: Mapping[str, int]
    """Requests that could not be tied to the turn that they answer, by cause."""
    usd: Mapping[str, float]
    """By purpose, as far as prices were known; empty: nothing was billed."""
    unpriced: int
    """Bills without a price."""
    steps: tuple[StepFigures, ...]
    """The newest, oldest first."""


def read_figures(rows: Rows, steps: int) -> Figures:
    """The sums, and the newest `steps` steps."""
    newest = rows.row("SELECT id, step FROM versions ORDER BY id DESC LIMIT 1")
    spend = rows.rows(
        "SELECT purpose, TOTAL(usd) AS usd, COUNT(*) - COUNT(usd) AS unpriced FROM spend "
        "GROUP BY purpose"
    )
    return Figures(
        run=run_of(rows),
        version=newest["id"] if newest else None,
        step=newest["step"] if newest else 0,
        sessions=rows.one("SELECT COUNT(*) FROM sessions"),
        private=rows.one("SELECT COUNT(*) FROM sessions WHERE private = 1"),
        main=rows.one("SELECT COUNT(*) FROM turns WHERE kind = 'main'"),
        side=rows.one("SELECT COUNT(*) FROM turns WHERE kind = 'side'"),
        versions=tuple(_version(row) for row in rows.rows(_BY_VERSION)),
        first_versions=frozenset(
            row["id"]
            for row in rows.rows(
                "SELECT id FROM versions WHERE step = 0 AND id < "
                "(SELECT COALESCE(MIN(id), 1e18) FROM versions WHERE step > 0)"
            )
        ),
        live=live_versions(rows),
        pinned=pinned(rows),
        hints=rows.one("SELECT COUNT(*) FROM hints WHERE rank = 0"),
        samples=_counts(rows, "SELECT state, COUNT(*) FROM samples GROUP BY state"),
        refused=_counts(
            rows,
            "SELECT untrained_because, COUNT(*) FROM turns "
            "WHERE untrained_because IS NOT NULL GROUP BY untrained_because",
        ),
        open=_open(rows),
        lost=lost_of(rows),
        usd={row["purpose"]: row["usd"] for row in spend},
        unpriced=sum(row["unpriced"] for row in spend),
        steps=newest_steps(rows, steps),
    )


def lost_of(rows: Rows) -> dict[str, int]:
    """Requests that could not be tied to the turn that they answer, by cause."""
    return _counts(rows, "SELECT lost, COUNT(*) FROM turns WHERE lost IS NOT NULL GROUP BY lost")


def newest_steps(rows: Rows, count: int) -> tuple[StepFigures, ...]:
    """So many, oldest first."""
    newest = rows.rows("SELECT * FROM steps ORDER BY id DESC LIMIT ?", count)
    return tuple(step_of(row) for row in reversed(newest))


def run_of(rows: Rows) -> dict[str, str]:
    """Model, method and backend."""
    return {
        row["key"]: row["value"]
        for row in rows.rows("SELECT * FROM meta WHERE key IN ('model', 'method', 'backend')")
    }


def live_versions(rows: Rows) -> frozenset[int]:
    """The newest version and all that it descends from."""
    found = rows.rows(
        "WITH RECURSIVE line (id) AS (SELECT MAX(id) FROM versions UNION ALL "
        "SELECT parent FROM versions JOIN line USING (id) WHERE parent IS NOT NULL) "
        "SELECT id FROM line WHERE id IS NOT NULL"
    )
    return frozenset(row["id"] for row in found)


def step_of(row: sqlite3.Row) -> StepFigures:
    """A row of `steps`."""
    return StepFigures(
        id=row["id"],
        status=row["status"],
        version=row["version"],
        created_at=row["created_at"],
        finished_at=row["finished_at"],
        metrics=json.loads(row["metrics"]) if row["metrics"] else {},
        error=row["error"],
    )


def _version(row: sqlite3.Row) -> VersionFigures:
    counts = {name: int(row[name]) for name in ("judged", "voted", "good", "bad")}
    return VersionFigures(
        version=row["policy_version"],
        **counts,
        firsts=int(row["firsts"]),
        accepted=int(row["accepted"]),
    )


def _open(rows: Rows) -> OpenTurns:
    counts = dict.fromkeys(("next_state", "ended", "judge", "teacher"), 0)
    for row in rows.rows(_OPEN):
        if row["judged"]:
            name = "teacher"
        elif row["followed"]:
            name = "judge"
        else:
            name = "ended" if row["closed"] else "next_state"
        counts[name] += row["n"]
    return OpenTurns(**counts)


def _counts(rows: Rows, query: str) -> dict[str, int]:
    return {row[0]: row[1] for row in rows.rows(query)}
