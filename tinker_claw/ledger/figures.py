"""A ledger in sums, for a reader who wants to know how it goes.

Rule: answered from indexes and narrow tables. However long a ledger is, no row of `turns`, which
are wide, is read for that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from typing import Any

from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.outcome import RunView, count_outcomes
from tinker_claw.ledger.samples import BY_TOOLS
from tinker_claw.ledger.turns import OUTCOME, STEP
from tinker_claw.ledger.versions import compared_from, gate_of, held, pinned, read_line
from tinker_claw.ledger.views import Filter, Record, read
from tinker_claw.types import StopReason


def read_step(rows: Rows, step_id: int) -> tuple[int, dict[str, Any]] | None:
    """The version that a step began with, and its metrics, by whose rule it trained included; None:
    there is no such step."""
    row = rows.row("SELECT parent, metrics FROM steps WHERE id = ?", step_id)
    return None if row is None else (row["parent"], json.loads(row["metrics"] or "{}"))


@dataclass(frozen=True, slots=True)
class RewardView:
    """What decided the advantage of a step's sample; see `Sample`."""

    turn_id: int
    reward: float | None
    bucket: tuple[int, int] | None
    tool: bool
    cut: bool


def rewards_of(rows: Rows, step_id: int) -> tuple[RewardView, ...]:
    """Of all samples that a step was begun with."""
    found = rows.rows(
        f"SELECT turns.id, reward, group_id, {STEP} AS step, {BY_TOOLS} AS tool, "
        "stop_reason = ? AS cut FROM step_samples JOIN samples ON samples.id = sample_id "
        "JOIN turns ON turns.id = samples.turn_id JOIN sessions ON sessions.id = session_id "
        "LEFT JOIN next_states ON next_states.turn_id = turns.id "
        "WHERE step_samples.step_id = ? ORDER BY samples.id",
        *(StopReason.LENGTH, step_id),
    )
    return tuple(
        RewardView(
            turn_id=row["id"],
            reward=row["reward"],
            bucket=None if row["group_id"] is None else (row["group_id"], row["step"]),
            tool=bool(row["tool"]),
            cut=bool(row["cut"]),
        )
        for row in found
    )


_BY_VERSION = """
SELECT policy_version AS version, COUNT(*) AS judged, COUNT(value) AS voted,
  COUNT(*) FILTER (WHERE value = 1) AS good, COUNT(*) FILTER (WHERE value = -1) AS bad,
  COUNT(*) FILTER (WHERE idx = 0 AND value IS NOT NULL) AS firsts,
  COUNT(*) FILTER (WHERE idx = 0 AND value >= 0) AS accepted
FROM turns CROSS JOIN verdicts ON verdicts.turn_id = turns.id WHERE kind = 'main'
GROUP BY policy_version
"""
_EPISODES = """
SELECT COUNT(*) FILTER (WHERE episode = 1) AS running, COUNT(*) FILTER (WHERE episode = 2) AS over
FROM sessions WHERE episode <> 0
"""
_OUTRIGHT = """
SELECT COUNT(DISTINCT CASE WHEN final = 0 THEN turn_id END) AS replies,
  COUNT(DISTINCT CASE WHEN final = 1 THEN session_id END) AS sessions,
  (SELECT COUNT(*) FROM verdicts WHERE score IS NOT NULL AND judged <> value) AS unlike
FROM feedback
"""
_AUDITED = """
SELECT COUNT(*) AS audited, COUNT(*) FILTER (WHERE judged = audit) AS agree,
  COUNT(*) FILTER (WHERE judged * audit = -1) AS opposed
FROM verdicts WHERE audit IS NOT NULL AND judged IS NOT NULL
"""
_ENDED = f"""
SELECT (SELECT policy_version FROM turns WHERE session_id = sessions.id AND kind = 'main'
    ORDER BY idx LIMIT 1) AS version, ({OUTCOME}) AS score
FROM sessions WHERE episode <> 0 ORDER BY id DESC LIMIT 5000
"""
_LATELY = 1000
"""Rows of a table among which the newest is sought: the last one, unless a clock was set back."""
_TIMES = ("turns", "next_states", "verdicts", "feedback", "samples", "steps", "versions", "spend")


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
    ended: int = 0
    """Episodes that began with it, of the newest, which have their outcome."""
    points: float = 0.0
    """Of these: 0 for an outcome of -1, 1 for +1."""


def read_figures(rows: Rows, run: RunView, steps: int) -> Record:
    """The sums, and the newest `steps` steps, as `status --json` has them."""
    newest = rows.row("SELECT id FROM versions ORDER BY id DESC LIMIT 1")
    spend = rows.rows(
        "SELECT purpose, TOTAL(usd) AS usd, COUNT(*) - COUNT(usd) AS unpriced FROM spend "
        "GROUP BY purpose"
    )
    untrained = rows.rows(
        "SELECT id FROM versions WHERE step = 0 AND id < "
        "(SELECT COALESCE(MIN(id), 1e18) FROM versions WHERE step > 0)"
    )
    versions = _versions(rows)
    live = read_line(rows).live
    compared = measures(
        [version for version in versions if version.version in live],
        frozenset(row["id"] for row in untrained),
    )
    return {
        "run": run.names,
        # The newest; None: the run has not begun.
        "policy_version": newest["id"] if newest else None,
        # The version that answers whatever is learned; None: the newest does.
        "pinned": pinned(rows),
        # Where it answers one session in two: whose first replies are accepted more.
        "compared": read_compared(rows),
        # Why learning waits until a rollback says from where to go on; None: it does not.
        "held": held(rows),
        # Optimizer steps that the newest version is away from the base.
        "step": run.step,
        "samples_waiting": run.queued,
        "sessions": rows.one("SELECT COUNT(*) FROM sessions"),
        # Of them, those of which nothing is recorded now.
        "private_sessions": rows.one("SELECT COUNT(*) FROM sessions WHERE private = 1"),
        # Of them, those whose outcome, or that of their group, is to come, and those that are over.
        "episodes": dict(rows.rows(_EPISODES)[0]),
        "turns": {
            kind: rows.one("SELECT COUNT(*) FROM turns WHERE kind = ?", kind)
            for kind in ("main", "side")
        },
        "verdicts": _verdicts(versions),
        # Of how many verdicts the auditor gave one, too, and how often it was the same, or the
        # opposite.
        "auditor": dict(rows.rows(_AUDITED)[0]),
        # Of how many replies and sessions something was said outright, and of how many of these
        # replies the judge had found otherwise.
        "feedback": dict(rows.rows(_OUTRIGHT)[0]),
        # Turns with a hint.
        "hints": rows.one("SELECT COUNT(*) FROM hints WHERE rank = 0"),
        "samples": _counts(rows, "SELECT state, COUNT(*) FROM samples GROUP BY state"),
        "steps": (taken := read(rows, "steps", Filter(), steps)),
        # What the gate said of their versions, the newest first.
        "gate": [said for step in reversed(taken) if (said := gate_of(step))],
        "not_trained": dict(count_outcomes(rows, run).most_common()),
        "lost_next_states": lost_of(rows),
        # By purpose, as far as prices were known; empty: nothing was billed.
        "usd": {row["purpose"]: row["usd"] for row in spend},
        "bills_without_price": sum(row["unpriced"] for row in spend),
        "helps": {measure.name: measure.record for measure in compared},
    }


def _versions(rows: Rows) -> list[VersionFigures]:
    ended = {
        row["version"]: row
        for row in rows.rows(
            "SELECT version, COUNT(*) AS ended, SUM(score + 1) / 2 AS points "
            f"FROM ({_ENDED}) WHERE score IS NOT NULL AND version IS NOT NULL GROUP BY 1"
        )
    }
    judged = {row["version"]: dict(row) for row in rows.rows(_BY_VERSION)}
    none = dict.fromkeys(("judged", "voted", "good", "bad", "firsts", "accepted"), 0)
    return [
        VersionFigures(**(judged.get(version) or none) | dict(ended.get(version) or {}))
        for version in sorted({*judged, *ended})
    ]


def _verdicts(versions: Sequence[VersionFigures]) -> dict[str, int]:
    """Judged turns by what was said of them; `none`: no vote was valid."""
    good, bad = sum(v.good for v in versions), sum(v.bad for v in versions)
    voted, judged = sum(v.voted for v in versions), sum(v.judged for v in versions)
    return {"good": good, "neutral": voted - good - bad, "bad": bad, "none": judged - voted}


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
    good: float
    of: int

    @property
    def value(self) -> float:
        return self.good / self.of

    @property
    def interval(self) -> tuple[float, float]:
        """Of 95 %."""
        return _interval(self.good, self.of)

    @property
    def versions(self) -> str:
        return f"v{self.first}" if self.first == self.last else f"v{self.first} to v{self.last}"

    @property
    def record(self) -> Record:
        low, high = self.interval
        counted = {"versions": self.versions, **asdict(self)}
        return {**counted, "low": low, "high": high, "share": self.value}

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.0%} ({low:.0%} to {high:.0%}) by {self.versions}"


@dataclass(frozen=True, slots=True)
class Measure:
    """One question to the record, and its answer by groups of versions."""

    name: str
    shares: tuple[Share, ...]
    of: str = "verdicts"
    """What was counted."""

    @property
    def meaning(self) -> str:
        """What the first and the last group say together."""
        if not self.shares:
            return "no verdicts yet"
        first, last = self.shares[0], self.shares[-1]
        if len(self.shares) == 1:
            return f"nothing to compare yet: {first.of} {self.of}, all in one group"
        told = f"{last}, {first}"
        if last.interval[0] > first.interval[1]:
            return f"better than at first: {told}"
        if last.interval[1] < first.interval[0]:
            return f"worse than at first: {told}"
        return f"not enough turns to tell: {told}, and the intervals overlap"

    @property
    def record(self) -> Record:
        return {"meaning": self.meaning, "by_versions": [share.record for share in self.shares]}


def _interval(good: float, of: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927, J. Am. Stat. Assoc. 22:209-212). Of points
    between 0 and 1 it is too wide, and never too narrow: no figure in these bounds varies more than
    one that is either."""
    if not of:
        return 0.0, 1.0
    p, z2 = good / of, _Z * _Z / of
    middle = (p + z2 / 2) / (1 + z2)
    half = _Z / (1 + z2) * math.sqrt(p * (1 - p) / of + z2 / (4 * of))
    return max(0.0, middle - half), min(1.0, middle + half)


def measures(
    versions: Sequence[VersionFigures], untrained: AbstractSet[int]
) -> tuple[Measure, ...]:
    """Good verdicts, accepted first replies, and the outcomes of episodes, where there are any.

    Args:
        versions: by id.
        untrained: ids of versions that no step has made.
    """
    outcomes = groups(versions, untrained, lambda v: (v.points, v.ended))
    return (
        Measure("good_verdicts", groups(versions, untrained, lambda v: (v.good, v.voted))),
        Measure(
            "accepted_first_replies", groups(versions, untrained, lambda v: (v.accepted, v.firsts))
        ),
        *([Measure("episode_outcomes", outcomes, "episodes")] if outcomes else []),
    )


def groups(
    versions: Sequence[VersionFigures],
    untrained: AbstractSet[int],
    count: Callable[[VersionFigures], tuple[float, int]],
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


# Two versions that answer one session in two each


def read_compared(rows: Rows) -> Record | None:
    """First replies since then, one a session and drawn, so that they can be compared; None: one
    version answers all."""
    since, pin = compared_from(rows), pinned(rows)
    if since is None or pin is None:
        return None
    arms = {True: Share(pin, pin, 0, 0), False: Share(pin, pin, 0, 0)}
    for row in rows.rows(
        "SELECT policy_version = ?1 AS pinned, MIN(policy_version) AS first, "
        "MAX(policy_version) AS last, COUNT(*) AS sessions, SUM(value >= 0) AS good "
        "FROM turns CROSS JOIN verdicts ON verdicts.turn_id = turns.id WHERE kind = 'main' "
        "AND idx = 0 AND turns.id > ?2 AND value IS NOT NULL GROUP BY 1",
        *(pin, since),
    ):
        arms[bool(row["pinned"])] = Share(row["first"], row["last"], row["good"], row["sessions"])
    return {
        "meaning": against(arms[False], arms[True]),
        "by_versions": [arm.record for arm in arms.values() if arm.of],
    }


def against(newer: Share, pinned: Share) -> str:
    """What a comparison says. The interval of the difference is Newcombe's hybrid score interval
    (1998, Stat. Med. 17:873-890, method 10), of 95 %."""
    if not newer.of or not pinned.of:
        return "no verdicts of both yet"
    gain = newer.value - pinned.value
    (low, high), (low_of, high_of) = newer.interval, pinned.interval
    least = gain - math.hypot(newer.value - low, high_of - pinned.value)
    most = gain + math.hypot(high - newer.value, pinned.value - low_of)
    told = f"{newer}, {pinned}: {gain:+.0%} ({least:+.0%} to {most:+.0%})"
    if least > 0:
        return f"learning helps: {told}"
    if most < 0:
        return f"learning does harm: {told}"
    return f"not enough sessions to tell: {told}"


def _together(some: Sequence[Share]) -> Share:
    good, of = sum(share.good for share in some), sum(share.of for share in some)
    return Share(some[0].first, some[-1].last, good, of)
