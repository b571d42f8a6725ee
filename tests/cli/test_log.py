"""`tinker-claw log` as users and scripts see it, over real ledgers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.lives import ROOT
from tests.support.many_turns import fill
from tests.support.stories import SECRET, every_state, run
from tests.support.terminals import on_a_terminal
from tinker_claw.cli import main

KEYS = {
    "turns": "id session user index task group kind kind_reason request_kind policy_version "
    "fallback prompt_tokens completion_tokens created_at next_role judged verdict verdict_by hints "
    "state reason detail trained_in_step in_step outcome",
    "steps": "id status parent version lesson created_at finished_at samples metrics error outage "
    "refused",
}


@pytest.fixture
def log(world: tuple[Path, dict[str, int]], capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command as the shell would, but in this process."""

    def log(*flags: str) -> str:
        assert main.main(["log", *flags, "--data-dir", str(world[0])]) == 0
        return capsys.readouterr().out

    return log


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("name", KEYS)
def test_every_row_is_a_line_and_an_object_with_these_keys(log: Any, name: str) -> None:
    found = records(log(name, "--json"))
    assert found
    assert len(log(name).splitlines()) == 1 + len(found)
    assert all(list(record) == KEYS[name].split() for record in found)
    assert SECRET not in log(name, "--json") + log(name)


def test_full_has_all_turns_with_their_words(log: Any) -> None:
    found, full = records(log("--json")), records(log("--full"))
    assert [record["id"] for record in full] == [record["id"] for record in found]
    assert full[0].keys() > found[0].keys()
    assert SECRET in log("--full")


def test_full_gives_back_what_was_sampled(world: tuple[Path, dict[str, int]], log: Any) -> None:
    (turn,) = records(log("turns", "--full", "--session", "trained"))
    assert turn["prompt"] == [1, 2, 3, 4]
    assert turn["tokens"] == [5, 151_000, 7]
    assert turn["logprobs"] == [-0.1, -1.2345678901234567, -1e-9]
    assert turn["session_key"] == "trained"
    (step, *_) = records(log("steps", "--json"))
    assert "rule" not in step["metrics"]


@pytest.mark.parametrize(
    ("flags", "states"),
    [
        (("--verdict", "none"), {"no verdict"}),
        (("--verdict", "bad", "--trained"), {"trained on its verdict"}),
        (("--verdict", "good", "--untrained", "--session", "queued"), {"queued"}),
        (("--session", "1"), {"trained"}),
        (("--since", "2h", "--kind", "side"), {"side"}),
        (("--since", "2999-01-01"), set()),
        (("--limit", "1"), {"by another version"}),
    ],
)
def test_filters(
    world: tuple[Path, dict[str, int]], log: Any, flags: tuple[str, ...], states: set[str]
) -> None:
    names = {turn: state for state, turn in world[1].items()}
    assert {names[r["id"]] for r in records(log("turns", "--json", *flags))} == states


def test_filters_of_turns_are_refused_for_steps(
    world: tuple[Path, dict[str, int]], log: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert records(log("steps", "--json", "--since", "2999-01-01")) == []
    assert main.main(["log", "steps", "--user", "me", "--data-dir", str(world[0])]) == 2
    assert "of steps only --since and --limit choose" in capsys.readouterr().err


def test_rows_that_are_left_out_or_not_there_are_told(world: tuple[Path, dict[str, int]]) -> None:
    done = run("log", "turns", "--limit", "3", directory=world[0])
    assert len(done.stdout.splitlines()) == 4
    assert "earlier turns are left out; --limit N shows more" in done.stderr
    empty = run("log", "turns", "--user", "nobody", directory=world[0])
    assert (empty.returncode, empty.stdout) == (0, "")
    assert "no turns in" in empty.stderr


def test_settings_of_a_run_find_its_ledger(
    tmp_path: Path, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_state(tmp_path / "runs" / "demo-opd")
    monkeypatch.chdir(tmp_path)
    done = run("log", "--model-name", "demo", "steps", "--method", "opd", "--json")
    assert records(done.stdout)[0]["id"] == 1


def test_a_closed_pipe_ends_it_quietly(tmp_path: Path) -> None:
    fill(tmp_path, 400)  # more than a pipe holds
    script = f"{sys.executable} run.py log turns --json --data-dir {tmp_path} | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["id"] == 1


def test_on_a_terminal_turns_show_how_they_began(world: tuple[Path, dict[str, int]]) -> None:
    """But not in a file, and nothing of a side call."""
    command = (sys.executable, "run.py", "log", "--data-dir", str(world[0]))
    with on_a_terminal(command, ROOT, os.environ, columns=300) as terminal:
        assert terminal.ended() == 0
    heading, *lines = terminal.shown.replace("\r", "").strip().splitlines()
    assert "words" in heading
    by_id = {int(line.split()[0]): line for line in lines if line.split()[0].isdecimal()}
    assert f"{SECRET} request" in by_id[world[1]["queued"]]
    assert SECRET not in by_id[world[1]["side"]]
    piped = run("log", directory=world[0])
    assert (piped.returncode, SECRET in piped.stdout) == (0, False)
