"""What a listed row leaves out: texts, ids, logprobs, and where weights lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tinker_claw.ledger.codec import unpack_float_rows, unpack_floats
from tinker_claw.ledger.listing import Record, Table
from tinker_claw.ledger.prompts import load
from tinker_claw.ledger.reading import Outside, Rows
from tinker_claw.ledger.turns import completion_of


def in_full(ledger: Outside, table: Table, record: Record) -> Record:
    """The record of `listing.read` with all that the ledger holds of it, at one moment."""
    with ledger.moment():
        return record | _FULL[table](ledger, record)


def _turn(rows: Rows, record: Record) -> Record:
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


def _verdict(rows: Rows, record: Record) -> Record:
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


def _sample(rows: Rows, record: Record) -> Record:
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


def _step(rows: Rows, record: Record) -> Record:
    taken = rows.rows(
        "SELECT samples.id AS sample, turn_id AS turn FROM step_samples "
        "JOIN samples ON samples.id = sample_id WHERE step_samples.step_id = ? ORDER BY samples.id",
        record["id"],
    )
    metrics = rows.one("SELECT metrics FROM steps WHERE id = ?", record["id"])
    rule: Any = json.loads(metrics).get("rule") if metrics else None
    return {"taken": [dict(row) for row in taken], "rule": rule}


def _version(rows: Rows, record: Record) -> Record:
    row = rows.row("SELECT state_ref, sampler_ref FROM versions WHERE id = ?", record["id"])
    return dict(row) if row else {}


_FULL: dict[Table, Callable[[Rows, Record], Record]] = {
    "turns": _turn,
    "verdicts": _verdict,
    "samples": _sample,
    "steps": _step,
    "versions": _version,
}
