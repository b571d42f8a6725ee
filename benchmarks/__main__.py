"""`python -m benchmarks`: the local backend beside plain peft and transformers, on the CPU.

First sampling, with the demo's model; then steps, as `python -m benchmarks.training` does them.

Rule: both sides of a ratio run in the same process on the same data, after a warm-up, alternating;
a figure is the median of its repetitions. Nothing here is asserted: tests do not measure time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.table import Table

from benchmarks import baseline, training, training_report, workload
from local_gpu.config import LocalConfig
from local_gpu.trainer import LocalTrainer
from tinker_claw import shipped

Timed = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Row:
    """One comparison. Seconds are medians."""

    what: str
    ours_s: float
    other: str
    other_s: float

    @property
    def ratio(self) -> float:
        """How many times faster than the other side ours is."""
        return self.other_s / self.ours_s


async def compare(what: str, ours: Timed, other_name: str, other: Timed, repeat: int) -> Row:
    """Time both sides in turn, after one warm-up run of each."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for repetition in range(repeat + 1):
        for side, run in zip(seconds, (ours, other), strict=True):
            started = time.perf_counter()
            await run()
            if repetition:
                side.append(time.perf_counter() - started)
    return Row(what, statistics.median(seconds[0]), other_name, statistics.median(seconds[1]))


async def measure(repeat: int, say: Callable[[str], None]) -> list[Row]:
    """Run all comparisons with the demo model on this machine's CPU."""
    rows: list[Row] = []
    plain = baseline.Plain(shipped.MODEL_DIR)
    with tempfile.TemporaryDirectory() as folder:
        config = LocalConfig(model=str(shipped.MODEL_DIR), root=Path(folder), device="cpu")
        trainer = await LocalTrainer.start(config)
        for case in workload.cases(trainer, plain):
            say(f"measuring: {case.what}")
            rows.append(await compare(case.what, case.ours, case.other_name, case.other, repeat))
        await trainer.aclose()
    return rows


def main() -> None:
    """Read flags, measure, print a table and, where asked, a JSON file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="measured repetitions (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = training_report.screen()
    rows = asyncio.run(measure(arguments.repeat, lambda line: console.print(line, style="dim")))
    table = Table("what", "ours", "beside", "its time", "ratio")
    for row in rows:
        figures = (f"{row.ours_s:.3f} s", row.other, f"{row.other_s:.3f} s", f"{row.ratio:.1f}x")
        table.add_row(row.what, *figures)
    console.print(table)
    figures = training.measure(
        training.tiny(arguments.repeat), lambda line: console.print(line, style="dim")
    )
    training_report.show(figures, console)
    if arguments.json:
        document = {
            "sampling": [asdict(row) | {"ratio": row.ratio} for row in rows],
            "training": training_report.document(figures),
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
