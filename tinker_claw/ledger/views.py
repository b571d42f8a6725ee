"""What a listed row leaves out: texts, ids, logprobs, and where weights lie."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tinker_claw.ledger.codec import load, unpack_float_rows, unpack_floats
from tinker_claw.ledger.database import Outside, Rows, reading
from tinker_claw.ledger.prune import FORGOTTEN
from tinker_claw.ledger.samples import teacher_of
from tinker_claw.ledger.turns import completion_of
from tinker_claw.ledger.versions import pinned
from tinker_claw.types import Completion, HintScores, Kind, Lost, NextState, Verdict, Vote


def in_full(ledger: Outside, table: Table, record: Record) -> Record:
    """The record of `listing.read` with all that the ledger holds of it, at one moment."""
    with ledger.moment():
        return record | _FULL[table](ledger, record)


def _full_turn(rows: Rows, record: Record) -> Record:
    row = rows.row(
        "SELECT turns.*, sessions.key FROM turns JOIN sessions ON sessions.id = session_id "
        "WHERE turns.id = ?",
        record["id"],
    )
    if row is None:  # forgotten meanwhile
        return {}
    done = completion_of(row)
    return {
        "session_key": row["key"],
        "trace": row["trace"],
        "stop_reason": done.stop_reason,
        "params": json.loads(row["params"]),
        "cached_tokens": done.cached_tokens,
        "request_text": row["request_text"],
        "reply_text": row["reply_text"],
        **_said(rows, record["id"]),
        "prompt": load(rows, row),
        "tokens": done.tokens,
        "logprobs": done.logprobs,
        "topk_ids": done.topk_ids,
        "topk_logprobs": done.topk_logprobs,
    }


def _full_verdict(rows: Rows, record: Record) -> Record:
    return _said(rows, record["turn"])


def _said(rows: Rows, turn_id: int) -> Record:
    """What came next, and what was made of it."""
    state = rows.row("SELECT role, text FROM next_states WHERE turn_id = ?", turn_id)
    votes = rows.rows(
        "SELECT about, value, answer FROM votes WHERE turn_id = ? ORDER BY about DESC, n", turn_id
    )
    hints = rows.rows("SELECT text FROM hints WHERE turn_id = ? ORDER BY rank", turn_id)
    return {
        "next_state": dict(state) if state else None,
        "answers": [dict(vote) for vote in votes],
        "hint_texts": [hint["text"] for hint in hints],
    }


def _full_sample(rows: Rows, record: Record) -> Record:
    row = rows.row(
        "SELECT hint, teacher_logprobs, teacher_targets, overlap, topk FROM samples "
        "JOIN turns ON turns.id = turn_id WHERE samples.id = ?",
        record["id"],
    )
    if row is None:
        return {}
    scored = row["teacher_logprobs"] is not None
    return {
        "hint": row["hint"],
        "overlap": row["overlap"],
        "teacher_logprobs": unpack_floats(row["teacher_logprobs"]) if scored else None,
        "teacher_targets": (
            unpack_float_rows(row["teacher_targets"], row["topk"]) if scored else None
        ),
    }


def _full_step(rows: Rows, record: Record) -> Record:
    taken = rows.rows(
        "SELECT samples.id AS sample, turn_id AS turn FROM step_samples "
        "JOIN samples ON samples.id = sample_id WHERE step_samples.step_id = ? ORDER BY samples.id",
        record["id"],
    )
    metrics = rows.one("SELECT metrics FROM steps WHERE id = ?", record["id"])
    rule: Any = json.loads(metrics).get("rule") if metrics else None
    return {"taken": [dict(row) for row in taken], "rule": rule}


def _full_version(rows: Rows, record: Record) -> Record:
    row = rows.row("SELECT state_ref, sampler_ref FROM versions WHERE id = ?", record["id"])
    return dict(row) if row else {}


_FULL: dict[Table, Callable[[Rows, Record], Record]] = {
    "turns": _full_turn,
    "verdicts": _full_verdict,
    "samples": _full_sample,
    "steps": _full_step,
    "versions": _full_version,
}


# Rows of the ledger as a reader asks for them: a table, filtered, the newest at the end.
#
# Rule: what a user or his agent wrote, and ids from which it can be read, are only in what is
# asked
# for in full.


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


# The newest turns of a ledger, read from outside while a gateway may be writing to it.
#
# Rule: nothing is locked or written, and no user's words are read.


_RECENT_TURNS = """
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
            turns=tuple(_turn(row) for row in reversed(ledger.rows(_RECENT_TURNS, limit))),
            newest_at=ledger.one(f"SELECT MAX(at) FROM ({newest})"),
        )


def _turn(row: sqlite3.Row) -> RecentTurn:
    values: dict[str, Any] = dict(row)
    for name in ("session_closed", "passed_over", "judged"):
        values[name] = bool(values[name])
    values["kind"] = Kind(values["kind"])
    return RecentTurn(**values)


# All that the ledger knows of one turn, and of what became of it.


_TURN = """
SELECT turns.*, user, sessions.key, closed_at, verdicts.turn_id IS NOT NULL AS judged,
  verdicts.value AS verdict, versions.step AS version_step,
  (SELECT MIN(later.id) FROM turns AS later WHERE later.session_id = turns.session_id
    AND later.kind = 'main' AND later.id > turns.id) AS passed_by,
  (SELECT lost FROM turns AS later WHERE later.session_id = turns.session_id
    AND later.kind = 'main' AND later.id > turns.id ORDER BY later.id LIMIT 1) AS passed_lost
FROM turns JOIN sessions ON sessions.id = session_id
  JOIN versions ON versions.id = policy_version
  LEFT JOIN verdicts ON verdicts.turn_id = turns.id
WHERE turns.id = ?
"""


@dataclass(frozen=True, slots=True)
class SampleHistory:
    """A sample and the steps that it was in."""

    id: int
    state: str
    reward: Vote | None
    teacher: HintScores | None
    ahead: int
    """Queued samples that are older."""
    tries: tuple[StepFigures, ...]
    """Steps that were begun with it, oldest first: void ones, and the one that trained it."""
    trained_in: StepFigures | None
    rewards: tuple[Vote | None, ...]
    """Of all samples of that step; () without one."""
    parent_step: int | None
    """Optimizer steps before that one."""
    left_behind: bool
    """A rollback went back behind the version that this step made."""


@dataclass(frozen=True, slots=True)
class History:
    """A turn from its request to the version that it helped to make."""

    id: int
    session_id: int
    session_key: str
    session_closed: bool
    user: str
    index: int
    kind: Kind
    kind_reason: str
    call: str
    version: int
    version_step: int
    fallback: str | None
    misfit: str | None
    """How a call breaks the schema of a strict tool; None: none does."""
    created_at: float
    prompt_tokens: int
    completion: Completion
    completion_tokens: int
    """More than `completion` holds where its tokens were not kept, or were dropped."""
    request_text: str
    reply_text: str
    has_hint_place: bool
    untrained_because: str | None
    next_state: NextState | None
    passed_by: int | None
    """The next main turn of the session."""
    passed_lost: Lost | None
    """Why that one could not be tied to the turn that it answers."""
    lost: Lost | None
    """Why this one could not."""
    verdict: Verdict | None
    """None: not judged."""
    hints: tuple[str, ...]
    in_vain: tuple[str, ...]
    """What came of tries to judge it that gave no verdict."""
    sample: SampleHistory | None
    queued: int
    """Samples that wait for a step just now."""
    batch: int | None
    """Samples of the newest step that was taken; None: there is none."""
    newest_step: int
    usd: float | None
    """What serving, judging and teaching it cost; None: no price was known."""
    run: Mapping[str, str]
    forgotten: bool
    """What is left of it says that it was trained, and no more."""
    left_behind: bool
    """A rollback went back behind the version that answered."""


def read_history(rows: Rows, turn_id: int) -> History | None:
    """None: there is no such turn."""
    row = rows.row(_TURN, turn_id)
    if row is None:
        return None
    state = rows.row("SELECT role, text FROM next_states WHERE turn_id = ?", turn_id)
    votes = rows.rows(
        "SELECT about, value, answer FROM votes WHERE turn_id = ? ORDER BY n", turn_id
    )
    hints = rows.rows("SELECT text FROM hints WHERE turn_id = ? ORDER BY rank", turn_id)
    return History(
        id=row["id"],
        session_id=row["session_id"],
        session_key=row["key"],
        session_closed=row["closed_at"] is not None,
        user=row["user"],
        index=row["idx"],
        kind=Kind(row["kind"]),
        kind_reason=row["kind_reason"],
        call=row["call"],
        version=row["policy_version"],
        version_step=row["version_step"],
        fallback=row["fallback"],
        misfit=row["misfit"],
        created_at=row["created_at"],
        prompt_tokens=row["prompt_tokens"],
        completion=completion_of(row),
        completion_tokens=row["completion_tokens"],
        request_text=row["request_text"],
        reply_text=row["reply_text"],
        has_hint_place=row["hint_at"] is not None,
        untrained_because=row["untrained_because"],
        next_state=NextState(role=state["role"], text=state["text"]) if state else None,
        passed_by=row["passed_by"],
        passed_lost=_lost(row["passed_lost"]),
        lost=_lost(row["lost"]),
        verdict=Verdict(tuple(v["value"] for v in votes if v["about"] == "verdict"), row["verdict"])
        if row["judged"]
        else None,
        hints=tuple(hint["text"] for hint in hints),
        in_vain=tuple(v["answer"] for v in votes if v["about"] == "in vain"),
        sample=_sample(rows, turn_id),
        queued=rows.one("SELECT COUNT(*) FROM samples WHERE state = 'queued'"),
        batch=_batch(rows),
        newest_step=rows.one("SELECT step FROM versions ORDER BY id DESC LIMIT 1"),
        usd=rows.one("SELECT SUM(usd) FROM spend WHERE turn_id = ?", turn_id),
        run=run_of(rows),
        forgotten=row["kind_reason"] == FORGOTTEN,
        left_behind=_left_behind(rows, row["policy_version"]),
    )


def _left_behind(rows: Rows, version: int) -> bool:
    """Whether the newest version descends from another, and no crash is the reason."""
    live = live_versions(rows)
    while version not in live:
        row = rows.row(
            "SELECT parent FROM versions WHERE id = ? AND EXISTS "
            "(SELECT 1 FROM steps WHERE version = versions.id AND status = 'void')",
            version,
        )
        if row is None or row["parent"] is None:
            return True
        version = row["parent"]  # whose samples are queued again, and go on
    return False


def _batch(rows: Rows) -> int | None:
    metrics = rows.one(
        "SELECT metrics FROM steps WHERE status = 'committed' ORDER BY id DESC LIMIT 1"
    )
    known: Mapping[str, Any] = json.loads(metrics) if metrics else {}
    return known.get("samples")


def _lost(cause: str | None) -> Lost | None:
    return Lost(cause) if cause else None


def _sample(rows: Rows, turn_id: int) -> SampleHistory | None:
    row = rows.row(
        "SELECT samples.*, topk FROM samples JOIN turns ON turns.id = turn_id WHERE turn_id = ?",
        turn_id,
    )
    if row is None:
        return None
    tries = rows.rows(
        "SELECT steps.* FROM step_samples JOIN steps ON steps.id = step_samples.step_id "
        "WHERE sample_id = ? ORDER BY steps.id",
        row["id"],
    )
    parent = rows.one(
        "SELECT versions.step FROM steps JOIN versions ON versions.id = steps.parent "
        "WHERE steps.id = ?",
        row["step_id"],
    )
    return SampleHistory(
        id=row["id"],
        state=row["state"],
        reward=row["reward"],
        teacher=teacher_of(row),
        ahead=rows.one("SELECT COUNT(*) FROM samples WHERE state = 'queued' AND id < ?", row["id"]),
        tries=tuple(step_of(one) for one in tries),
        trained_in=next((step_of(one) for one in tries if one["id"] == row["step_id"]), None),
        rewards=_rewards(rows, row),
        parent_step=parent,
        left_behind=any(
            one["id"] == row["step_id"] and _left_behind(rows, one["version"]) for one in tries
        ),
    )


def _rewards(rows: Rows, row: sqlite3.Row) -> tuple[Vote | None, ...]:
    found = rows.rows(
        "SELECT reward FROM step_samples JOIN samples ON samples.id = sample_id "
        "WHERE step_samples.step_id = ? ORDER BY samples.id",
        row["step_id"],
    )
    return tuple(one["reward"] for one in found)


# Sums over a whole ledger, for a reader who wants to know how it goes.
#
# Rule: answered from indexes and narrow tables. However long a ledger is, no row of `turns` is
# read
# but those that are open.


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


# Turns as records to take along: one that says everything for each, one after the other.
#
# Rule: only a few are in memory at a time, and each is as it is at one moment.


_PAGE = 50
_TURNS = """
SELECT turns.*, user, sessions.key, next_states.role, next_states.text, verdicts.value AS verdict,
  verdicts.turn_id IS NOT NULL AS judged, samples.state AS sample,
  CASE WHEN samples.state = 'trained' THEN samples.step_id END AS trained_in_step
FROM turns JOIN sessions ON sessions.id = session_id
  LEFT JOIN next_states ON next_states.turn_id = turns.id
  LEFT JOIN verdicts ON verdicts.turn_id = turns.id
  LEFT JOIN samples ON samples.turn_id = turns.id
WHERE turns.id > ? AND kind_reason <> ? ORDER BY turns.id LIMIT ?
"""


def turns_in_full(ledger: Outside, *, tokens: bool) -> Iterator[dict[str, Any]]:
    """All turns, oldest first. `tokens`: with ids and logprobs."""
    after = 0
    while True:
        with ledger.moment():
            rows = ledger.rows(_TURNS, after, FORGOTTEN, _PAGE)
            page = [_record(ledger, row, tokens=tokens) for row in rows]
        if not page:
            return
        yield from page
        after = page[-1]["id"]


def _record(ledger: Outside, row: Any, *, tokens: bool) -> dict[str, Any]:
    hints = ledger.rows("SELECT text FROM hints WHERE turn_id = ? ORDER BY rank", row["id"])
    record: dict[str, Any] = {
        "id": row["id"],
        "session": row["session_id"],
        "session_key": row["key"],
        "user": row["user"],
        "index": row["idx"],
        **{name: row[name] for name in ("kind", "call", "policy_version", "created_at")},
        "request": row["request_text"],
        "reply": row["reply_text"],
        "next_state": None if row["role"] is None else {"role": row["role"], "text": row["text"]},
        **{"judged": bool(row["judged"]), "verdict": row["verdict"]},
        "hints": [hint["text"] for hint in hints],
        **{name: row[name] for name in ("sample", "trained_in_step", "untrained_because")},
    }
    if tokens:
        done = completion_of(row)
        record |= {"prompt": load(ledger, row), "tokens": done.tokens, "logprobs": done.logprobs}
    return record
