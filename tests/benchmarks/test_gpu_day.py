"""The first day on a GPU: rehearsed on a CPU, broken off and gone on with, and told on a screen."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_day, gpu_rows, serving
from benchmarks.gpu_day import Goal, Stage, finished, main, rows_in, run, stages, summary
from benchmarks.gpu_rows import Rows

FIRST = ("probe", "kernels", "gradients", "step", "peak", "shared")


@pytest.mark.slow
def test_the_whole_day_is_rehearsed_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rehearse", "--folder", str(tmp_path)]
    main(words)  # a CPU misses goals of a GPU
    told = capsys.readouterr().out
    day = {stage.name: stage for stage in stages(tmp_path, "cpu", small=True)}
    reports = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in day}
    statuses = {name: report["status"] for name, report in reports.items()}
    needs_vllm = {name for name, stage in day.items() if stage.needs}
    assert all(statuses[name] in ("done", "missed") for name in day.keys() - needs_vllm), statuses
    rows = {name: {row["row"]: row for row in reports[name]["rows"]} for name in FIRST}
    assert len(rows["kernels"]) == len(gpu_day.KERNELS) * 9
    for kernel in ("sdpa", "merged"):
        measured = [row for name, row in rows["kernels"].items() if name.startswith(kernel)]
        assert all(row["ms"] > 0 for row in measured)
    assert "no backward pass on the CPU" in rows["kernels"]["flex, star, 256"]["failed"]
    assert {row["error"] < 1e-5 for name, row in rows["gradients"].items() if "tiny" in name} == {
        True
    }
    assert {"as it is", "profile", "nothing computed again", "liger"} < rows["step"].keys()
    assert rows["shared"].keys() == {"ours", "peft"}
    life = {row["row"]: row for row in reports["life"]["rows"]}
    assert life["kill -9"]["killed"] == 1
    assert "The ranks died" in life["kill -9"]["told"]
    assert life["kill -9"]["back_s"] > 0
    assert life["publish"]["apart_nats"] < 1e-4
    assert len(reports["embedded"]["rows"]) == 1
    lines = told.rstrip().splitlines()
    screen = lines[-len(day) - 3 :]
    assert [line.split()[0] for line in screen[1 : 1 + len(day)]] == list(day)
    assert all(len(line) <= 140 for line in screen[: 1 + len(day)])


def stage(code: str, **changed: Any) -> Stage:
    words = f"python -c {shlex.quote(code)} {{rows}}"
    return replace(Stage("one", 1, "It matters.", (words,)), **changed)


def writes(*rows: object, then: str = "") -> str:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    return f"import sys; open(sys.argv[1], 'a').write({lines!r}); {then}"


def test_what_failed_or_took_too_long_is_tried_again_and_what_missed_is_not(tmp_path: Path) -> None:
    failed = run(stage("print('no luck'); raise SystemExit(4)"), tmp_path)
    assert (failed.status, failed.commands[0]["status"]) == ("failed", 4)
    assert "no luck" in (tmp_path / "one.md").read_text()
    assert not finished(stage(""), tmp_path)
    late = run(
        stage(writes({"row": "a"}, then="import time; time.sleep(600)"), minutes=0.05), tmp_path
    )
    assert (late.status, late.commands[0]["status"]) == ("over time", None)
    assert [row["row"] for row in late.rows] == ["a"], "what was measured until then stays"
    assert not finished(stage(""), tmp_path)
    never = Goal("figures", lambda rows: (rows[0]["figure"] == 1, "none"))
    missed = run(stage("pass", goals=(never,)), tmp_path)
    assert missed.status == "missed"
    assert "there is no figure" in missed.goals[0]["found"]
    assert finished(stage(""), tmp_path)
    (tmp_path / "one.json").write_text('{"status":')  # a machine that went away
    assert not finished(stage(""), tmp_path)


def test_rows_that_are_there_stay_and_those_that_failed_are_tried_again(tmp_path: Path) -> None:
    first = stage(writes({"row": "a", "ms": 1}, {"row": "b", "failed": "out of memory"}))
    run(first, tmp_path)
    path = tmp_path / "one.rows.jsonl"
    path.write_text(path.read_text() + '{"row": "c", "m')  # cut off
    again = run(stage(writes({"row": "b", "ms": 2})), tmp_path)
    assert [(row["row"], row.get("ms")) for row in again.rows] == [("a", 1), ("b", 2)]


@pytest.mark.slow
def test_after_a_broken_device_the_next_process_goes_on_behind_that_row(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import sys, pathlib, torch\n"
        "from benchmarks.gpu_rows import Rows\n"
        "def broken():\n"
        "    raise RuntimeError('CUDA error: device-side assert triggered')\n"
        "rows = Rows(pathlib.Path(sys.argv[1]), torch.device('cpu'), small=True)\n"
        "rows.take('before', lambda: {'ms': 1})\n"
        "rows.take('breaks', broken)\n"
        "rows.take('behind', lambda: {'ms': 2})\n"
    )
    report = run(stage(code, goals=(gpu_day._all(),)), tmp_path)
    assert [one["status"] for one in report.commands] == [gpu_rows.BROKEN, 0]
    assert [row["row"] for row in report.rows] == ["before", "breaks", "behind"]
    assert report.status == "missed"
    assert "device-side assert" in report.goals[0]["found"]


def test_a_row_stands_in_the_file_before_the_next_begins(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    rows = Rows(path, torch.device("cpu"), small=True)
    rows.take("one", lambda: {"ms": 1})
    rows.take("two", lambda: {"seen": [row["row"] for row in rows_in(path)]})
    rows.take("no room", lambda: {"bytes": torch.empty(1 << 60).nbytes})
    assert [row.get("seen") for row in rows_in(path)] == [None, ["one"], None]
    assert rows_in(path)[2]["failed"] == "out of memory"
    Rows(path, torch.device("cpu"), small=True).take("one", lambda: pytest.fail("again"))


def test_where_vllm_is_missing_its_stages_are_left_out_and_the_day_goes_on(tmp_path: Path) -> None:
    needs = {one.name: one for one in stages(tmp_path) if one.needs is not None}
    assert needs.keys() == {"vllm", "serving"}
    for one in needs.values():
        report = run(replace(one, needs=tmp_path / "no" / "vllm"), tmp_path)
        assert report.status == "left out"
        assert "docs/gpus.md" in str(report)
    gone = stage("pass", beside=f"{tmp_path / 'no' / 'vllm'} serve", ready="http://127.0.0.1:9/")
    report = run(gone, tmp_path)
    assert report.status == "failed"
    assert "No such file" in report.told


def test_a_server_runs_beside_a_stage_and_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import http.server as h, os, pathlib; s = h.ThreadingHTTPServer(('127.0.0.1', 0), "
        "h.SimpleHTTPRequestHandler); p = pathlib.Path('{0}'); p.write_text(str(s.server_port)); "
        "s.serve_forever()"
    )
    port = tmp_path / "port"
    dead = stage("pass", beside="python -c 'raise SystemExit(1)'", ready="http://127.0.0.1:9/")
    assert run(dead, tmp_path).status == "failed"
    server = gpu_day._start(f"python -c {shlex.quote(code.format(port))}", tmp_path / "log")
    try:
        while not (port.exists() and port.read_text()):
            assert server.poll() is None
        asked = f"http://127.0.0.1:{port.read_text()}/"
        beside = stage("pass", beside="python -c 'import time; time.sleep(600)'", ready=asked)
        report = run(beside, tmp_path)
        assert report.status == "done"
        assert report.commands[-1]["status"] is not None, "it has ended"
    finally:
        gpu_day._end(server)


@pytest.mark.parametrize("small", [False, True])
def test_every_command_parses_and_the_first_twenty_minutes_stand_alone(
    tmp_path: Path, small: bool
) -> None:
    day = stages(tmp_path, small=small)
    assert tuple(one.name for one in day[: len(FIRST)]) == FIRST
    if not small:  # a rehearsal's minutes are longer: a CPU works through the stages
        assert sum(one.minutes for one in day[: len(FIRST)]) == 20
    for one in day:
        for command in one.commands:
            program, *words = shlex.split(command.replace("{rows}", "x.json"))[2:]
            if program == "benchmarks.gpu_rows":
                gpu_rows.parser().parse_args(words)
            elif program == "benchmarks.serving":
                serving.parser().parse_args(words)
            else:
                assert program == "pytest"
    assert main(["--only", "nothing"]) == 2


def test_goals_are_judged_from_the_rows(tmp_path: Path) -> None:
    day = {one.name: one for one in stages(tmp_path)}

    def met(name: str, rows: list[dict[str, Any]]) -> list[bool]:
        return [goal.judge(rows)[0] for goal in day[name].goals]

    sides = [{"row": "ours", "step_s": 1.0}, {"row": "peft", "step_s": 3.0}]
    assert met("shared", sides) == [True, True]
    sides[0]["step_s"] = 2.0
    assert met("shared", sides) == [True, False]
    kernels = [
        {"row": "sdpa, star, 8192", "ms": 2.0, "tokens": 10, "error": 0.0},
        {"row": "flex, star, 8192", "ms": 1.0, "tokens": 10, "error": 0.2},
        {"row": "fa3, star, 8192", "failed": "there is none"},
    ]
    assert met("kernels", kernels)[0] is False
    assert day["kernels"].goals[1].judge(kernels)[1] == "star flex"
    assert met("peak", [{"row": "a", "grown_of_planned": 1.3}]) == [True, False]
    life = [
        {"row": "publish", "written_s": 0.2, "opened_s": 0.3, "apart_nats": 0.01},
        {"row": "device assert", "recognised": False},
    ]
    assert met("life", life) == [True, True, True, False]
    served = [{"phases": {"step": {"failed": 1}}, "published": [{"publish": 0.4}]}]
    assert met("serving", served) == [False, True]


def test_the_summary_is_one_screen_at_any_time(tmp_path: Path) -> None:
    day = stages(tmp_path)
    run(replace(day[0], commands=(f"python -c {shlex.quote('pass')}",)), tmp_path)
    text = summary(day, tmp_path)
    assert len(text.splitlines()) == len(day) <= 24
    assert text.startswith("probe      missed")
    assert "shared     to come" in text
    assert (tmp_path / "summary.txt").read_text() == text
