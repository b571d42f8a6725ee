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
from tests.support.stories import SECRET, Told, every_state, run
from tests.support.terminals import on_a_terminal
from tinker_claw.cli import main
from tinker_claw.cli.log import since
from tinker_claw.errors import ConfigError
from tinker_claw.ledger.database import FILE, reading
from tinker_claw.ledger.views import Filter, read

TABLES = ("turns", "verdicts", "feedback", "samples", "steps")
KEYS = {
    "turns": "id session user index task group kind kind_reason call policy_version fallback "
    "prompt_tokens completion_tokens created_at next_role judged verdict verdict_by hints state "
    "reason detail trained_in_step in_step outcome",
    "verdicts": "turn session user policy_version created_at verdict verdict_by judge score votes "
    "hints",
    "feedback": "id turn session user policy_version created_at score source final task group "
    "unused",
    "samples": "id turn session user policy_version created_at state reward advantage hinted "
    "task group index step",
    "steps": "id status parent version lesson created_at finished_at samples metrics error outage "
    "refused",
}
TURN = (
    "tokens logprobs topk_ids topk_logprobs stop_reason params cached_tokens session_key "
    "session_outcome request_text lessons runs voices reply_text trace next_state answers "
    "failed_try tries feedback judge_prompt judge_verdict hint untaught overlap reward advantage "
    "advantages usd prompt "
    "hint_texts lost version left_behind finished_at together age void"
)
"""What the ledger has on the turn of a row."""
MORE = dict.fromkeys(TABLES, TURN) | {"steps": "rule"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    directory = tmp_path_factory.mktemp("every") / "data"
    return directory, every_state(directory)


@pytest.fixture
def log(world: tuple[Path, dict[str, int]], capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command as the shell would, but in this process."""

    def log(*flags: str) -> str:
        assert main.main(["log", *flags, "--data-dir", str(world[0])]) == 0
        return capsys.readouterr().out

    return log


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("name", TABLES)
def test_json_has_one_object_a_line_with_these_keys(log: Any, name: str) -> None:
    found = records(log(name, "--json"))
    assert found
    assert all(list(record) == KEYS[name].split() for record in found)
    full = records(log(name, "--full"))
    assert len(full) == len(found)
    keys = {*KEYS[name].split(), *MORE[name].split()}
    assert all(record.keys() == keys for record in full)


@pytest.mark.parametrize("name", TABLES)
def test_no_words_of_anybody_without_full(log: Any, name: str) -> None:
    for flags in ((), ("--json",)):
        assert SECRET not in log(name, *flags)
    assert (SECRET in log(name, "--full")) == (name != "steps")


def test_turns_say_how_far_they_came(world: tuple[Path, dict[str, int]], log: Any) -> None:
    _, turns = world
    by_id = {record["id"]: record for record in records(log("turns", "--json"))}
    assert list(by_id) == sorted(turns.values()), "the newest last"
    trained, silent = by_id[turns["trained"]], by_id[turns["no verdict"]]
    assert (trained["verdict"], trained["hints"], trained["state"]) == (1, 1, "trained")
    assert (trained["trained_in_step"], trained["policy_version"], trained["user"]) == (1, 0, "me")
    assert (trained["prompt_tokens"], trained["completion_tokens"]) == (4, 3)
    assert (silent["judged"], silent["verdict"]) == (True, None)
    unjudged = by_id[turns["waits for the judge"]]
    assert (unjudged["judged"], unjudged["next_role"]) == (False, "user")
    assert by_id[turns["queued"]]["trained_in_step"] is None
    assert by_id[turns["by another version"]]["fallback"] == "v1 failed: no adapter"
    side = by_id[turns["side"]]
    assert (side["kind"], side["reason"], side["detail"]) == ("side", "side turn", "recap")


def test_full_gives_back_what_was_sampled(world: tuple[Path, dict[str, int]], log: Any) -> None:
    (turn,) = records(log("turns", "--full", "--session", "trained"))
    assert turn["prompt"] == [1, 2, 3, 4]
    assert turn["tokens"] == [5, 151_000, 7]
    assert turn["logprobs"] == [-0.1, -1.2345678901234567, -1e-9]
    assert turn["next_state"] == {"role": "user", "text": f"{SECRET} answer", "beside": []}
    assert turn["session_key"] == "trained"
    (step, *_) = records(log("steps", "--full"))
    assert step["rule"]["recipe"] == "default"
    assert "rule" not in step["metrics"]


@pytest.mark.parametrize(
    ("flags", "states"),
    [
        (("--kind", "side"), {"side"}),
        (("--trained",), {"trained", "trained on its verdict"}),
        (("--verdict", "none"), {"no verdict"}),
        (("--verdict", "0"), {"refused when judged"}),
        (("--verdict", "-1", "--trained"), {"trained on its verdict"}),
        (("--verdict", "bad", "--trained"), {"trained on its verdict"}),
        (("--verdict", "good", "--untrained", "--session", "queued"), {"queued"}),
        (("--session", "1"), {"trained"}),
        (("--user", "somebody else"), set()),
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


def test_filters_hold_for_verdicts_and_samples_and_are_refused_elsewhere(
    world: tuple[Path, dict[str, int]], log: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {r["verdict"] for r in records(log("verdicts", "--json", "--verdict", "-1"))} == {-1}
    assert {r["state"] for r in records(log("samples", "--json", "--trained"))} == {"trained"}
    assert [r["turn"] for r in records(log("samples", "--json", "--session", "trained"))] == [1]
    assert records(log("steps", "--json", "--since", "2999-01-01")) == []
    for flags, named in ((("--user", "me"), "--user"), (("--untrained",), "--untrained")):
        assert main.main(["log", "steps", *flags, "--data-dir", str(world[0])]) == 2
        assert f"{named} goes with turns, verdicts" in capsys.readouterr().err


def test_times() -> None:
    assert since("90min", 10_000.0) == 4600.0
    assert since("2h", 10_000.0) == 2800.0
    assert since("1.5d", 200_000.0) == 70_400.0
    assert since("1970-01-02T00:00:00+00:00", 0.0) == 86_400.0
    with pytest.raises(ConfigError, match="give a time like"):
        since("yesterday", 0.0)


def test_table_is_aligned_and_says_what_it_leaves_out(world: tuple[Path, dict[str, int]]) -> None:
    done = run("log", "turns", "--limit", "3", directory=world[0])
    assert done.returncode == 0
    heading, *lines = done.stdout.splitlines()
    assert heading.split()[:6] == ["id", "when", "user", "session", "index", "kind"]
    assert len(lines) == 3
    at = heading.index("outcome")
    assert [line[at:] for line in lines] == [
        "waits for a step",
        "in step 4",
        "waits for the next message",
    ]
    assert "tinker-claw: earlier turns are left out; --limit N shows more\n" in done.stderr
    empty = run("log", "turns", "--user", "nobody", directory=world[0])
    assert (empty.returncode, empty.stdout) == (0, "")
    assert "no turns in" in empty.stderr


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_a_line_for_every_row(log: Any, name: str) -> None:
    heading, *lines = log(name).splitlines()
    assert len(lines) == len(records(log(name, "--json")))
    assert "  " in heading


def test_settings_of_run_py_find_the_ledger(tmp_path: Path) -> None:
    every_state(tmp_path / "runs" / "demo-opd")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TINKER_CLAW_")}
    command = [sys.executable, str(ROOT / "run.py"), "log", "--model-name", "demo", "steps"]
    done = subprocess.run(
        [*command, "--method", "opd", "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert records(done.stdout)[0]["id"] == 1
    nowhere = run("log", "turns", directory=tmp_path)
    assert nowhere.returncode == 2
    assert "holds no ledger; name the directory with --data-dir" in nowhere.stderr
    wrong = run("log", "turns", "--no-such-flag", directory=tmp_path)
    assert wrong.returncode == 2


def test_a_closed_pipe_ends_it_quietly(tmp_path: Path) -> None:
    fill(tmp_path, 2000)
    script = f"{sys.executable} run.py log turns --json --data-dir {tmp_path} | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (main.EXIT_UNREAD, "")
    assert json.loads(done.stdout)["id"] == 1


def test_reading_does_not_hold_up_a_writer(tmp_path: Path) -> None:
    story = Told(tmp_path)  # holds the directory, as a gateway that runs does
    story.turn()
    with reading(tmp_path / FILE) as ledger, ledger.moment():
        assert read(ledger, "turns", Filter(), None)
        for _ in range(20):
            story.turn()
    story.ledger.close()


def test_on_a_terminal_turns_show_how_they_began(world: tuple[Path, dict[str, int]]) -> None:
    """But not in a file, and nothing of a side call."""
    command = (sys.executable, "run.py", "log", "--data-dir", str(world[0]))
    with on_a_terminal(command, ROOT, os.environ) as terminal:
        assert terminal.ended() == 0
    heading, *lines = terminal.shown.replace("\r", "").strip().splitlines()
    assert "words" in heading
    by_id = {int(line.split()[0]): line for line in lines if line.split()[0].isdecimal()}
    assert f"{SECRET} request" in by_id[world[1]["queued"]]
    assert SECRET not in by_id[world[1]["side"]]
    piped = run("log", directory=world[0])
    assert (piped.returncode, SECRET in piped.stdout) == (0, False)
