"""What a service billed, and what turns were like so far, for estimates.

Rule: what serving a turn cost is written in the turn's own transaction. What judging, the teacher
or a step cost is written when it ends, however it ends: a void step has cost its money, too. Means
are of what was counted; where nothing was, they are None.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tinker_claw.ledger.database import Database
from tinker_claw.types import Usage

Purpose = Literal["serve", "judge", "teacher", "train"]
NOTHING = Usage()
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
NEWEST = 200
"""Main turns that means rest on: an agent's prompts grow and shrink with its set-up, and a budget
asks before each judgement, however large the ledger is."""
_KINDS = ("prefill", "cached", "sampled", "trained")


@dataclass(frozen=True, slots=True)
class Bill:
    """Tokens billed for one purpose, and what they cost."""

    purpose: Purpose
    usage: Usage
    usd: float | None
    """None: the price was not known."""


@dataclass(frozen=True, slots=True)
class Spent:
    """A sum of bills."""

    usage: Usage = NOTHING
    usd: float = 0.0
    """Of the bills whose price was known."""
    unpriced: Usage = NOTHING
    """Tokens of the others."""

    def plus(self, bill: Bill) -> Spent:
        if bill.usd is None:
            return Spent(self.usage + bill.usage, self.usd, self.unpriced + bill.usage)
        return Spent(self.usage + bill.usage, self.usd + bill.usd, self.unpriced)


def write(
    tx: sqlite3.Connection, bill: Bill, *, turn_id: int | None = None, step_id: int | None = None
) -> None:
    """Add a bill within a transaction; a turn that was forgotten meanwhile is not named."""
    usage = bill.usage
    tx.execute(
        "INSERT INTO spend (created_at, purpose, turn_id, step_id, prefill, cached, sampled, "
        "trained, usd) VALUES (?, ?, (SELECT id FROM turns WHERE id = ?), ?, ?, ?, ?, ?, ?)",
        (
            *(time.time(), bill.purpose, turn_id, step_id),
            *(usage.prefill, usage.cached, usage.sampled, usage.trained, bill.usd),
        ),
    )


class SpendTable:
    """Bills, and their sums."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, bill: Bill, *, turn_id: int | None = None, step_id: int | None = None) -> None:
        with self._db.transaction() as tx:
            write(tx, bill, turn_id=turn_id, step_id=step_id)

    def total(self, since: float = 0.0) -> Spent:
        """Everything billed, from a time on (seconds since 1970)."""
        return self._sum("created_at >= ?", since)

    def by_purpose(self, since: float = 0.0) -> dict[Purpose, Spent]:
        return {
            purpose: self._sum("created_at >= ? AND purpose = ?", since, purpose)
            for purpose in PURPOSES
        }

    def of_turn(self, turn_id: int) -> Spent:
        """What serving, judging and teaching one turn cost."""
        return self._sum("turn_id = ?", turn_id)

    def of_step(self, step_id: int) -> Spent:
        """What one step cost, the scores that it needed included."""
        return self._sum("step_id = ?", step_id)

    def _sum(self, where: str, *values: Any) -> Spent:
        row = self._db.row(
            "SELECT TOTAL(usd) AS usd, "
            + ", ".join(
                f"COALESCE(SUM({name}), 0) AS {name}, "
                f"COALESCE(SUM({name} * (usd IS NULL)), 0) AS unpriced_{name}"
                for name in _KINDS
            )
            + f" FROM spend WHERE {where}",
            *values,
        )
        if row is None:
            return Spent()
        return Spent(
            usage=Usage(**{name: row[name] for name in _KINDS}),
            usd=row["usd"],
            unpriced=Usage(**{name: row[f"unpriced_{name}"] for name in _KINDS}),
        )


# Means


@dataclass(frozen=True, slots=True)
class Means:
    """Means over the newest turns of this ledger; None: nothing to average yet."""

    turns: int
    """Main turns that they rest on."""
    prompt_tokens: float | None
    reply_tokens: float | None
    serve: Usage | None
    """Billed per main turn; failed attempts and side turns included."""
    judge: Usage | None
    """Billed per judged turn."""
    teacher: Usage | None
    """Billed per turn that the teacher scored."""
    unaccepted: float | None
    """Share of the judged turns whose verdict is not +1."""
    admitted: float | None
    """Samples per judged turn."""
    hinted: float | None
    """Share of the samples that carry a hint."""
    stale: float | None
    """Share of the trained samples that an older version had sampled."""


def read_means(database: Database) -> Means:
    lengths = database.row(
        "SELECT COUNT(*) AS n, MIN(id) AS oldest, AVG(prompt_tokens) AS prompt, "
        "AVG(completion_tokens) AS reply FROM (SELECT id, prompt_tokens, completion_tokens "
        "FROM turns WHERE kind = 'main' ORDER BY id DESC LIMIT ?)",
        NEWEST,
    )
    since = None if lengths is None else lengths["oldest"]
    counts = database.row(
        "SELECT (SELECT COUNT(*) FROM verdicts WHERE turn_id >= ?1) AS judged, "
        "(SELECT COUNT(*) FROM verdicts WHERE turn_id >= ?1 AND value IS NOT 1) AS unaccepted, "
        "COUNT(*) AS samples, SUM(hint IS NOT NULL) AS hinted, SUM(state = 'trained') AS trained, "
        "(SELECT COUNT(*) FROM samples JOIN steps ON steps.id = samples.step_id "
        "JOIN turns ON turns.id = samples.turn_id WHERE turn_id >= ?1 "
        "AND samples.state = 'trained' AND turns.policy_version <> steps.parent) AS stale "
        "FROM samples WHERE turn_id >= ?1",
        since,
    )
    bills = database.one("SELECT MIN(id) FROM spend WHERE turn_id >= ?", since)
    if lengths is None or counts is None:
        raise AssertionError("an aggregate has a row")
    return Means(
        turns=lengths["n"],
        prompt_tokens=lengths["prompt"],
        reply_tokens=lengths["reply"],
        serve=_per_turn(database, "serve", bills),
        judge=_per_turn(database, "judge", bills),
        teacher=_per_turn(database, "teacher", bills),
        unaccepted=_share(counts["unaccepted"], counts["judged"]),
        admitted=_share(counts["samples"], counts["judged"]),
        hinted=_share(counts["hinted"], counts["samples"]),
        stale=_share(counts["stale"], counts["trained"]),
    )


def _share(part: int | None, whole: int | None) -> float | None:
    return min(1.0, (part or 0) / whole) if whole else None


def _per_turn(database: Database, purpose: Purpose, since: int | None) -> Usage | None:
    """`since`: the first bill that counts. Of serving, those of attempts that failed do, too, which
    name no turn; of all else only those of turns that were forgotten name none."""
    sums = ", ".join(f"SUM({name}) AS {name}" for name in _KINDS)
    row = database.row(
        f"SELECT {sums}, (SELECT COUNT(DISTINCT turn_id) FROM spend JOIN turns "
        "ON turns.id = turn_id WHERE spend.id >= ?2 AND purpose = ?1 AND kind = 'main') AS turns "
        "FROM spend WHERE id >= ?2 AND purpose = ?1 AND (turn_id IS NOT NULL OR ?1 = 'serve')",
        *(purpose, since),
    )
    if row is None or not row["turns"]:
        return None
    return Usage(**{name: round(row[name] / row["turns"]) for name in _KINDS})
