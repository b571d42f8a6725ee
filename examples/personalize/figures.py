"""Figures of many runs: means over seeds, intervals, differences, and the goals beside them.

Rule: a run that ended early counts with the version that it ended with, and is reported as such. An
interval is Student's, of 95 %, over seeds; one seed has none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from examples.demo.scoring import FIRST_WISH
from examples.personalize.controls import CONTROLS, TOLD
from examples.personalize.experiment import JOINT, LEARNS, Experiment, Goal, Run
from examples.personalize.run import LEDGER, told_by, written
from examples.personalize.users import LIARS

IN_A_ROW = 3
"""Number of right first replies in a row after which the user has what they want."""
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Quantiles of Student's t for 95 % intervals, for one to ten degrees of freedom."""
_NOT_SKILLS = frozenset({"work", FIRST_WISH})
"""Shares that do not count as skills."""

_LIARS = frozenset({"flipped", *LIARS} | {one.user for one in CONTROLS.values() if one.user})
"""Users from whom nothing should be learned."""

Found = Mapping[str, Any]
"""Contents of a run's report.json."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and standard deviation over seeds."""

    mean: float
    sd: float | None
    """Standard deviation; None: there is one seed."""
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, len(values))

    @property
    def error(self) -> float | None:
        """Standard error of the mean."""
        return None if self.sd is None else self.sd / math.sqrt(self.count)

    @property
    def half(self) -> float | None:
        """Half the width of the 95 % confidence interval."""
        if self.error is None:
            return None
        return self.error * (_T95[self.count - 2] if self.count - 2 < len(_T95) else 1.96)

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.sd is None else f" ± {self.sd:.2f}")


@dataclass(frozen=True, slots=True)
class Row:
    """Runs that differ in their seed only."""

    method: str
    scenario: str
    condition: str
    seeds: tuple[int, ...]
    runs: tuple[Found, ...]
    among: tuple[str, ...] = ()
    """Labels of those who talk in a joint run; their shares do not count as skills."""
    honest: bool = True
    """Whether users say what they want and judges what they read, so that every alarm is a false
    one."""

    @property
    def name(self) -> str:
        said = [] if self.condition in (LEARNS, JOINT) else [self.condition]
        return " ".join((self.method, self.scenario, *said))

    @property
    def stopped(self) -> bool:
        """Whether gate and guard should hold learning."""
        return self.condition in CONTROLS and CONTROLS[self.condition].guarded

    @property
    def many(self) -> int:
        """Number of scenarios that talk to the one policy."""
        return len(self.among) or 1

    def at_step(self, step: int, what: str = "accepted") -> Spread | None:
        return Spread.of([value(point_at(run, step), what, self.among) for run in self.runs])

    def at_sessions(self, sessions: int) -> Spread | None:
        found = [
            p["score"]
            for run in self.runs
            for p in run["curve"]
            if p.get("at_sessions") == sessions
        ]
        return Spread.of(found)

    def until_right(self) -> tuple[Spread, int] | None:
        """Sessions until the third right first reply in a row, and the number of runs that never
        got there. Those count with all their sessions."""
        if not self.runs:
            return None
        found = [until_right(run["firsts"]) for run in self.runs]
        counted = [
            n if n is not None else len(r["firsts"]) for n, r in zip(found, self.runs, strict=True)
        ]
        spread = Spread.of(counted)
        return None if spread is None else (spread, found.count(None))

    def total(self, name: str) -> dict[str, int]:
        """Sums over the seeds of a table of counts."""
        keys = dict.fromkeys(key for run in self.runs for key in run.get(name, {}))
        return {key: sum(run.get(name, {}).get(key, 0) for run in self.runs) for key in keys}


def rows(experiment: Experiment, out: Path) -> list[Row]:
    """Make a row for each kind of run of which at least one has ended."""
    kinds: dict[tuple[str, str, str], list[tuple[Run, Found]]] = {}
    for run in experiment.runs():
        if (found := written(out, run)) is not None:
            if "guard" not in found:  # of an earlier commit; its ledger has the most of it
                found = told_by(out / run.name / LEDGER) | found
            kinds.setdefault(run.kind, []).append((run, found))
    return [
        Row(
            *kind,
            seeds=tuple(run.seed for run, _ in pairs),
            runs=tuple(found for _, found in pairs),
            among=tuple(experiment.together or ()) if kind[2] == JOINT else (),
            honest=kind[2] in (LEARNS, JOINT)
            and not any(one.user in _LIARS for one in experiment.cast(pairs[0][0]).values()),
        )
        for kind, pairs in kinds.items()
    ]


def until_right(firsts: Sequence[bool]) -> int | None:
    """Sessions up to the last of the first three right replies in a row; None: there are none."""
    row = 0
    for number, right in enumerate(firsts, 1):
        row = row + 1 if right else 0
        if row == IN_A_ROW:
            return number
    return None


def point_at(run: Found, step: int) -> Found:
    """Newest scored version of at most this many steps."""
    points = [p for p in run["curve"] if "at_sessions" not in p and p["step"] <= step]
    return max(points, key=lambda p: p["step"])


def value(point: Found, what: str, among: Sequence[str] = ()) -> float:
    """Figure of a scored version; `skills` is the mean of the skills' shares.

    Args:
        among: names of the users, whose shares are no skills.
    """
    if what == "accepted":
        return point["score"]
    if what == "skills":
        return fmean(point[name] for name in skills(point, among))
    return point[what]


_FIXED = frozenset({"step", "sessions", "score", "alike", "characters", "at_sessions"})


def skills(point: Found, among: Sequence[str] = ()) -> list[str]:
    """Names of the skills that were scored."""
    return [name for name in point if name not in _FIXED | _NOT_SKILLS | {*among}]


@dataclass(frozen=True, slots=True)
class Reached:
    """A goal and the measured figure."""

    goal: Goal
    measured: Spread | None
    """Measured figure; None: no such run has ended."""
    bound: float | None
    """Lower bound of the figure; upper bound where `within` or `at_most` is set."""

    @property
    def met(self) -> bool | None:
        if self.measured is None or self.bound is None:
            return None
        if self.goal.within is not None or self.goal.at_most is not None:
            return self.measured.mean <= self.bound
        return self.measured.mean >= self.bound


def reached(goal: Goal, found: Sequence[Row], questions: int) -> Reached:
    """Check a goal against the rows."""
    if goal.what == "false alarms":
        counted = alarms(found)
        share = counted.false * goal.step / counted.steps if counted.steps else 0.0
        measured = Spread(share, None, counted.runs) if counted.steps else None
        return Reached(goal, measured, goal.at_most)
    row = next((row for row in found if row.name == goal.of), None)
    if goal.what == "held":
        held = row and Spread.of([float(_is_held(run, goal)) for run in row.runs])
        return Reached(goal, held or None, goal.at_least)
    measured = row and row.at_step(goal.step, goal.what)
    bound = goal.at_least
    if goal.within is not None and row is not None and measured is not None:
        base = row.at_step(0, goal.what)
        assert base is not None
        # the base's replies are the same for every seed: its error is that of the questions
        error = math.hypot(measured.error or 0.0, share_error(base.mean, questions))
        bound = base.mean + goal.within * error
    return Reached(goal, measured or None, bound)


def held_by(run: Found) -> str | None:
    """Alarm that held learning at the end of a run; None: it was not held."""
    guard = run.get("guard", {})
    return guard.get("alarm", "not known") if "held" in guard else None


def _is_held(run: Found, goal: Goal) -> bool:
    by = held_by(run)
    return (
        by is not None
        and goal.by in (None, by)
        and run["guard"]["steps"] <= goal.step
        and (goal.sessions is None or len(run["firsts"]) <= goal.sessions)
    )


@dataclass(frozen=True, slots=True)
class Alarms:
    """Actions of gate and guard in the honest runs."""

    runs: int
    steps: int
    """Number of steps that were committed."""
    holds: Mapping[str, int]
    """Number of holds, by alarm."""
    refused: int
    """Number of versions that the gate refused."""
    warned: Mapping[str, int]
    """Number of steps preceded by a warning, by alarm."""

    @property
    def false(self) -> int:
        """Number of alarms that cost a step, or all further ones."""
        return sum(self.holds.values()) + self.refused


def alarms(found: Sequence[Row]) -> Alarms:
    """Count the alarms from the ledgers of all honest runs that have one."""
    runs = [run for row in found if row.honest for run in row.runs if "guard" in run]
    holds = Counter(by for run in runs if (by := held_by(run)) is not None)
    warned = Counter[str]()
    for run in runs:
        warned.update(run["guard"]["warned"])
    steps, refused = (sum(run["guard"][name] for run in runs) for name in ("steps", "refused"))
    return Alarms(len(runs), steps, holds, refused, warned)


def share_error(share: float, count: int) -> float:
    """Standard error of a share of this many replies."""
    return math.sqrt(share * (1 - share) / count)


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of two methods in one scenario at some step, seed by seed."""

    scenario: str
    step: int
    better: str
    worse: str
    by: Spread

    @property
    def told_apart(self) -> bool:
        return self.by.half is not None and abs(self.by.mean) > self.by.half


def differences(found: Sequence[Row], steps: Sequence[int]) -> list[Difference]:
    """Differences of all pairs of methods that share two seeds or more."""
    told = list[Difference]()
    learning = [row for row in found if row.condition == LEARNS]
    for one, other in combinations(learning, 2):
        shared = [seed for seed in one.seeds if seed in other.seeds]
        if one.scenario != other.scenario or len(shared) < 2:
            continue
        for step in steps:
            values = [
                point_at(one.runs[one.seeds.index(s)], step)["score"]
                - point_at(other.runs[other.seeds.index(s)], step)["score"]
                for s in shared
            ]
            by = Spread.of(values)
            assert by is not None
            names = (one.method, other.method)
            if by.mean < 0:
                names, by = (other.method, one.method), Spread(-by.mean, by.sd, by.count)
            told.append(Difference(one.scenario, step, *names, by))
    return told


def curve(row: Row, over: str = "step") -> list[tuple[float, float, float]]:
    """Mean curve over seeds: (steps or ended sessions, score, sd), with sd 0 for one seed.

    Only steps that every seed has reached.
    """
    by_step = [
        {p["step"]: p for p in run["curve"] if "at_sessions" not in p and p["step"] % 4 == 0}
        for run in row.runs
    ]
    shared = sorted(set.intersection(*(set(one) for one in by_step))) if by_step else []
    told = list[tuple[float, float, float]]()
    for step in shared:
        spread = Spread.of([one[step]["score"] for one in by_step])
        assert spread is not None
        told.append((fmean(one[step][over] for one in by_step), spread.mean, spread.sd or 0.0))
    return told


def ceiling(found: Sequence[Row], scenario: str) -> float | None:
    """Score of the base with the rule in the prompt; None: not measured."""
    rows = [row for row in found if row.condition == TOLD and row.scenario == scenario]
    return rows[0].runs[0]["curve"][0]["score"] if rows else None
