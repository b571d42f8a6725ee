"""`python -m benchmarks.staleness`: how old the samples are that steps train, in the demo.

The demo's user holds six sessions at a time, so that more samples arrive than steps take. Goals:
steps train samples that are one step old or less in the mean, no more samples expire than arrive
beyond the batches (plus one in a hundred), and every step compares sampler and trainer on fresh
tokens. Rule: the figures are read from the run's ledger, and nothing is changed for them.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

OLDEST = 1.0
"""Goal for the mean staleness of trained samples, in steps."""
_SLACK = 0.01
"""Share of the samples that may expire besides those that do not fit into the batches."""


@dataclass(frozen=True)
class Row:
    """Figures of one run."""

    seed: int
    steps: int
    staleness: float
    """Mean number of steps between a trained sample and the version that is trained."""
    arrived: int
    """Samples that arrived, also those of versions after the last step."""
    trained: int
    expired: int
    unchecked: int
    """Steps without a token on which sampler and trainer were compared."""

    @property
    def may_expire(self) -> float:
        return self.arrived - self.trained + _SLACK * self.arrived


def read(ledger: Path, seed: int) -> Row:
    """Read the figures of a run from its ledger."""
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as db:
        steps = db.execute("SELECT metrics FROM steps WHERE status = 'committed' ORDER BY id")
        metrics = [json.loads(text) for (text,) in steps]
        states = Counter(state for (state,) in db.execute("SELECT state FROM samples"))
    return Row(
        seed,
        steps=len(metrics),
        staleness=fmean(each["staleness_mean"] for each in metrics),
        arrived=states.total(),
        trained=sum(each["samples"] for each in metrics),
        expired=states["expired"],
        unchecked=sum(not each["fresh_tokens"] for each in metrics),
    )


def main() -> None:
    """Run the demo for each seed, and print its rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(0 1 2)")
    parser.add_argument("--fast", action="store_true", help="8 steps in place of 16")
    arguments = parser.parse_args()
    table = Table("seed", "steps", "staleness", "arrived", "trained", "expired", "unchecked")
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            out = Path(folder) / str(seed)
            demo = [sys.executable, "-m", "examples.demo", "--seed", str(seed), "--out", str(out)]
            subprocess.run([*demo, *["--fast"] * arguments.fast], check=True)
            row = read(out / "run" / "ledger.sqlite3", seed)
            figures = (row.steps, f"{row.staleness:.2f}", row.arrived, row.trained, row.expired)
            table.add_row(str(seed), *map(str, figures), str(row.unchecked))
            met = row.staleness <= OLDEST and row.expired <= row.may_expire and not row.unchecked
            print(f"seed {seed}: the goals are {'met' if met else 'NOT met'}")
    Console().print(table)


if __name__ == "__main__":
    main()
