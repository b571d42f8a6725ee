"""Experiments: files in configs/personalize/, with flags that override them.

Rule: a run is identified by method, scenario, condition and seed, which name its folder. Runs go
seed by seed, so that an experiment that was cut short has as many seeds of everything.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from examples.demo import DemoError
from examples.demo.client import MAX_TOKENS
from examples.demo.options import ROOT
from examples.demo.user import IN_FLIGHT
from examples.personalize.controls import CONTROLS, TOLD
from examples.personalize.scenario import Scenario, of_demo, read
from examples.personalize.users import USERS
from tinker_claw.config.load import load as settings
from tinker_claw.methods import names

LEARNS, JOINT = "learns", "joint"
CONDITIONS = (LEARNS, TOLD, *CONTROLS, JOINT)
TINY = ROOT / "configs" / "personalize" / "tiny.toml"


@dataclass(frozen=True, slots=True)
class Run:
    """One run: a policy, from its base on."""

    method: str
    scenario: str
    """Label of the scenario; `joint` for a joint run."""
    condition: str
    """`learns`; `told`: nothing is learned, and the rule stands in the prompt; one of `CONTROLS`;
    or `joint`: all scenarios of the joint part talk to one policy."""
    seed: int

    @property
    def kind(self) -> tuple[str, str, str]:
        """Method, scenario and condition, which runs share that differ in their seed only."""
        return (self.method, self.scenario, self.condition)

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        said = () if self.condition in (LEARNS, JOINT) else self.condition.replace(",", "").split()
        return "-".join((self.method, self.scenario, *said, str(self.seed)))


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a figure, in the mean over all seeds."""

    of: str
    """Method and scenario of the runs, and their condition if it is not `learns`; for `false
    alarms` a label for all honest runs."""
    step: int
    what: str = "accepted"
    """Figure: `accepted`; `skills`: their mean; `held`: the share of runs in which learning was
    held after at most `step` steps; or `false alarms`: their number per `step` steps."""
    at_least: float | None = None
    at_most: float | None = None
    within: float | None = None
    """Largest number of standard errors above the base."""
    by: str | None = None
    """Alarm that must have held learning; None: any."""
    sessions: int | None = None
    """Most sessions that may have ended by then; None: any number."""


@dataclass(frozen=True, slots=True)
class Controls:
    """Control runs, which show that the learning is the cause."""

    method: str
    scenario: str
    conditions: tuple[str, ...]
    seeds: int | None = None
    """Number of seeds; None: as many as the other runs have."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment: a file, with the flags that override it."""

    name: str
    config: Path
    """File of the product's settings."""
    scenarios: Mapping[str, Scenario]
    methods: tuple[str, ...] = ("combine",)
    conditions: tuple[str, ...] = CONDITIONS
    """Conditions that are run."""
    seeds: int = 1
    steps: int = 16
    sessions: int = 72
    questions: int = 128
    """Fresh first messages per score."""
    flags: tuple[str, ...] = ()
    """Further flags of `run.py`."""
    users: int = 1
    """Number of people who talk, all with the same wish; each has a key and limits of their own."""
    at_once: int = IN_FLIGHT
    """Sessions at the same time."""
    max_tokens: int = MAX_TOKENS
    """Most tokens of a reply."""
    model: str | None = None
    """Model's name at the gateway; None: the one in the settings."""
    goals: tuple[Goal, ...] = ()
    controls: Controls | None = None
    joint: tuple[str, int] | None = None
    """Method and number of seeds of the joint part."""
    together: Mapping[str, Scenario] | None = None
    """Scenarios of the joint part, by label."""

    def runs(self) -> list[Run]:
        """All runs, in the order in which they are performed."""
        return [run for seed in range(self._most) for run in self._of(seed)]

    def cast(self, run: Run) -> Mapping[str, Scenario]:
        """Scenarios that talk in a run, by label."""
        if run.condition == JOINT:
            return self.together or {}
        return {run.scenario: self.scenarios[run.scenario]}

    @property
    def served(self) -> str:
        """Model name in requests."""
        return self.model or settings(["--config", str(self.config), *self.flags]).served_name

    @property
    def _most(self) -> int:
        found = [self.seeds, self.joint[1] if self.joint else 0]
        return max(*found, (self.controls and self.controls.seeds) or 0)

    def _of(self, seed: int) -> Iterator[Run]:
        if seed < self.seeds and LEARNS in self.conditions:
            for scenario in self.scenarios:
                for method in self.methods:
                    yield Run(method, scenario, LEARNS, seed)
        if self.controls is not None:
            known = self.controls
            for condition in known.conditions:
                seeds = (
                    1 if condition == TOLD else known.seeds or self.seeds
                )  # no seed counts there
                if condition in self.conditions and seed < seeds:
                    labels = self.scenarios if condition == TOLD else (known.scenario,)
                    for label in labels:
                        yield Run(known.method, label, condition, seed)
        if self.joint is not None and JOINT in self.conditions and seed < self.joint[1]:
            yield Run(self.joint[0], JOINT, JOINT, seed)


def load(path: Path, **flags: Any) -> Experiment:
    """Read an experiment from a file; flags that are not None override it.

    Raises:
        DemoError: the file is missing, or is no valid experiment.
    """
    try:
        given = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DemoError(f"the experiment {path} cannot be read: {error}") from error
    chosen = {name: value for name, value in flags.items() if value is not None}
    given |= chosen
    if chosen.keys() & {"methods", "scenarios"}:  # choosing some means comparing these
        given.setdefault("conditions", [LEARNS])
    folder = path.parent
    known = {one.name for one in fields(Experiment)} - {"name", "together"}
    if unknown := sorted(given.keys() - known):
        raise DemoError(f"the experiment {path}: there is no {unknown[0]} in an experiment")
    if not given.get("scenarios") or "config" not in given:
        raise DemoError(f"the experiment {path} needs config and scenarios")
    joint = given.pop("joint", None)
    if joint is not None:
        given["together"] = _scenarios(joint["scenarios"], folder)
        given["joint"] = (joint["method"], joint["seeds"])
    given["scenarios"] = _scenarios(given["scenarios"], folder)
    given["config"] = (folder / given["config"]).resolve()
    try:
        given["goals"] = tuple(Goal(**goal) for goal in given.pop("goals", ()))
        if controls := given.pop("controls", None):
            given["controls"] = Controls(**controls | {"conditions": tuple(controls["conditions"])})
        whole: dict[str, Any] = {k: _frozen(v) for k, v in given.items()}
        found = Experiment(name=path.stem, **whole)
    except TypeError as error:
        raise DemoError(f"the experiment {path}: {error}") from error
    return _checked(found, path)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType]


def _checked(found: Experiment, path: Path) -> Experiment:
    methods = {*found.methods, *([found.controls.method] if found.controls else ())}
    if unknown := sorted(methods.difference(names())):
        raise DemoError(f"the experiment {path}: there is no method {unknown[0]}")
    conditions = {*found.conditions, *(found.controls.conditions if found.controls else ())}
    if unknown := sorted(conditions - {*CONDITIONS}):
        raise DemoError(f"the experiment {path}: there is no condition {unknown[0]}")
    if not found.config.is_file():
        raise DemoError(f"the experiment {path}: there are no settings {found.config}")
    if found.controls is not None and found.controls.scenario not in found.scenarios:
        # another choice of scenarios leaves the controls of the file out
        return replace(found, controls=None)
    return found


def _scenarios(given: Mapping[str, str] | Sequence[str], folder: Path) -> Mapping[str, Scenario]:
    """Scenarios by label: files beside the experiment's, files from here, or the demo's users by
    name."""
    labelled = given if isinstance(given, Mapping) else {Path(one).stem: one for one in given}
    return {label: _scenario(label, where, folder) for label, where in labelled.items()}


def _scenario(label: str, where: str, folder: Path) -> Scenario:
    if where in USERS:
        return of_demo(where)
    beside = folder / where
    return read(label, beside if beside.is_file() else Path(where))
