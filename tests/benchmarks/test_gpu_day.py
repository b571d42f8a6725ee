"""The first day on a GPU: its first stage on a CPU, and that a day that was broken off goes on."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_day, serving, training
from benchmarks.gpu_day import Goal, Stage, finished, main, run, stages


def test_the_first_stage_runs_and_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--folder", str(tmp_path), "--device", "cpu", "--quick", "--only", "tiny"]
    assert main(words) == 0, (tmp_path / "tiny.md").read_text()
    report = json.loads((tmp_path / "tiny.json").read_text())
    assert report["status"] == "done"
    assert [goal["met"] for goal in report["goals"]] == [True, True]
    sides = {row["side"] for row in report["figures"]["cases"]["shared"]}
    assert sides == {"ours", "peft, logits of the loss"}
    assert "- [x] gradients within 1e-05" in (tmp_path / "tiny.md").read_text()
    before = (tmp_path / "tiny.json").stat().st_mtime_ns
    capsys.readouterr()
    assert main(words) == 0
    assert "measured before" in capsys.readouterr().out
    assert (tmp_path / "tiny.json").stat().st_mtime_ns == before
    assert main([*words, "--list"]) == 0
    assert "measured" in capsys.readouterr().out.splitlines()[0]


def stage(code: str, **changed: Any) -> Stage:
    return replace(Stage("one", "It matters.", (f"python -c {shlex.quote(code)}",)), **changed)


def test_what_failed_or_took_too_long_is_tried_again_and_what_missed_is_not(tmp_path: Path) -> None:
    failed = run(stage("print('no luck'); raise SystemExit(3)"), tmp_path)
    assert (failed.status, failed.commands[0]["status"]) == ("failed", 3)
    assert "no luck" in (tmp_path / "one.md").read_text()
    assert not finished(stage(""), tmp_path)
    late = run(stage("import time; time.sleep(600)"), tmp_path, seconds=0.5)
    assert (late.status, late.commands[0]["status"]) == ("over time", None)
    assert not finished(stage(""), tmp_path)
    never = Goal("figures", lambda figures: (figures["cases"] == {}, "none"))
    missed = run(stage("pass", goals=(never,)), tmp_path)
    assert missed.status == "missed"
    assert "there is no figure" in missed.goals[0]["found"]
    assert finished(stage(""), tmp_path)
    (tmp_path / "one.json").write_text('{"status":')  # a machine that went away
    assert not finished(stage(""), tmp_path)


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


def test_every_command_parses_and_the_order_is_what_stops_a_user_first(tmp_path: Path) -> None:
    day = stages(tmp_path)
    names = [one.name for one in day]
    order = ["tiny", "kernel-auto", "shared", "vllm", "serving"]
    assert [name for name in names if name in order] == order
    for one in day:
        for command in one.commands:
            program, *words = shlex.split(command.replace("{json}", "x.json"))[2:]
            if program == "benchmarks.training":
                training.options_of(training.parser().parse_args([*words, "--device", "cpu"]))
            elif program == "benchmarks.serving":
                serving.parser().parse_args(words)
            else:
                assert program == "pytest"
    assert main(["--only", "nothing"]) == 2


def test_goals_are_judged_from_the_figures(tmp_path: Path) -> None:
    day = {one.name: one for one in stages(tmp_path)}

    def row(side: str, useful: float) -> dict[str, Any]:
        return {
            **{"side": side, "failed": None, "useful_tokens_per_s": useful, "peak_bytes": 79e9},
            **{"flops": 6e14, "median_s": 1.0, "gradient_error": 1e-6},
        }

    rows = [row("ours", 3000.0), row("peft, logits of the loss", 1000.0)]
    shared = {"ceiling": 1e15, "cases": {"shared": rows, "long": rows}}
    assert [g.judge(shared)[0] for g in day["shared"].goals] == [True, True, True]
    rows[0]["useful_tokens_per_s"], rows[0]["flops"] = 2000.0, 4e14
    assert [g.judge(shared)[0] for g in day["shared"].goals] == [True, False, False]
    rows[0]["failed"] = "out of memory"
    assert not day["long"].goals[0].judge(shared)[0]
    assert day["long"].goals[1].judge(shared) == (True, "79.0 GB")
    served = {"phases": {"step": {"failed": 1}}, "published": [{"publish": 0.4}]}
    assert [g.judge(served)[0] for g in day["serving"].goals] == [False, True]
