"""A ledger in sums, for a reader who wants to know how it goes.

Rule: answered from indexes and narrow tables. However long a ledger is, no row of `turns`, which
are wide, is read for that.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.outcome import run_of
from tinker_claw.ledger.versions import held, pinned, read_line
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
    held: str | None
    """Why learning waits until a rollback says from where to go on; None: it does not."""
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

    @property
    def verdicts(self) -> dict[str, int]:
        """Judged turns by what was said of them; `none`: no vote was valid."""
        good, bad = sum(v.good for v in self.versions), sum(v.bad for v in self.versions)
        voted, judged = sum(v.voted for v in self.versions), sum(v.judged for v in self.versions)
        return {"good": good, "neutral": voted - good - bad, "bad": bad, "none": judged - voted}

    @property
    def queued(self) -> int:
        return self.samples.get("queued", 0)

    @property
    def measures(self) -> tuple[Measure, ...]:
        """Of the versions that a rollback has not left behind."""
        return measures([v for v in self.versions if v.version in self.live], self.first_versions)


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
        held=held(rows),
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


# Whether learning helps on this user's own traffic, as far as their turns can tell. A share never
# stands without its interval, and where intervals overlap nothing is claimed.

FEWEST = 30
"""Verdicts below which versions are taken together with their neighbours."""
MOST_GROUPS = 5
"""Groups of versions with learning; more say less."""
_Z = 1.959964
"""Of the normal distribution: 95 % lie within."""


@dataclass(frozen=True, slots=True)
class Share:
    """Of the replies of some successive versions."""

    first: int
    last: int
    good: int
    of: int

    @property
    def value(self) -> float:
        return self.good / self.of

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % score interval (Wilson 1927, J. Am. Stat. Assoc. 22:209-212)."""
        p, z2 = self.value, _Z * _Z / self.of
        middle = (p + z2 / 2) / (1 + z2)
        half = _Z / (1 + z2) * math.sqrt(p * (1 - p) / self.of + z2 / (4 * self.of))
        return max(0.0, middle - half), min(1.0, middle + half)

    @property
    def versions(self) -> str:
        return f"v{self.first}" if self.first == self.last else f"v{self.first} to v{self.last}"

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.0%} ({low:.0%} to {high:.0%}) by {self.versions}"


@dataclass(frozen=True, slots=True)
class Measure:
    """One question to the record, and its answer by groups of versions."""

    name: str
    shares: tuple[Share, ...]

    @property
    def meaning(self) -> str:
        """What the first and the last group say together."""
        if not self.shares:
            return "no verdicts yet"
        first, last = self.shares[0], self.shares[-1]
        if len(self.shares) == 1:
            return f"nothing to compare yet: {first.of} verdicts, all in one group"
        told = f"{last}, {first}"
        if last.interval[0] > first.interval[1]:
            return f"better than at first: {told}"
        if last.interval[1] < first.interval[0]:
            return f"worse than at first: {told}"
        return f"not enough turns to tell: {told}, and the intervals overlap"


def measures(
    versions: Sequence[VersionFigures], untrained: AbstractSet[int]
) -> tuple[Measure, ...]:
    """Good verdicts, and accepted first replies.

    Args:
        versions: by id.
        untrained: ids of versions that no step has made.
    """
    return (
        Measure("good verdicts", groups(versions, untrained, lambda v: (v.good, v.voted))),
        Measure(
            "accepted first replies", groups(versions, untrained, lambda v: (v.accepted, v.firsts))
        ),
    )


def groups(
    versions: Sequence[VersionFigures],
    untrained: AbstractSet[int],
    count: Callable[[VersionFigures], tuple[int, int]],
) -> tuple[Share, ...]:
    """Successive versions together, so that each group has enough verdicts to say something.

    Versions before any step stay apart from later ones if they have enough; later ones make at
    most `MOST_GROUPS` groups. A small rest at the end belongs to the last group.
    """
    counted = [Share(v.version, v.version, *count(v)) for v in versions if count(v)[1]]
    before = [share for share in counted if share.first in untrained]
    if sum(share.of for share in before) < FEWEST:
        before = []
    after = [share for share in counted if share not in before]
    least = max(FEWEST, math.ceil(sum(share.of for share in after) / MOST_GROUPS))
    gathered = list[Share]()
    for share in after:
        if gathered and gathered[-1].of < least:
            gathered[-1] = _together([gathered[-1], share])
        else:
            gathered.append(share)
    if len(gathered) > 1 and gathered[-1].of < max(FEWEST, least / 2):
        gathered[-2:] = [_together(gathered[-2:])]
    return (*([_together(before)] if before else []), *gathered)


def _together(some: Sequence[Share]) -> Share:
    good, of = sum(share.good for share in some), sum(share.of for share in some)
    return Share(some[0].first, some[-1].last, good, of)
