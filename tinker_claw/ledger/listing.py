"""Rows of the ledger as a reader asks for them: a table, filtered, the newest at the end.

Rule: what a user or his agent wrote, and ids from which it can be read, are only in what is asked
for in full.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tinker_claw.ledger.reading import Rows

Table = Literal["turns", "verdicts", "samples", "steps", "versions"]
Record = dict[str, Any]

_SESSION = "JOIN sessions ON sessions.id = turns.session_id"
_VERDICT = "LEFT JOIN verdicts ON verdicts.turn_id = turns.id"
_SAMPLE = "LEFT JOIN samples ON samples.turn_id = turns.id"
_TRAINED = "CASE WHEN samples.state = 'trained' THEN samples.step_id END"
_VOTES = (
    "(SELECT json_group_array(value) FROM (SELECT value FROM votes "
    "WHERE votes.turn_id = turns.id AND about = 'verdict' ORDER BY n))"
)
_HINTS = "(SELECT COUNT(*) FROM hints WHERE hints.turn_id = turns.id)"


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rows; None: all."""

    session: str | None = None
    """The ledger's number, or the client's name for it."""
    user: str | None = None
    kind: str | None = None
    verdict: str | None = None
    """"1", "0", "-1", or "none": judged, and no vote was valid."""
    trained: bool | None = None
    since: float | None = None
    """Seconds since 1970."""
    after: int = 0
    """Only rows of higher turns (of steps and versions: only higher ids)."""


@dataclass(frozen=True, slots=True)
class _Listing:
    select: str
    created: str
    number: str
    """What `Filter.after` compares."""
    order: str
    read: Callable[[sqlite3.Row], Record]


def read(rows: Rows, table: Table, wanted: Filter, limit: int | None) -> list[Record]:
    """The newest `limit` rows that are wanted, oldest first."""
    listing = _LISTINGS[table]
    conditions, values = _conditions(listing, wanted)
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    query = f"{listing.select} {where} ORDER BY {listing.order} LIMIT ?"
    found = rows.rows(query, *values, -1 if limit is None else limit)
    return [listing.read(row) for row in reversed(found)]


def _conditions(listing: _Listing, wanted: Filter) -> tuple[list[str], list[Any]]:
    conditions, values = list[str](), list[Any]()

    def demand(condition: str, *given: Any) -> None:
        conditions.append(condition)
        values.extend(given)

    if wanted.session is not None:
        demand("(sessions.key = ? OR CAST(sessions.id AS TEXT) = ?)", *[wanted.session] * 2)
    if wanted.user is not None:
        demand("sessions.user = ?", wanted.user)
    if wanted.kind is not None:
        demand("turns.kind = ?", wanted.kind)
    if wanted.verdict == "none":
        demand("verdicts.turn_id IS NOT NULL AND verdicts.value IS NULL")
    elif wanted.verdict is not None:
        demand("verdicts.value = ?", int(wanted.verdict))
    if wanted.trained is not None:
        demand(f"{_TRAINED} IS {'NOT ' if wanted.trained else ''}NULL")
    if wanted.since is not None:
        demand(f"{listing.created} >= ?", wanted.since)
    if wanted.after:
        demand(f"{listing.number} > ?", wanted.after)
    return conditions, values


def _flagged(*names: str) -> Callable[[sqlite3.Row], Record]:
    """A row as it is, with these columns as truth values."""

    def read(row: sqlite3.Row) -> Record:
        return {name: bool(row[name]) if name in names else row[name] for name in row.keys()}  # noqa: SIM118

    return read


def _verdict(row: sqlite3.Row) -> Record:
    return {**dict(row), "votes": json.loads(row["votes"])}


def _step(row: sqlite3.Row) -> Record:
    record = _flagged("outage")(row)
    metrics: Mapping[str, Any] = json.loads(row["metrics"]) if row["metrics"] else {}
    return {**record, "metrics": {k: v for k, v in metrics.items() if k != "rule"}}


_LISTINGS: dict[Table, _Listing] = {
    "turns": _Listing(
        'SELECT turns.id, turns.session_id AS session, user, idx AS "index", kind, '
        "kind_reason AS reason, call, policy_version, fallback, misfit, "
        "prompt_tokens, completion_tokens, "
        "turns.created_at, next_states.turn_id IS NOT NULL AS has_next_state, "
        "verdicts.turn_id IS NOT NULL AS judged, verdicts.value AS verdict, "
        f"{_HINTS} AS hints, samples.state AS sample, {_TRAINED} AS trained_in_step, "
        f"untrained_because FROM turns {_SESSION} {_VERDICT} {_SAMPLE} "
        "LEFT JOIN next_states ON next_states.turn_id = turns.id",
        *("turns.created_at", "turns.id", "turns.id DESC"),
        _flagged("has_next_state", "judged"),
    ),
    "verdicts": _Listing(
        "SELECT turns.id AS turn, turns.session_id AS session, user, policy_version, "
        f"verdicts.created_at, verdicts.value AS verdict, {_VOTES} AS votes, {_HINTS} AS hints "
        f"FROM verdicts JOIN turns ON turns.id = verdicts.turn_id {_SESSION} {_SAMPLE}",
        *("verdicts.created_at", "verdicts.turn_id"),
        "verdicts.created_at DESC, verdicts.turn_id DESC",
        _verdict,
    ),
    "samples": _Listing(
        "SELECT samples.id, turns.id AS turn, turns.session_id AS session, user, policy_version, "
        "samples.created_at, samples.state, samples.reward, samples.hint IS NOT NULL AS hinted, "
        "samples.step_id AS step "
        f"FROM samples JOIN turns ON turns.id = samples.turn_id {_SESSION} {_VERDICT}",
        *("samples.created_at", "samples.turn_id", "samples.id DESC"),
        _flagged("hinted"),
    ),
    "steps": _Listing(
        "SELECT steps.id, status, parent, version, created_at, finished_at, "
        "(SELECT COUNT(*) FROM step_samples WHERE step_id = steps.id) AS samples, "
        "metrics, error, outage FROM steps",
        *("created_at", "steps.id", "steps.id DESC"),
        _step,
    ),
    "versions": _Listing(
        "SELECT versions.id, parent, step, created_at, state_ref IS NOT NULL AS saved, "
        "(SELECT id FROM steps WHERE steps.version = versions.id) AS made_by_step, "
        "(SELECT COUNT(*) FROM turns WHERE kind = 'main' AND policy_version = versions.id) "
        "AS main_turns FROM versions",
        *("created_at", "versions.id", "versions.id DESC"),
        _flagged("saved"),
    ),
}
