"""The experiment on a real model; a tiny one of random weights stands for it here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from examples import locked
from examples.demo import DemoError
from examples.demo.judge import Case, create_app
from examples.real import cell as cells
from examples.real import report
from examples.real.__main__ import _cells, main
from examples.real.cell import ARMS, CELLS, JOURNAL, Cell, Journal, Lines, Setup, perform
from examples.real.cost import usd
from examples.real.person import exam, judge
from examples.real.wishes import APPROVALS, WISHES
from tests.support.ledger import read
from tests.support.lives import ROOT
from tests.support.models import tiny_small
from tinker_claw.app.server import in_background
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.judge.endpoints import HttpEndpoint
from tinker_claw.judge.judge import Judge

FLAGS = ("--gate=off", "--lora-rank=4", "--batch-size=4")
SETUP: dict[str, Any] = {"steps": 1, "flags": FLAGS}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cache")
    tiny_small(root)
    return root


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let exams be short, and `small` be the tiny model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr("examples.real.person.EXAM", ("Why?", "How?"))
    monkeypatch.setattr("examples.real.person.FACTS", (("Where?", "here"),))


def wanting(monkeypatch: pytest.MonkeyPatch, *, accepts: bool) -> None:
    """Let the person accept all replies, or none, also those that are cut."""
    wish = replace(WISHES["short"], follows=lambda _: accepts)
    monkeypatch.setitem(WISHES, "short", wish)  # type: ignore[arg-type]
    monkeypatch.setattr("examples.real.person.is_accepted", lambda wish, reply: accepts)


# What is said


@pytest.mark.parametrize("name", WISHES)
def test_a_wish_has_corrections_of_its_own_and_a_rule_for_its_opposite(name: str) -> None:
    wish = WISHES[name]
    assert len({*wish.corrections}) >= 3
    assert not {*wish.corrections} & {*APPROVALS}
    parts = Counter(question.part for question in exam(wish))
    assert parts == {"follow": 2, "contrary": 1, "facts": 1}


async def test_the_judge_by_rule_answers_the_products_own_question() -> None:
    wish, settings = WISHES["spanish"], JudgeSettings()
    app = create_app(0, judge(wish))
    async with in_background(app) as url, HttpEndpoint(url, settings) as endpoint:
        asked = Judge(endpoint, settings, most_hints=1, wishes=True)
        assert (await asked.hear(wish.corrections[0], []))[0] is None, "no standing wish"
    think = judge(wish)
    for words, opinion in [(wish.corrections[1], (-1, wish.text)), (APPROVALS[0], (1, None))]:
        assert think(Case("user", words, words), Random(0)) == opinion


# What is run


def test_cells_come_seed_by_seed_and_costly_arms_have_fewer() -> None:
    made = _cells([*ARMS], ["short", "spanish", "example"], 3)
    assert len({one.name for one in made}) == len(made) == 3 + 9 + 9 + 2 + 1
    assert [one.seed for one in made] == sorted(one.seed for one in made)


def test_a_line_that_a_kill_has_cut_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    journal = Journal(path, lambda: (60.0, 30.0))
    journal.add("session", number=0)
    with path.open("a") as file:
        file.write('{"what": "sess')
    again = Journal(path, lambda: (30.0, 6.0))
    again.add("session", number=1)
    assert [one["number"] for one in Journal(path, lambda: (0.0, 0.0)).of("session")] == [0, 1]
    assert (again.minutes("wall"), again.minutes("cpu")) == (1.5, 0.6)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["combine", "own-judge"])
async def test_a_cell_of_each_arm_runs_to_its_end(arm: str, tmp_path: Path) -> None:
    setup = Setup(tmp_path, **SETUP)
    async with in_background(create_app(0, judge(WISHES["short"]))) as url:
        if arm == "own-judge":  # a random model says nothing that can be read
            setup = replace(setup, flags=(*FLAGS, f"--judge-url={url}"))
        found = await perform(Cell(arm, "short", 0), setup, lambda _: None)
    assert found["steps"] >= 1
    assert found["exams"]["untold"].keys() == {"follow", "contrary", "facts", "ended"}
    assert found["exams"]["told"]["follow"][1] == 2
    assert found["usd"] > 0
    assert found["cpu_minutes"] > 0
    data = tmp_path / f"{arm}-short-0" / "run"
    sides = read(data, "SELECT told FROM turns WHERE kind = 'side'")
    assert {row[0] for row in sides} == {None}


@pytest.mark.slow
async def test_a_practised_cell_says_the_wish_once_and_tells_how_the_practice_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanting(monkeypatch, accepts=True)
    found = await perform(Cell("practised", "short", 0), Setup(tmp_path, **SETUP), lambda _: None)
    assert found["firsts"] == [True] * ARMS["practised"].sessions
    (run,) = found["practice"]
    assert run["passed"] or "follows it in" in run["because"], run
    data = tmp_path / "practised-short-0" / "run"
    assert read(data, "SELECT text FROM lessons")[0][0] == WISHES["short"].text
    rows = read(data, "SELECT told FROM turns WHERE kind = 'main' AND idx = 0 ORDER BY id")
    assert [row[0] is not None for row in rows][:3] == [False, True, True]
    assert usd(data / "ledger.sqlite3") == pytest.approx(found["usd"], abs=1e-4)


@pytest.mark.slow
def test_an_experiment_that_is_killed_goes_on_with_each_cell_and_reply_once(
    tmp_path: Path, cache: Path
) -> None:
    command = [sys.executable, "-m", "examples.real", "--arms", "base", "told"]
    command += ["--wishes", "plain", "--seeds", "1", "--out", str(tmp_path)]
    journal = tmp_path / "base-plain-0" / JOURNAL
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as one:
        while not journal.is_file() or journal.read_bytes().count(b"\n") < 5:
            assert one.poll() is None
            time.sleep(0.1)
        os.kill(one.pid, signal.SIGKILL)  # its server lives on
    before = journal.read_bytes()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "minutes to go" in done.stdout
    assert journal.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    replies = [(r["exam"], r["part"], r["number"]) for r in Lines(journal).all if "part" in r]
    assert len(replies) == len({*replies}) == 96
    names = [(one["arm"], one["wish"]) for one in Lines(tmp_path / CELLS).all]
    assert names == [("base", "plain"), ("told", "plain")]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert "0 cells, 2 are there already" in again.stdout
    assert "| told | plain | 0 |" in (tmp_path / report.MARKDOWN).read_text()


@pytest.mark.slow
async def test_a_product_that_is_not_well_ends_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random model judges, and cannot be read."""
    monkeypatch.setattr(cells, "DEGRADED_S", 1.0)
    with pytest.raises(DemoError, match="the product is not well"):
        await perform(Cell("own-judge", "short", 0), Setup(tmp_path, **SETUP), lambda _: None)


# What came out


def ended(arm: str, wish: str, firsts: str, **more: Any) -> dict[str, Any]:
    """Return the figures of a possible cell."""
    exam = {"follow": [21, 24], "contrary": [11, 12], "facts": [12, 12], "ended": [23, 24]}
    return {
        **{"arm": arm, "wish": wish, "seed": 0, "firsts": [one == "+" for one in firsts]},
        **{"exams": {"untold": exam, "told": exam}, "practice": [], "steps": 0, "usd": 0.25},
        **{"wall_minutes": 9.4, "cpu_minutes": 8.6, "commit": "abc", "date": "2026-11-29"},
        **{"load": 1.5, "flags": ["--base-dtype=auto"]},
    } | more


def test_the_report_has_every_cell_and_a_picture(tmp_path: Path) -> None:
    report.write([], tmp_path)
    refused = [{"passed": False, "because": "3 of 12 replies follow the lesson"}]
    made = [
        ended("base", "short", ""),
        ended("told", "short", "-+++-+"),
        ended("practised", "short", "-+++", practice=refused),
        ended("combine", "short", "-" * 8 + "+" * 24, steps=16),
    ]
    report.write(made, tmp_path)
    text = (tmp_path / report.MARKDOWN).read_text()
    for row in (
        "| short, told | 21 of 24 | 11 of 12 | 12 of 12 |",
        "| told | short | 0 | 0 of 1 | 1 of 1 | 3 of 4 | 0 |",
        "16 of 16 | 16 | 21 of 24 |",  # of the newest sixteen
        "not kept: 3 of 12 replies",
    ):
        assert row in text
    assert (tmp_path / report.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_an_experiment_is_alone_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked(tmp_path):
        assert main(["--out", str(tmp_path)]) == 1
    assert "another run" in capsys.readouterr().err
