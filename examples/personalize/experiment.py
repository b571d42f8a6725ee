"""Experiments: files in configs/personalize/, with flags that override them.

Rule: a run is identified by method, scenario, condition and seed, which name its folder. Runs go
seed by seed, so that an experiment that was cut short has as many seeds of everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import FilePath

from examples import ROOT
from examples.demo.client import MAX_TOKENS
from examples.demo.user import IN_FLIGHT
from examples.personalize.judges import LIES
from examples.personalize.scenario import Record, Scenario, of_demo, parse, read
from examples.personalize.users import USERS
from tinker_claw.config.load import load as load_settings
from tinker_claw.config.load import read_toml
from tinker_claw.config.settings import Settings

LEARNS, TOLD = "learns", "told"
CONDITIONS = (LEARNS, TOLD, *LIES)
TINY = ROOT / "configs" / "personalize" / "tiny.toml"


@dataclass(frozen=True, slots=True)
class Run:
    """One run: a policy, from its base on."""

    method: str
    scenario: str
    """Label of the scenario."""
    condition: str
    """`learns`; `told`: nothing is learned, and the rule stands in the prompt; or a lying judge, by
    its name in `LIES`."""
    seed: int

    @property
    def kind(self) -> str:
        """Name that runs share which differ in their seed only."""
        return "-".join((self.method, self.scenario, self.condition)).removesuffix(f"-{LEARNS}")

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.kind}-{self.seed}"


class Experiment(Record):
    """An experiment: a file, with the flags that override it."""

    name: str
    config: FilePath
    """File of the product's settings."""
    scenarios: Mapping[str, Scenario]
    methods: tuple[str, ...] = ("combine",)
    conditions: tuple[Literal["learns", "told", "flipped", "shuffled"], ...] = (LEARNS,)
    """Conditions that are run; all but `learns` with the first method only, lying judges with the
    first scenario only."""
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

    def runs(self) -> list[Run]:
        """All runs, in the order in which they are performed."""
        return [run for seed in range(self.seeds) for run in self._of(seed)]

    @property
    def settings(self) -> Settings:
        """The product's settings."""
        return load_settings(["--config", str(self.config), *self.flags])

    @property
    def judged(self) -> bool:
        """Return whether its settings or flags name a judge, which then replaces the rules."""
        return self.settings.judge.judge_url is not None

    def _of(self, seed: int) -> Iterator[Run]:
        if LEARNS in self.conditions:
            for scenario in self.scenarios:
                for method in self.methods:
                    yield Run(method, scenario, LEARNS, seed)
        if TOLD in self.conditions and seed == 0:  # no seed counts where nothing is learned
            for scenario in self.scenarios:
                yield Run(self.methods[0], scenario, TOLD, seed)
        for lie in LIES:
            if lie in self.conditions:
                yield Run(self.methods[0], next(iter(self.scenarios)), lie, seed)


def load(path: Path, **flags: Any) -> Experiment:
    """Read an experiment from a file; flags that are not None override it.

    Raises:
        DemoError, ConfigError: the file cannot be read, or asks for what there is not.
    """
    table = read_toml("the experiment", path)
    chosen = {name: value for name, value in flags.items() if value is not None}
    if chosen.keys() & {"methods", "scenarios"}:  # choosing some means comparing these
        table["conditions"] = [LEARNS]
    table |= chosen
    table["scenarios"] = _scenarios(table.get("scenarios", ()), path.parent)
    table["config"] = (path.parent / table.get("config", "")).resolve()
    return parse(Experiment, path, {"name": path.stem} | table)


def _scenarios(
    scenarios: Mapping[str, str] | Sequence[str], folder: Path
) -> Mapping[str, Scenario]:
    """Scenarios by label: files beside the experiment's, files from here, or the demo's users by
    name."""
    if not isinstance(scenarios, Mapping):
        scenarios = {Path(where).stem: where for where in scenarios}
    return {label: _scenario(label, where, folder) for label, where in scenarios.items()}


def _scenario(label: str, where: str, folder: Path) -> Scenario:
    if where in USERS:
        return of_demo(where)
    beside = folder / where
    return read(label, beside if beside.is_file() else Path(where))
