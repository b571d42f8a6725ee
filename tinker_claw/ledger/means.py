"""What turns were like so far, for estimates: lengths, shares and bills.

Rule: only what was counted; where nothing was, None.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinker_claw.ledger.database import Database
from tinker_claw.ledger.spend import Purpose
from tinker_claw.types import Usage

NEWEST = 200
"""Turns whose lengths are averaged: an agent's prompts grow and shrink with its set-up."""


@dataclass(frozen=True, slots=True)
class Means:
    """Means over this ledger; None: nothing to average yet."""

    turns: int
    """Main turns that the lengths rest on."""
    prompt_tokens: float | None
    reply_tokens: float | None
    serve: Usage | None
    """Billed per main turn; failed attempts and side turns included."""
    judge: Usage | None
    """Billed per judged turn."""
    teacher: Usage | None
    """Billed per turn that the teacher scored."""
    admitted: float | None
    """Samples per judged turn."""
    hinted: float | None
    """Share of the samples that carry a hint."""
    stale: float | None
    """Share of the trained samples that an older version had sampled."""


def read_means(database: Database) -> Means:
    lengths = database.row(
        "SELECT COUNT(*) AS n, AVG(prompt_tokens) AS prompt, AVG(completion_tokens) AS reply FROM "
        "(SELECT prompt_tokens, completion_tokens FROM turns WHERE kind = 'main' "
        "ORDER BY id DESC LIMIT ?)",
        NEWEST,
    )
    counts = database.row(
        "SELECT (SELECT COUNT(*) FROM verdicts) AS judged, COUNT(*) AS samples, "
        "SUM(hint IS NOT NULL) AS hinted, SUM(state = 'trained') AS trained, "
        "(SELECT COUNT(*) FROM samples JOIN steps ON steps.id = samples.step_id "
        "JOIN turns ON turns.id = samples.turn_id WHERE samples.state = 'trained' "
        "AND turns.policy_version <> steps.parent) AS stale FROM samples"
    )
    if lengths is None or counts is None:
        raise AssertionError("an aggregate has a row")
    return Means(
        turns=lengths["n"],
        prompt_tokens=lengths["prompt"],
        reply_tokens=lengths["reply"],
        serve=_per_turn(database, "serve"),
        judge=_per_turn(database, "judge"),
        teacher=_per_turn(database, "teacher"),
        admitted=_share(counts["samples"], counts["judged"]),
        hinted=_share(counts["hinted"], counts["samples"]),
        stale=_share(counts["stale"], counts["trained"]),
    )


def _share(part: int | None, whole: int | None) -> float | None:
    return min(1.0, (part or 0) / whole) if whole else None


def _per_turn(database: Database, purpose: Purpose) -> Usage | None:
    row = database.row(
        "SELECT SUM(prefill) AS prefill, SUM(cached) AS cached, SUM(sampled) AS sampled, "
        "SUM(trained) AS trained, (SELECT COUNT(DISTINCT turn_id) FROM spend "
        "JOIN turns ON turns.id = turn_id WHERE purpose = ? AND kind = 'main') AS turns "
        "FROM spend WHERE purpose = ?",
        purpose,
        purpose,
    )
    if row is None or not row["turns"]:
        return None
    turns = row["turns"]
    return Usage(
        prefill=round(row["prefill"] / turns),
        cached=round(row["cached"] / turns),
        sampled=round(row["sampled"] / turns),
        trained=round(row["trained"] / turns),
    )
