"""Skills of the model before and after runs of `examples.personalize`, by more questions than their
exams ask: `python -m tests.lab.skills runs/personalize-tiny/combine-plain-* --questions 512`.

Each run's ledger and weights are copied, served without learning, and asked as the exam asks: the
base and the newest version. The mean differences of the runs are printed with 90 % intervals.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean

from examples import ROOT
from examples.demo.scoring import RuleExam, demo_skills, score_version
from examples.demo.server import Launch, running
from examples.demo.user import USERS


async def scores(run: Path, questions: int) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of right sums, lists and equations: of the base, and of the run's newest version."""
    exam = RuleExam.draw(USERS["plain"], questions, lambda rng, _: demo_skills(rng, questions))
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(run / "run", Path(copy) / "run", ignore=lambda *_: {"lock"})
        flags = (f"--config={ROOT / 'configs/demo.toml'}", "--method=combine")
        nobody_judges = "--judge-url=http://127.0.0.1:9/v1"
        async with running(Launch(Path(copy), (*flags, nobody_judges))) as child:
            newest = (await child.client.health()).policy_version
            base, now = [await score_version(child.client, each, exam) for each in (0, newest)]
    return dict(base.shares), dict(now.shares)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """90 % interval of the mean, by 10,000 resamplings of the runs."""
    rng = Random(0)
    means = sorted(fmean(rng.choices(values, k=len(values))) for _ in range(10_000))
    return means[500], means[9_500]


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__)
    top.add_argument("runs", type=Path, nargs="+")
    top.add_argument("--questions", type=int, default=512)
    given = top.parse_args()
    found = list[tuple[dict[str, float], dict[str, float]]]()
    for run in given.runs:
        base, now = asyncio.run(scores(run, given.questions))
        print(
            run.name, *(f"{name} {base[name]:.3f} -> {now[name]:.3f}" for name in base), flush=True
        )
        found.append((base, now))
    for name in found[0][0]:
        lost = [now[name] - base[name] for base, now in found]
        low, high = interval(lost)
        print(f"{name}: {fmean(lost):+.3f} ({low:+.3f} to {high:+.3f})")


if __name__ == "__main__":
    main()
