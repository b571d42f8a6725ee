"""The shipped beginner learns: its recipe's examples are true, and a run makes it better."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo.judge import verdict
from examples.demo.recipe.tracks import commands
from examples.tracks import compare
from examples.tracks.compare import Case
from examples.tracks.state import opened
from examples.tracks.terminal import Terminal
from examples.tracks.track import Track
from tests.support.ledger import one
from tests.support.lives import ROOT, until

STEPS, RISE = 10, 0.1
"""Steps of a short run, and the least rise of its score."""


async def test_what_the_recipe_shows_of_a_shell_is_what_the_shell_says() -> None:
    """The right command does the job; half of it, another system's and none do not, and only the
    last but one is rejected by the judge of the twins."""
    jobs = {job.name.split()[0]: job for job in map(Terminal(5, None).task, range(60))}
    assert len(jobs) == 6, "one of each kind"
    for job in jobs.values():
        for (command, said), (solves, vote) in zip(
            commands(job), ((True, 1), (False, 1), (False, -1)), strict=True
        ):
            async with job.attempt() as attempt:
                assert not await attempt.solved("Done.")
                assert await attempt.call("shell", {"command": command}) == said
                assert await attempt.solved("Done.") == solves, (job.wish, command)
            assert verdict("tool", said) == vote


def over(folder: Path, before: float, after: float, held: str | None = "") -> None:
    """Write the folder that a run leaves; held None: it was cut short."""
    with opened(folder / "track") as state:
        state.begin(Track(environment="tool-call"))
        for version, share in ((0, before), (12, after)):
            for task in range(10):
                state.examine(version, task, task < 10 * share)
        state.set_fact("first version", "0")
        state.set_fact("last version", "12")
        if held is not None:
            state.set_fact("held", held)


def test_what_is_there_is_not_played_again_and_stands_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Case] = []

    async def run(case: Case, asked: object) -> None:
        played.append(case)
        over(case.folder(tmp_path), 0.2, 0.6)

    monkeypatch.setattr(compare, "run", run)
    over(tmp_path / "tool-call-steps-0", 0.1, 0.5, "An alarm rang.")
    over(tmp_path / "tool-call-steps-1", 0.1, 0.5, None)
    flags = ["--tracks", "tool-call", "--seeds", "2", "--out", str(tmp_path)]
    assert compare.main(flags) == 0
    assert played == [
        Case("tool-call", *rest) for rest in (("steps", 1), ("outcome", 0), ("outcome", 1))
    ]
    table = (tmp_path / "table.md").read_text()
    assert "| step + outcome | 0 | 0.10 | 0.50 | +0.40, +0.08 to +0.72 | 12, then held |" in table
    assert "| outcome only | mean | 0.20 ± 0.00 | 0.60 ± 0.00 |" in table


@pytest.mark.slow
def test_a_short_run_makes_the_beginner_better_and_goes_on_where_it_was_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--tracks", "tool-call", "--rewards", "steps", "--seeds", "1", "--steps", str(STEPS)]
    flags += ["--groups", "80", "--out", str(tmp_path)]  # learning the wrong way ends, too
    folder = Case("tool-call", "steps", 0).folder(tmp_path)
    command = [sys.executable, "-m", "examples.tracks.compare", *flags]
    log = tmp_path / "log"
    with log.open("wb") as said:
        ended = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said)
    until(lambda: ended.poll() is not None or re.search(r"step [1-9]", log.read_text()))
    ended.send_signal(signal.SIGTERM)
    assert ended.wait() == 128 + signal.SIGINT, log.read_text()
    data, trained = folder / "run", "SELECT COUNT(*) FROM turns WHERE state = 'trained'"
    before = one(data, trained)
    assert compare.main(flags) == 0, "its gateway has ended, or another could not have begun"
    assert one(data, trained) > before
    end = compare.found(folder)
    assert end is not None
    assert (end.steps, end.held) == (STEPS, False)
    assert end.after >= end.before + RISE, capsys.readouterr().out
