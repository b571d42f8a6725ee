"""The newest turns of a ledger, read from outside while a gateway may be writing to it.

Rule: nothing is locked or written, and no user's words are read.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_claw.ledger.reading import reading
from tinker_claw.types import Kind

_TURNS = """
SELECT turns.id, turns.created_at, sessions.user, sessions.key AS session_key, session_id, kind,
  kind_reason, call, policy_version, prompt_tokens, completion_tokens, fallback, untrained_because,
  sessions.closed_at IS NOT NULL AS session_closed,
  EXISTS (SELECT 1 FROM turns AS later WHERE later.session_id = turns.session_id
    AND later.kind = 'main' AND later.id > turns.id) AS passed_over,
  next_states.role AS next_role,
  verdicts.turn_id IS NOT NULL AS judged, verdicts.value AS verdict,
  (SELECT COUNT(*) FROM hints WHERE hints.turn_id = turns.id) AS hints,
  samples.state AS sample, samples.step_id, steps.version AS step_version
FROM turns JOIN sessions ON sessions.id = turns.session_id
  LEFT JOIN next_states ON next_states.turn_id = turns.id
  LEFT JOIN verdicts ON verdicts.turn_id = turns.id
  LEFT JOIN samples ON samples.turn_id = turns.id
  LEFT JOIN steps ON steps.id = samples.step_id
ORDER BY turns.id DESC LIMIT ?
"""
_LATELY = 1000
"""Rows of a table among which the newest is sought: the last one, unless a clock was set back."""
_TIMES = ("turns", "next_states", "verdicts", "samples", "steps", "versions", "spend")


@dataclass(frozen=True, slots=True)
class RecentTurn:
    """A turn, and how far it has come."""

    id: int
    created_at: float
    user: str
    session_id: int
    session_key: str
    session_closed: bool
    passed_over: bool
    """A later main turn of its session exists."""
    kind: Kind
    kind_reason: str
    call: str
    policy_version: int
    prompt_tokens: int
    completion_tokens: int
    fallback: str | None
    untrained_because: str | None
    next_role: str | None
    """None: no next state has come."""
    judged: bool
    verdict: int | None
    """None of a judged turn: no vote was valid."""
    hints: int
    sample: str | None
    """queued, trained, expired or quarantined; None: it is no sample."""
    step_id: int | None
    step_version: int | None


@dataclass(frozen=True, slots=True)
class Recent:
    """What a ledger holds just now."""

    turns: tuple[RecentTurn, ...]
    """Oldest first."""
    newest_at: float | None
    """When the newest row was written, seconds since 1970; None: there is none."""


def read_recent(path: Path, limit: int) -> Recent:
    """The `limit` newest turns of the ledger file `path`.

    Raises:
        LedgerError: there is no such file, it is no ledger, or of another schema.
    """
    newest = " UNION ALL ".join(
        "SELECT MAX(created_at) AS at FROM "
        f"(SELECT created_at FROM {name} ORDER BY rowid DESC LIMIT {_LATELY})"
        for name in _TIMES
    )
    with reading(path) as ledger, ledger.moment():
        return Recent(
            turns=tuple(_turn(row) for row in reversed(ledger.rows(_TURNS, limit))),
            newest_at=ledger.one(f"SELECT MAX(at) FROM ({newest})"),
        )


def _turn(row: sqlite3.Row) -> RecentTurn:
    values: dict[str, Any] = dict(row)
    for name in ("session_closed", "passed_over", "judged"):
        values[name] = bool(values[name])
    values["kind"] = Kind(values["kind"])
    return RecentTurn(**values)
