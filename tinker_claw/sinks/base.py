"""Sinks, and the figures of a step that they receive.

Rule: only numbers go out, under our own names, never a text of a conversation or the name of a user
or session. All of them are read from the ledger's rows, so a repeated report is the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from tinker_claw import plugins, sinks
from tinker_claw.errors import ConfigError
from tinker_claw.ledger.database import Rows

FOLDER = "sinks"
"""Folder in the data directory for files of sinks and output of their libraries."""
PROJECT = "tinker-claw"
"""Project name of our runs, where a tracker's own variable names no other."""
NO_SINKS = ("base", "follow")
"""Modules of this package that are no sinks."""
PAGE = 100
"""Steps that are read at once."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that the steps belong to."""

    id: str
    """Stable id of the ledger's run, made from its configuration and the time it began."""
    name: str
    """Name of its data directory."""
    folder: Path
    config: Mapping[str, str]
    """Model, method, backend and LoRA rank."""


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of a committed step."""

    step: int
    """The step's id in the ledger. Ids only grow; those of void steps are left out."""
    finished_at: float
    """End of the step, in seconds since 1970."""
    figures: Mapping[str, float]
    """Finite figures by name, `group/figure`."""


class Sink(Protocol):
    """One tracker. Created with a `TrackedRun` in a process of its own, where it may fail or hang.

    A plug-in names its class.
    """

    def write(self, report: Report) -> None:
        """Write a report; return when it is stored outside this process."""
        ...

    def close(self) -> None: ...


def built_in() -> list[str]:
    """Return the names of the built-in sinks.

    Each is a module, with its class in `SINK` and in `PACKAGE` what it needs, as pip takes it; ""
    for nothing.
    """
    return sorted({m.name for m in pkgutil.iter_modules(sinks.__path__)} - {*NO_SINKS})


def package_of(name: str) -> str:
    """Return the package that a built-in sink needs, without importing that."""
    return import_module(f"{sinks.__name__}.{name}").PACKAGE


def sink(name: str, run: TrackedRun) -> Sink:
    """Open the sink of that name."""
    if name in built_in():
        return import_module(f"{sinks.__name__}.{name}").SINK(run)
    return plugins.load(plugins.find("sink", name, built_in()))(run)


def check_installed(names: tuple[str, ...]) -> None:
    """Check that these sinks can be opened, without importing their packages.

    Raises:
        ConfigError: there is no such sink, or its package is missing.
    """
    for name in names:
        if name not in built_in():
            plugins.find("sink", name, built_in())
        elif package := package_of(name):
            try:
                version(package.partition(">=")[0])
            except PackageNotFoundError as error:
                raise ConfigError(
                    f"--report-to {name} needs a package that is not installed: "
                    f"pip install '{package}'"
                ) from error


def read_run(rows: Rows) -> TrackedRun:
    """Return the run of a ledger that has its first version."""
    keys = ("model", "method", "backend", "lora_rank")
    meta = rows.pairs("SELECT key, value FROM meta")
    config = {key: meta[key] for key in keys if key in meta}  # pins and holds come and go
    began = rows.one("SELECT created_at FROM versions ORDER BY id LIMIT 1")
    directory = rows.path.parent.absolute()
    return TrackedRun(
        id=hashlib.sha256(f"{began} {config}".encode()).hexdigest()[:16],
        name=directory.name,
        folder=directory / FOLDER,
        config=config,
    )


_STEPS = """
SELECT steps.id, finished_at, json_object(
    'version', steps.version, 'steps_from_base', versions.step,
    'seconds', finished_at - steps.created_at,
    'usd_in_all', (SELECT TOTAL(usd) FROM spend WHERE spend.created_at <= finished_at),
    'verdicts', (SELECT json_object('good', COUNT(*) FILTER (WHERE value = 1),
        'neutral', COUNT(*) FILTER (WHERE value = 0), 'bad', COUNT(*) FILTER (WHERE value = -1),
        'none', COUNT(*) FILTER (WHERE value IS NULL))
      FROM step_samples JOIN samples ON samples.id = sample_id
      JOIN verdicts ON verdicts.turn_id = samples.turn_id WHERE step_samples.step_id = steps.id)
  ) AS figures, COALESCE(metrics, '{}') AS metrics
FROM steps JOIN versions ON versions.id = steps.version
WHERE status = 'committed' AND steps.id > ? ORDER BY steps.id LIMIT ?
"""
_RULE = "rule"
"""The metric of a step that is no figure."""


def read_reports(rows: Rows, after: int) -> list[Report]:
    """Return the oldest committed steps after `after`, at most a page of them."""
    return [
        Report(
            step=row["id"],
            finished_at=row["finished_at"],
            figures=dict(figures_of(json.loads(row["figures"]) | json.loads(row["metrics"]))),
        )
        for row in rows.rows(_STEPS, after, PAGE)
    ]


def figures_of(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the finite figures of a step's metrics, by name."""
    for name, value in metrics.items():
        if name != _RULE:
            yield from _named(name if isinstance(value, dict) else f"step/{name}", value)


def _named(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield a figure, or the figures in a mapping; for a list of texts, its length."""
    match value:
        case int() | float():
            if math.isfinite(value):
                yield name, float(value)
        case dict():
            for key, inner in value.items():
                yield from _named(f"{name}/{key}", inner)
        case [int() | float(), *_]:
            for place, inner in enumerate(value):
                yield from _named(f"{name}/{place}", inner)
        case list():
            yield name, float(len(value))
        case _:
            pass
