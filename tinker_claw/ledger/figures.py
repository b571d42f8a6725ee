"""A ledger in sums, for a reader who wants to know how it goes.

Rule: answered from indexes and narrow tables. However long a ledger is, no row of `turns`, which
are wide, is read for that.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.outcome import run_of
from tinker_claw.ledger.versions import pinned, read_line
from tinker_claw.types import Vote


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step."""

    id: int
    status: str
    """intent, committed or void"""
    parent: int
    """The version that it began with."""
    version: int | None
    created_at: float
    finished_at: float | None
    metrics: Mapping[str, Any]
    error: str | None


def newest_steps(rows: Rows, count: int) -> tuple[StepFigures, ...]:
    """So many, oldest first."""
    newest = rows.rows("SELECT * FROM steps ORDER BY id DESC LIMIT ?", count)
    return tuple(_step_figures(row) for row in reversed(newest))


def read_step(rows: Rows, step_id: int) -> StepFigures | None:
    """None: there is no such step."""
    row = rows.row("SELECT * FROM steps WHERE id = ?", step_id)
    return None if row is None else _step_figures(row)


def _step_figures(row: sqlite3.Row) -> StepFigures:
    known: dict[str, Any] = {name: row[name] for name in StepFigures.__slots__}
    known["metrics"] = json.loads(row["metrics"]) if row["metrics"] else {}
    return StepFigures(**known)


def rewards_of(rows: Rows, step_id: int) -> tuple[Vote | None, ...]:
    """Of all samples that a step was begun with."""
    found = rows.rows(
        "SELECT reward FROM step_samples JOIN samples ON samples.id = sample_id "
        "WHERE step_samples.step_id = ? ORDER BY samples.id",
        step_id,
    )
    return tuple(row["reward"] for row in found)


_BY_VERSION = """
SELECT policy_version AS version, COUNT(*) AS judged, COUNT(value) AS voted,
  COUNT(*) FILTER (WHERE value = 1) AS good, COUNT(*) FILTER (WHERE value = -1) AS bad,
  COUNT(*) FILTER (WHERE idx = 0 AND value IS NOT NULL) AS firsts,
  COUNT(*) FILTER (WHERE idx = 0 AND value >= 0) AS accepted
FROM turns CROSS JOIN verdicts ON verdicts.turn_id = turns.id WHERE kind = 'main'
GROUP BY policy_version
"""
_LATELY = 1000
"""Rows of a table among which the newest is sought: the last one, unless a clock was set back."""
_TIMES = ("turns", "next_states", "verdicts", "samples", "steps", "versions", "spend")


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
    first = rows.rows(
        "SELECT id FROM versions WHERE step = 0 AND id < "
        "(SELECT COALESCE(MIN(id), 1e18) FROM versions WHERE step > 0)"
    )
    return Figures(
        run=run_of(rows),
        version=newest["id"] if newest else None,
        step=newest["step"] if newest else 0,
        sessions=rows.one("SELECT COUNT(*) FROM sessions"),
        private=rows.one("SELECT COUNT(*) FROM sessions WHERE private = 1"),
        main=rows.one("SELECT COUNT(*) FROM turns WHERE kind = 'main'"),
        side=rows.one("SELECT COUNT(*) FROM turns WHERE kind = 'side'"),
        versions=tuple(VersionFigures(**dict(row)) for row in rows.rows(_BY_VERSION)),
        first_versions=frozenset(row["id"] for row in first),
        live=read_line(rows).live,
        pinned=pinned(rows),
        hints=rows.one("SELECT COUNT(*) FROM hints WHERE rank = 0"),
        samples=_counts(rows, "SELECT state, COUNT(*) FROM samples GROUP BY state"),
        lost=lost_of(rows),
        usd={row["purpose"]: row["usd"] for row in spend},
        unpriced=sum(row["unpriced"] for row in spend),
        steps=newest_steps(rows, steps),
    )


def lost_of(rows: Rows) -> dict[str, int]:
    """Requests that could not be tied to the turn that they answer, by cause."""
    return _counts(rows, "SELECT lost, COUNT(*) FROM turns WHERE lost IS NOT NULL GROUP BY lost")


def newest_at(rows: Rows) -> float | None:
    """When the newest row was written, seconds since 1970; None: there is none."""
    newest = " UNION ALL ".join(
        "SELECT MAX(created_at) AS at FROM "
        f"(SELECT created_at FROM {name} ORDER BY rowid DESC LIMIT {_LATELY})"
        for name in _TIMES
    )
    return rows.one(f"SELECT MAX(at) FROM ({newest})")


def _counts(rows: Rows, query: str) -> dict[str, Any]:
    return {row[0]: row[1] for row in rows.rows(query)}
