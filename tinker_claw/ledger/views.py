"""Filtered rows of a table for readers, oldest first, even while a gateway writes.

Rule: nothing is locked or written. Words of users and agents are only in full rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from tinker_claw.ledger.database import Outside, Rows
from tinker_claw.ledger.turn_view import (
    FEEDBACK,
    TURNS,
    Contents,
    Record,
    TurnView,
    read_contents,
    read_prompt,
    turns_where,
)
from tinker_claw.privacy.redact import name_digest
from tinker_claw.types import Completion

Table = Literal["turns", "verdicts", "feedback", "samples", "steps"]


@dataclass(frozen=True, slots=True)
class Filter:
    """Filter on rows; a field that is None selects all."""

    session: str | None = None
    """The ledger's number of a session, or the client's name for it."""
    user: str | None = None
    kind: str | None = None
    verdict: str | None = None
    """One of "1", "0", "-1", or "none": judged, and no vote was valid."""
    trained: bool | None = None
    since: float | None = None
    """Earliest time, in seconds since 1970."""
    before: int | None = None
    """Only rows of turns with lower ids."""
    id: int | None = None


_OF_TURN = "turns.id AS turn, turns.session_id AS session, sessions.user, policy_version"
_ATTEMPT = 'sessions.task, groups.name AS "group"'
_HINTS = "(SELECT COUNT(*) FROM hints WHERE hints.turn_id = turns.id) AS hints"
_FIELDS: Mapping[Table, str] = {
    "verdicts": f"{_OF_TURN}, verdicts.created_at, value AS verdict, "
    "verdicts.source AS verdict_by, verdicts.judged AS judge, verdicts.score, "
    "(SELECT json_group_array(value) FROM (SELECT value FROM votes WHERE votes.turn_id = turns.id "
    f"ORDER BY n)) AS votes, {_HINTS}",
    "feedback": f"feedback.id, {_OF_TURN}, {FEEDBACK}",
    "samples": f"samples.id, {_OF_TURN}, samples.created_at, state, reward, advantage, "
    f'hint IS NOT NULL AS hinted, {_ATTEMPT}, idx AS "index", step_id AS step',
    "steps": "id, status, parent, version, lesson, created_at, finished_at, "
    "(SELECT COUNT(*) FROM step_samples WHERE step_id = steps.id) AS samples, "
    # A field for programs only is long; SQLite removes it without Python's lock.
    "json_remove(metrics, '$.rule') AS metrics, error, void > 1 AS outage, void = 3 AS refused",
}
"""Fields of a record, in order; those of turns are `TurnView.record`."""
_READ_AS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("hinted", "outage", "refused", "final"), bool),
    "votes": json.loads,
    "metrics": lambda text: json.loads(text or "{}"),
}
"""Converters of fields that SQLite stores as numbers or texts."""
_FROM: Mapping[Table, str] = {
    "steps": "steps",
    "feedback": f"{TURNS} JOIN feedback ON feedback.turn_id = turns.id",
}


def read(rows: Rows, table: Table, wanted: Filter, limit: int | None) -> list[Record]:
    """Return the newest `limit` matching rows, oldest first."""
    if table == "turns":
        return [turn.record for turn in read_turns(rows, wanted, limit)]
    where, values = _where(table, wanted)
    by = "verdicts.created_at DESC, turns" if table == "verdicts" else table
    newest = rows.rows(
        f"SELECT {_FIELDS[table]} FROM {_FROM.get(table, TURNS)} "
        f"{where} ORDER BY {by}.id DESC LIMIT ?",
        *values,
        -1 if limit is None else limit,
    )
    records = [dict(row) for row in reversed(newest)]
    for record in records:
        for name in _READ_AS.keys() & record.keys():
            record[name] = _READ_AS[name](record[name])
    return records


def read_turns(rows: Rows, wanted: Filter, limit: int | None) -> list[TurnView]:
    """Return the newest `limit` matching turns, oldest first."""
    where, values = _where("turns", wanted)
    # Rows of turns are wide, so the wanted ids are selected first.
    newest = f"(SELECT id FROM turns {where} ORDER BY id DESC LIMIT ?)"
    most = -1 if limit is None else limit
    return turns_where(rows, f"WHERE turns.id IN {newest} ORDER BY turns.id", *values, most)


# "+" keeps SQLite from an index, so that turns are read in order of id.
_CONDITIONS: Mapping[str, str] = {
    "session": "turns.session_id IN (SELECT sessions.id FROM json_each(?) AS named "
    "CROSS JOIN sessions ON named.value IN (sessions.key, CAST(sessions.id AS TEXT)))",
    "user": "+turns.session_id IN (SELECT id FROM sessions WHERE user = ?)",
    "kind": "+turns.kind = ?",
    "verdict": "EXISTS (SELECT 1 FROM verdicts AS v WHERE v.turn_id = turns.id "
    "AND v.value IS NULLIF(?, 'none'))",
    "trained": "? = EXISTS (SELECT 1 FROM samples AS s "
    "WHERE s.step_id IS NOT NULL AND s.turn_id = turns.id)",
    "since": "{table}.created_at >= ?",
    "before": "turns.id < ?",
    "id": "{table}.id = ?",
}
"""SQL of the fields of a filter."""


def _where(table: Table, wanted: Filter) -> tuple[str, list[Any]]:
    criteria = {name: value for name, value in asdict(wanted).items() if value is not None}
    if (which := wanted.session) is not None:
        criteria["session"] = json.dumps([which, name_digest(which)])
    conditions = [_CONDITIONS[name].format(table=table) for name in criteria]
    if table in ("verdicts", "samples"):
        conditions.append(f"{table}.turn_id IS NOT NULL")
    return f"WHERE {' AND '.join(conditions)}" if conditions else "", [*criteria.values()]


_TOKENS = ("prompt", "tokens", "logprobs", "topk_ids", "topk_logprobs", "advantages")
"""Fields with a value for each token."""


def turns_in_full(ledger: Outside, *, tokens: bool) -> Iterator[Record]:
    """Yield all turns except forgotten ones, oldest first, each from one consistent snapshot.

    Args:
        tokens: whether to include ids and logprobs.
    """
    for turn in ledger.column("SELECT id FROM turns WHERE state <> 'forgotten' ORDER BY id"):
        with ledger.moment():
            for record in read(ledger, "turns", Filter(id=turn), 1):
                full = _more(ledger, turn, record, prompt=tokens)
                yield {k: v for k, v in full.items() if tokens or k not in _TOKENS}


def in_full(ledger: Outside, table: Table, record: Record) -> Record:
    """Return a record of `read` with the texts and samples of its turn, or with the settings of a
    step, from one snapshot."""
    with ledger.moment():
        if table == "steps":
            query = "SELECT metrics -> '$.rule' FROM steps WHERE id = ?"
            return record | {"rule": json.loads(ledger.one(query, record["id"]) or "null")}
        return _more(ledger, record["turn" if "turn" in record else "id"], record)


def _more(rows: Rows, turn_id: int, record: Record, *, prompt: bool = True) -> Record:
    """Return the record with all that is known of the turn; unchanged where it was forgotten
    meanwhile. `prompt`: whether to read its ids, tens of thousands in long sessions."""
    contents = read_contents(rows, turn_id)
    if contents is None:
        return record
    more = {**_fields(contents.completion), **_fields(contents)}
    more["prompt"] = read_prompt(rows, turn_id) if prompt else ()
    more |= {"next_state": contents.next_state and asdict(contents.next_state)}
    more["hint_texts"] = more.pop("hints")
    del more["completion"]
    return record | more


def _fields(record: Completion | Contents) -> Record:
    return {field.name: getattr(record, field.name) for field in fields(record)}
