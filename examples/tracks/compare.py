"""`python -m examples.tracks.compare`: tracks trained from nothing, many times, and one table.

By default the shipped beginner is trained on both tracks that it knows, for 20 steps and three
seeds. Each is run once with outcome and votes as the reward of a step, and once with outcomes
alone. Each run has a gateway of its own, with the judge that comes with the beginner.

Rule: a run is a folder of its own, and only its state is read. The same command continues where it
was, even in the middle of a run.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

from examples import ROOT, exit_status, say, tables
from examples.demo.server import Launch, running
from examples.tracks import report
from examples.tracks.__main__ import play
from examples.tracks.state import opened
from examples.tracks.track import read

REWARDS = {"steps": "step + outcome", "outcome": "outcome only"}
"""Values of the gateway's --episode-reward, by the name in the table."""
TRACKS = {
    "tool-call": "demo-tracks",
    "terminal": "demo-tracks",
    "screen": "demo-screen",
    "fenced": "smollm2",
}
"""Tracks that a model knows, each with the settings of its gateway. That of `fenced` is a real one:
python -m examples.personalize.smollm2 fetches it."""
_USUAL = ("tool-call", "terminal")
_LIMITS = ("steps", "groups", "concurrency", "exam_tasks")


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    track: str
    reward: str
    seed: int

    def folder(self, out: Path) -> Path:
        return out / f"{self.track}-{self.reward}-{self.seed}"


@dataclass(frozen=True, slots=True)
class Found:
    """Result of one run."""

    before: float
    after: float
    """Shares of held-out tasks solved, at the start and at the end."""
    steps: int
    change: str
    """Change of the share, with an interval."""
    held: bool
    """Whether learning was held before the last step, and stayed so."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and show all; returns the exit status."""
    options = _parser().parse_args(arguments)

    def play_all() -> None:
        combinations = product(options.tracks, options.rewards, range(options.seeds))
        cases = [Case(*combination) for combination in combinations]
        for number, case in enumerate(cases, 1):
            folder = case.folder(options.out)
            if found(folder) is None:
                say(f"{number} of {len(cases)}: {folder}")
                asyncio.run(run(case, options))
        lines = "\n".join(table(cases, options.out))
        (options.out / "table.md").write_text(f"{lines}\n", encoding="utf-8")
        say(lines)

    return exit_status(play_all)


async def run(case: Case, options: argparse.Namespace) -> None:
    """Play one run to its end, or to where learning is paused, with a gateway of its own.

    Raises:
        StoppedError, ExceptionGroup: the gateway did not start, or the track stopped.
    """
    folder = case.folder(options.out).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    settings = ROOT / "configs" / "tracks" / "gateway" / f"{TRACKS[case.track]}.toml"
    flags = (f"--config={settings}", f"--seed={case.seed}", f"--episode-reward={case.reward}")
    limits = {name: getattr(options, name) for name in _LIMITS}
    async with running(Launch(folder, (*flags, *options.gateway))) as gateway:
        file = ROOT / "configs" / "tracks" / f"{case.track}.toml"
        track = read(file, url=f"{gateway.url}/v1", seed=case.seed, **limits)
        await play(track, folder / "track")


def found(folder: Path) -> Found | None:
    """Result of a run; None: it has not ended."""
    if not (folder / "track").is_dir():
        return None
    with opened(folder / "track") as state:
        ends = [state.fact("first version"), state.fact("last version")]
        exams = [state.examined(int(end)) if end else {} for end in ends]
        held = state.fact("held")
        if held is None or not all(exams):
            return None
        before, after = (fmean(exam.values()) for exam in exams)
        steps = int(ends[1] or 0) - int(ends[0] or 0)
        return Found(before, after, steps, report.change(*exams), bool(held))


def table(cases: Sequence[Case], out: Path) -> Iterator[str]:
    """Lines of a Markdown table: a row per run, and the means over seeds."""
    heads = ("track", "reward", "seed", "before", "after", "change, 95 %", "steps")
    yield from tables.table(heads, _rows(cases, out))


def _rows(cases: Sequence[Case], out: Path) -> Iterator[Sequence[object]]:
    groups: dict[tuple[str, str], list[Found]] = {}
    for case in cases:
        if (end := found(case.folder(out))) is not None:
            kind = case.track, REWARDS[case.reward]
            groups.setdefault(kind, []).append(end)
            shares = f"{end.before:.2f}", f"{end.after:.2f}"
            steps = f"{end.steps}, then held" if end.held else end.steps
            yield *kind, case.seed, *shares, end.change, steps
    for kind, ends in groups.items():
        if len(ends) > 1:
            columns = zip(*((end.before, end.after) for end in ends), strict=True)
            means = (f"{fmean(column):.2f} ± {stdev(column):.2f}" for column in columns)
            yield *kind, "mean", *means, "", ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.tracks.compare",
        description="Train the shipped beginner on tracks, with several seeds and both rewards, "
        "and print one table of its success before and after. What --out already holds is not "
        "played again.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--tracks", nargs="+", choices=TRACKS, default=_USUAL, help="default the first two")
    add("--rewards", nargs="+", choices=tuple(REWARDS), default=list(REWARDS), help="default both")
    add("--seeds", type=int, default=3, help="so many, from 0 (default 3)")
    add("--steps", type=int, default=20, help="of each run (default 20)")
    add("--groups", type=int, default=300, help="tasks of each run, at most (default 300)")
    add("--exam-tasks", type=int, default=64, help="held-out tasks of each exam (default 64)")
    add("--concurrency", type=int, default=32, help="episodes at a time (default 32)")
    add("--out", type=Path, default=Path("runs/tracks"), help="results (default runs/tracks)")
    add("--gateway", nargs=argparse.REMAINDER, default=[], help="last: further flags of run.py")
    return parser


if __name__ == "__main__":
    sys.exit(main())
