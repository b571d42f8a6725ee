"""A real run as log, explain and status show it while the gateway goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.clients import learn
from tests.support.ledger import read
from tests.support.lives import product
from tests.support.many_turns import fill
from tests.support.stories import run
from tinker_claw.cli.status import board
from tinker_claw.ledger.database import FILE, reading
from tinker_claw.ledger.figures import read_figures, read_overview

pytestmark = pytest.mark.slow


def test_a_run_explains_itself_while_it_goes_on(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with product(data, "--learning-rate", "3e-3", "--lora-rank", "16") as running:
        learn(running, 1, range(0, 40))
        status = run("status", directory=data)
        assert (status.returncode, status.stderr) == (0, "")
        assert "policy     v1, 1 step from the base" in status.stdout
        told = json.loads(run("status", "--json", directory=data).stdout)
        log = run("log", "turns", "--json", "--trained", directory=data)
        explained = run(
            "explain", str(json.loads(log.stdout.splitlines()[0])["id"]), directory=data
        )
        assert running.stop() == 0
    assert told["policy_version"] == told["ledger"]["policy_version"] == 1
    assert told["ledger"]["run"]["model"] == "demo"
    (step,) = told["ledger"]["steps"]
    assert step["metrics"]["clip_share"] == 0.0, "fresh samples: no ratio is beyond its bounds"
    records = [json.loads(line) for line in log.stdout.splitlines()]
    assert len(records) == 16
    assert {record["trained_in_step"] for record in records} == {1}
    text = " ".join(explained.stdout.split())
    assert "trained in step 1 · v1 · with 15 others" in text
    rewards = [row[0] for row in read(data, "SELECT reward FROM samples WHERE step_id = 1")]
    mean = sum(rewards) / 16
    expected = records[0]["verdict"] - mean if len(set(rewards)) > 1 else rewards[0] / 4
    assert f"advantage {expected:+z.3f}" in text

    after = run("status", directory=data)
    assert after.returncode == 2
    assert "No gateway runs on" in after.stderr
    assert "trained: 16" in after.stdout


def test_status_of_a_long_run_reads_indexes_and_no_turn_but_the_open_ones(tmp_path: Path) -> None:
    fill(tmp_path, 1000)
    asked: list[str] = []
    with reading(tmp_path / FILE) as ledger:
        ledger._connection.set_trace_callback(asked.append)
        read_figures(ledger, 16)
        ledger._connection.set_trace_callback(None)
        plans = [
            row["detail"] for query in asked for row in ledger.rows(f"EXPLAIN QUERY PLAN {query}")
        ]
    turns = [plan for plan in plans if "turns" in plan]
    assert len(turns) > 4
    read = {p for p in turns if "USING COVERING INDEX" not in p}
    assert read <= {
        "SEARCH turns USING INDEX turns_by_state (state=?)",
        "SCAN turns USING INDEX turns_unknown",  # which has these alone
        "SEARCH turns USING INTEGER PRIMARY KEY (rowid=?)",
        # Which version began an episode, one turn of each.
        "SEARCH turns USING INDEX turns_by_session (session_id=? AND kind=?)",
    }


def test_status_of_a_long_run_is_short_and_counts_everything(tmp_path: Path) -> None:
    fill(tmp_path, 1000)
    told = read_overview(tmp_path, 16)
    assert told["turns"] == {"main": 900, "side": 100}
    assert sum(told["verdicts"].values()) == read(tmp_path, "SELECT COUNT(*) FROM verdicts")[0][0]
    assert told["not_trained"]["waits for the next message"] == 100
    assert sum(one["of"] for one in told["accepted"]) > 0
    assert len(board(told)) < 50
