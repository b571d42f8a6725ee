"""`python -m examples.demo.compare`: the demo many times, and one table of what came out.

By default each scripted user for 20 steps, three seeds each; `--method binary opd combine sdpo
--user plain opening --seeds 5 --steps 16` compares methods.

Rule: a run is a folder of its own, and its report is all that is read. What is there is not run
again, so a comparison that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.demo import report
from examples.demo.__main__ import main as demo
from examples.demo.user import USERS
from tinker_claw.methods import METHODS

WIDTH = 150
"""Of the table, in characters: narrower, and its figures would be cut."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the demo."""

    method: str
    user: str
    seed: int

    def folder(self, out: Path) -> Path:
        return out / f"{self.method}-{self.user}-{self.seed}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and show all; returns the exit status of a run that failed, else 0."""
    asked = _parser().parse_args(arguments)
    console = Console()
    runs = [Run(*one) for one in product(asked.method, asked.user, range(asked.seeds))]
    for number, run in enumerate(runs, 1):
        folder = run.folder(asked.out)
        if contents(folder) is not None:
            continue
        console.rule(f"{number} of {len(runs)}: {run.method}, {run.user}, seed {run.seed}")
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut short
        flags = {"method": run.method, "user": run.user, "seed": run.seed, "steps": asked.steps}
        flags |= {"sessions": asked.sessions, "config": asked.config, "out": folder}
        if status := demo([f"--{name}={value}" for name, value in flags.items()]):
            return status
    Console(width=max(WIDTH, console.width)).print(table(runs, asked.out))
    return 0


def contents(folder: Path) -> dict[str, Any] | None:
    """What a run left; None: nothing yet, or it was cut short."""
    path = folder / report.REPORT
    found = json.loads(path.read_text()) if path.is_file() else {}
    return found if found.get("whole") else None


def table(runs: Sequence[Run], out: Path) -> Table:
    """A row for each method and user: means over the seeds, with the spread of `accepted`."""
    shown = Table(title=f"{out}: means over seeds, ± standard deviation", title_justify="left")
    for name in ("method", "user", "seeds"):
        shown.add_column(name)
    for name in ("steps", "accepted before", "halfway", "after", "sums", "lists", "work", "length"):
        shown.add_column(name, justify="right")
    shown.add_column("alike", justify="right")
    shown.add_column("learner")
    for method, user in dict.fromkeys((run.method, run.user) for run in runs):
        alike = [run for run in runs if (run.method, run.user) == (method, user)]
        found = [one for run in alike if (one := contents(run.folder(out))) is not None]
        if found:
            shown.add_row(method, user, str(len(found)), *row(found))
    return shown


def row(found: Sequence[dict[str, Any]]) -> list[str]:
    """The figures of runs that differ in their seed only. Length is the last one's share of the
    first one's."""
    curves = [[point for point in one["curve"] if "at_sessions" not in point] for one in found]
    halves = [
        min(curve, key=lambda point: abs(2 * point["step"] - one["settings"]["steps"]))
        for curve, one in zip(curves, found, strict=True)
    ]
    firsts, lasts = [curve[0] for curve in curves], [curve[-1] for curve in curves]
    lengths = [
        last["characters"] / first["characters"] for first, last in zip(firsts, lasts, strict=True)
    ]
    said = dict.fromkeys(one["error"] or one["learner"] or "" for one in found)
    return [
        f"{fmean(point['step'] for point in lasts):.0f}",
        *(_spread([point["score"] for point in points]) for points in (firsts, halves, lasts)),
        *(f"{fmean(point[name] for point in lasts):.2f}" for name in ("sums", "lists", "work")),
        f"{fmean(lengths):.2f}",
        f"{fmean(point['alike'] for point in lasts):.2f}",
        "; ".join(said),
    ]


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f} ±{stdev(values) if len(values) > 1 else 0.0:.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo.compare",
        description="Run the demo for several methods, users and seeds, and print one table. What "
        "--out already holds is not run again.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--method", nargs="+", choices=tuple(METHODS), default=["combine"], help="default combine")
    add("--user", nargs="+", choices=tuple(USERS), default=list(USERS), help="default all")
    add("--seeds", type=int, default=3, help="so many, from 0 (default 3)")
    add("--steps", type=int, default=20, help="of each run (default 20)")
    add("--sessions", type=int, default=36, help="of each run, at least (default 36)")
    add("--config", type=Path, default=Path("configs/demo.toml"), help="default configs/demo.toml")
    add("--out", type=Path, default=Path("runs/compare"), help="results (default runs/compare)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
