"""All that the ledger knows of one turn, and of what became of it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinker_claw.ledger.figures import StepFigures, live_versions, run_of, step_of
from tinker_claw.ledger.forget import FORGOTTEN
from tinker_claw.ledger.reading import Rows
from tinker_claw.ledger.samples import teacher_of
from tinker_claw.ledger.turns import completion_of
from tinker_claw.types import Completion, HintScores, Kind, Lost, NextState, Verdict, Vote

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
