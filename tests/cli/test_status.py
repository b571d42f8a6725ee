"""`tinker-claw status` against a real gateway, and its messages when something is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import World, gateway
from tests.support.lives import ROOT
from tinker_claw.app import orders
from tinker_claw.cli import main
from tinker_claw.cli.status import describe
from tinker_claw.errors import OutageError
from tinker_claw.learner.health import Health
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.render.renderer import Renderer

NOON = datetime(2026, 3, 5, 12, 0).timestamp()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(__import__("os").environ):
        if name.startswith("TINKER_CLAW_"):
            monkeypatch.delenv(name)


def port_of(url: str) -> str:
    return url.removesuffix("/v1").rpartition(":")[2]


async def ask(directory: Path, *flags: str) -> int:
    """Run the command as the shell would, but in this process."""
    flags = ("status", "--data-dir", str(directory), *flags)
    return await asyncio.to_thread(main.main, flags)


def goes_away(world: World) -> None:
    error = OutageError("Tinker: an optimizer step failed, because it answers HTTP 503.")
    world.health.backend.seen("learning", error)
    world.health.learner_stalls(error, 40)


async def test_all_is_well(
    tmp_path: Path, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with gateway(tmp_path, renderer) as world:
        assert await ask(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "First judged turns accepted: none yet",
        f"tinker-claw at http://127.0.0.1:{port_of(world.url)}: ok",
        "Replies come from policy v0; 0 of 16 samples for the next step are queued.",
        "",
    ]


async def test_outage_says_what_since_when_and_what_it_means(
    tmp_path: Path, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with gateway(tmp_path, renderer) as world:
        goes_away(world)
        capsys.readouterr()  # the event
        assert await ask(tmp_path) == 1
        told = capsys.readouterr().out
        assert re.search(r"backend: away since \d\d:\d\d:\d\d \(\d+ s ago\)", told)
        assert told.count("because it answers HTTP 503") == 1
        assert re.search(r"after 1 attempt; next try in [34]\d s", told)
        assert "as before; learning waits; nothing is lost." in told
        assert await ask(tmp_path, "--json") == 1
        health = json.loads(capsys.readouterr().out)
        assert (health["backend"], health["learner"]) == ("away", "stalled")
        # As a user types it.
        flags = ("status", "--data-dir", str(tmp_path))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "run.py", *flags, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert process.returncode == 1
        assert b"learning waits" in out


async def test_nobody_there_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await ask(tmp_path) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert f"No gateway runs on {tmp_path}. Start one with `tinker-claw`, or give the" in told.err
    assert await ask(tmp_path, "--json") == 2
    assert json.loads(capsys.readouterr().out)["status"] == "unreachable"


async def test_gateway_that_does_not_answer_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Ledger(tmp_path)):
        assert await ask(tmp_path) == 2
        assert f"No gateway answers: a process has {tmp_path} in use" in capsys.readouterr().err
        monkeypatch.setattr(orders, "TIMEOUT_S", 0.1)
        with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, says nothing
            known = {"gateway": silent.getsockname(), "token": "mine"}
            (tmp_path / "control.json").write_text(json.dumps(known))
            assert await ask(tmp_path) == 2
        assert "timed out" in capsys.readouterr().err


async def test_settings_file_names_the_data_directory(
    tmp_path: Path, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with gateway(tmp_path / "data", renderer) as world:
        file = tmp_path / "mine.toml"
        file.write_text(f"[run]\ndata_dir = '{tmp_path / 'data'}'\n")
        for command in (["status"], ["log", "turns"], ["versions"]):
            await world.ask("hello")
            assert await asyncio.to_thread(main.main, [*command, "--config", str(file)]) == 0
    assert ": ok\n" in capsys.readouterr().out


async def test_a_gateway_with_keys_tells_all_to_its_own_commands(
    tmp_path: Path, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "mine-0123456789abcdef"
    async with gateway(tmp_path, renderer, users={"anna": key}):
        assert await ask(tmp_path) == 0
    told = capsys.readouterr().out
    assert "policy v0" in told
    assert key not in told


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help-all"]) == 0
    told = capsys.readouterr().out
    assert set(main.COMMANDS) <= set(re.findall(r"[\w-]+", told))
    assert "--batch-size" in told
    assert "--help-all" in told
    assert main.main(["status", "--help"]) == 0
    assert "Exit status: 0 all is well" in capsys.readouterr().out


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (100, 24), (100, 40)])
def test_help_is_a_screen(columns: int, lines: int) -> None:
    done = subprocess.run(
        [sys.executable, "run.py", "--help"],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    told = done.stdout.splitlines()
    assert len(told) < lines, "the next prompt fits, too"
    assert max(map(len, told)) <= columns
    words = set(re.findall(r"[\w-]+", done.stdout))
    assert set(main.COMMANDS) <= words
    assert {"--model-name", "--backend", "--config", "--port", "--help-all"} <= words
    assert "--batch-size" not in words


def snapshot(health: Health, **figures: Any) -> dict[str, Any]:
    return health.snapshot(version=3, waiting=12, batch_size=16) | figures


def test_lines_of_a_gateway_in_trouble() -> None:
    health = Health()
    health.backend.seen("teaching", OutageError("the teacher gets no answer"))
    health.judge.enter("failing", "the judge refuses (HTTP 401)")
    health.learner.enter("failed", "OSError: disk full")
    seen = snapshot(health, spent_usd=1.25, budget_usd=5.0)
    seen |= {"backend_since": NOON - 250, "judge_since": NOON - 3 * 3600, "learner_since": NOON - 9}
    seen["judge_since"] -= 86_400
    assert describe(seen, "http://here", NOON) == [
        "tinker-claw at http://here: degraded",
        "  backend: away since 11:55:50 (4 min ago)",
        "    the teacher gets no answer",
        "  learner: failed since 11:59:51 (9 s ago)",
        "    OSError: disk full",
        "  judge: failing since 2026-03-04 09:00:00 (27 h ago)",
        "    the judge refuses (HTTP 401)",
        "Replies come from policy v3 as before; judging waits; learning has stopped until a "
        "restart; 12 samples are queued, none is lost.",
        "$1.2500 spent of the budget of $5",
    ]


def test_pause_of_the_budget_is_told_and_is_not_well() -> None:
    paused = {"judge": "paused", "learner": "paused", "learner_since": NOON - 60}
    paused |= {"status": "paused", "spending_paused": "$5 of the budget of $5 are spent."}
    told = describe(snapshot(Health(), **paused), "http://here", NOON)
    assert told[1:3] == [
        "  spending: paused since 11:59:00 (60 s ago)",
        "    $5 of the budget of $5 are spent.",
    ]


@pytest.mark.parametrize(
    ("away", "learner", "judge", "agreement", "waiting", "says"),
    [
        (set(), "waiting", "ok", "ok", 5, "v3; 5 of 16 samples for the next step are queued."),
        (set(), "finished", "ok", "ok", 5, "v3; learning has ended."),
        (
            set(),
            "held",
            "ok",
            "ok",
            16,
            "v3 as before; learning is paused (`tinker-claw status` says why, and how it resumes"
            "); 16 samples are queued, none is lost.",
        ),
        (set(), "recovering", "ok", "ok", 1, "being loaded; 1 sample is queued, none is lost."),
        (
            set(),
            "failed",
            "ok",
            "alarm",
            0,
            "learning has stopped until a restart; nothing is lost.",
        ),
        (set(), "waiting", "failed", "ok", 0, "judging has started again; nothing is lost."),
        (set(), "failed", "ok", "ok", 0, "learning starts again by itself; nothing is lost."),
        (
            {"learning"},
            "stalled",
            "ok",
            "ok",
            12,
            "learning waits; 12 samples are queued, none is lost.",
        ),
        (
            {"judging"},
            "waiting",
            "stalled",
            "ok",
            0,
            "v3 as before; judging waits; nothing is lost.",
        ),
        ({"serving"}, "waiting", "ok", "ok", 0, "in time gets an error; nothing is lost."),
    ],
)
def test_meaning(
    away: Any, learner: str, judge: str, agreement: str, waiting: int, says: str
) -> None:
    health = Health()
    for asking in away:
        health.backend.seen(asking, OutageError("away"))
    if learner == "failed" and agreement == "ok":
        health.learner.enter(learner, next_try_s=1.0)  # else it has ended for good
    elif learner == "stalled":
        health.learner_stalls(OutageError("away"), 1.0)
    else:
        health.learner_is(learner)
    health.judge.enter(judge)
    health.agreement.enter(agreement)
    told = health.snapshot(version=3, waiting=waiting, batch_size=16)["meaning"]
    assert told.endswith(says)


def test_a_part_that_failed_is_not_said_to_try_again() -> None:
    health = Health()
    health.learner_stalls(OutageError("away"), 40)
    health.learner.enter("failed", "no state")
    told = describe(snapshot(health), "http://here", time.time())
    assert "next try" not in "\n".join(told)
    assert "starting again" not in "\n".join(told)
    health = Health()
    health.backend.seen("learning", OutageError("away"))
    health.learner_stalls(OutageError("away"), -1)
    assert "next try in 0 s" in "\n".join(describe(snapshot(health), "http://here", time.time()))


def test_a_part_that_starts_again_says_when() -> None:
    for part in ("judge", "learner", "upkeep"):
        health = Health()
        getattr(health, part).enter("failed", "KeyError: 3", next_try_s=4.2)
        seen = snapshot(health) | {f"{part}_since": NOON - 60}
        assert seen["status"] == "degraded"
        told = describe(seen, "http://here", NOON)
        assert told[1:3] == [
            f"  {part}: failed since 11:59:00 (60 s ago); next try in 4 s",
            "    KeyError: 3",
        ]
        assert "until a restart" not in told[3]
