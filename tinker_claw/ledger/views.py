"""Turns and steps for readers, oldest first, even while a gateway writes.

Rule: nothing is locked or written. Words of users and agents are only in full rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields

from tinker_claw.ledger.database import Outside, Rows
from tinker_claw.ledger.turn_view import (
    Contents,
    Record,
    read_contents,
    read_prompt,
    turns_where,
)
from tinker_claw.privacy.redact import name_digest
from tinker_claw.types import Completion

VERDICTS = ("good", "neutral", "bad", "none")


@dataclass(frozen=True, slots=True)
class Filter:
    """Filter on turns; a field that is None selects all."""

    session: str | None = None
    """The ledger's number of a session, or the client's name for it."""
    user: str | None = None
    kind: str | None = None
    verdict: str | None = None
    """One of `VERDICTS`; none: judged, and no vote was valid."""
    trained: bool | None = None
    since: float | None = None
    """Earliest time, in seconds since 1970."""
    before: int | None = None
    """Only turns with lower ids."""


# "+" keeps SQLite from an index, so that turns are read in order of id.
_CONDITIONS: Mapping[str, str] = {
    "session": "session_id IN (SELECT sessions.id FROM json_each(?) AS named "
    "CROSS JOIN sessions ON named.value IN (sessions.key, CAST(sessions.id AS TEXT)))",
    "user": "+session_id IN (SELECT id FROM sessions WHERE user = ?)",
    "kind": "+kind = ?",
    "verdict": "EXISTS (SELECT 1 FROM verdicts AS v WHERE v.turn_id = turns.id "
    "AND v.value IS CASE ? WHEN 'good' THEN 1 WHEN 'neutral' THEN 0 WHEN 'bad' THEN -1 END)",
    "trained": "? = EXISTS (SELECT 1 FROM samples AS s "
    "WHERE s.step_id IS NOT NULL AND s.turn_id = turns.id)",
    "since": "created_at >= ?",
    "before": "id < ?",
}
"""SQL of the fields of a filter."""


def read_turns(rows: Rows, wanted: Filter, limit: int | None) -> list[Record]:
    """Return the newest `limit` matching turns, oldest first."""
    criteria = {name: value for name, value in asdict(wanted).items() if value is not None}
    if (which := wanted.session) is not None:
        criteria["session"] = json.dumps([which, name_digest(which)])
    where = " AND ".join(_CONDITIONS[name] for name in criteria) or "TRUE"
    # Rows of turns are wide, so the wanted ids are selected first.
    newest = f"(SELECT id FROM turns WHERE {where} ORDER BY id DESC LIMIT ?)"
    most = -1 if limit is None else limit
    query = f"WHERE turns.id IN {newest} ORDER BY turns.id"
    return turns_where(rows, query, *criteria.values(), most)


# A field of metrics for programs only is long; SQLite removes it without Python's lock.
_STEPS = """
SELECT id, status, parent, version, lesson, created_at, finished_at,
  (SELECT COUNT(*) FROM step_samples WHERE step_id = steps.id) AS samples,
  json_remove(metrics, '$.rule') AS metrics, error, void > 1 AS outage, void = 3 AS refused
FROM steps WHERE created_at >= ? ORDER BY id DESC LIMIT ?
"""


def read_steps(rows: Rows, limit: int | None, since: float = 0) -> list[Record]:
    """Return the newest `limit` steps that began from a time on, oldest first."""
    newest = rows.rows(_STEPS, since, -1 if limit is None else limit)
    return [
        {
            **dict(row),
            "metrics": json.loads(row["metrics"] or "{}"),
            "outage": bool(row["outage"]),
            "refused": bool(row["refused"]),
        }
        for row in reversed(newest)
    ]


_TOKENS = ("prompt", "tokens", "logprobs", "topk_ids", "topk_logprobs", "advantages")
"""Fields with a value for each token."""


def turns_in_full(
    ledger: Outside, turns: Iterable[int] | None = None, *, tokens: bool
) -> Iterator[Record]:
    """Yield turns with all that is known of them, each from one consistent snapshot.

    Args:
        turns: ids; None: all except forgotten ones, oldest first.
        tokens: whether to include ids and logprobs.
    """
    if turns is None:
        turns = ledger.column("SELECT id FROM turns WHERE state <> 'forgotten' ORDER BY id")
    for turn_id in turns:
        with ledger.moment():
            contents = read_contents(ledger, turn_id)
            prompt = read_prompt(ledger, turn_id) if tokens else ()
        if contents is None:  # forgotten meanwhile
            continue
        more = _fields(contents)
        turn, completion = more.pop("turn"), more.pop("completion")
        more |= {"hint_texts": more.pop("hints"), "prompt": prompt}
        more["next_state"] = contents.next_state and asdict(contents.next_state)
        full = {**turn, **_fields(completion), **more}
        yield {name: full[name] for name in full if tokens or name not in _TOKENS}


def _fields(record: Completion | Contents) -> Record:
    return {field.name: getattr(record, field.name) for field in fields(record)}
