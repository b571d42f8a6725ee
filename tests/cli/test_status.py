"""`tinker-claw status` against a real gateway, and its messages when something is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import gateway
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
    for name in list(os.environ):
        if name.startswith("TINKER_CLAW_"):
            monkeypatch.delenv(name)


async def ask(directory: Path, *flags: str) -> int:
    """Run the command as the shell would, but in this process."""
    flags = ("status", "--data-dir", str(directory), *flags)
    return await asyncio.to_thread(main.main, flags)


async def test_outage_says_what_since_when_and_what_it_means(
    tmp_path: Path, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with gateway(tmp_path, renderer) as world:
        assert await ask(tmp_path, "--json") == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["status"], report["ledger"]["policy_version"]) == ("ok", 0)
        assert await ask(tmp_path) == 0
        assert f"tinker-claw at {world.url.removesuffix('/v1')}: ok" in capsys.readouterr().out
        error = OutageError("Tinker: an optimizer step failed, because it answers HTTP 503.")
        world.health.outages.seen("learning", error)
        world.health.learner_is("stalled", str(error), 40)
        capsys.readouterr()  # the event
        assert await ask(tmp_path) == 1
        text = capsys.readouterr().out
        assert re.search(r"backend: away since \d\d:\d\d:\d\d\n", text)
        assert text.count("because it answers HTTP 503") == 1
        assert re.search(r"after 1 attempt; next try in [34]\d s", text)
        assert "as before; learning waits; nothing is lost." in text
        assert await ask(tmp_path, "--json") == 1
        health = json.loads(capsys.readouterr().out)
        assert (health["backend"], health["learner"]) == ("away", "stalled")


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


def test_help_is_a_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 24, "the next prompt fits, too"
    assert max(map(len, text.splitlines())) <= 80
    words = set(re.findall(r"[\w-]+", text))
    assert {*main.COMMANDS, "--model-name", "--port", "--help-all"} <= words
    assert "--batch-size" not in words
    assert main.main(["--help-all"]) == 0
    assert {*main.COMMANDS, "--batch-size"} <= set(re.findall(r"[\w-]+", capsys.readouterr().out))


def lines(health: Health, **figures: Any) -> list[str]:
    seen = health.snapshot(version=3, waiting=12, batch_size=16) | figures
    return describe(seen, "http://here", NOON)


def test_lines_of_a_gateway_in_trouble() -> None:
    health = Health()
    health.outages.seen("teaching", OutageError("the teacher gets no answer"))
    health.judge.enter("failing", "the judge refuses (HTTP 401)")
    health.learner.enter("failed", "OSError: disk full")
    since = {"backend_since": NOON - 250, "judge_since": NOON - 3 * 3600 - 86_400}
    told = lines(health, **since, learner_since=NOON - 9, spent_usd=1.25, budget_usd=5.0)
    assert told[:7] == [
        "tinker-claw at http://here: degraded",
        "  backend: away since 11:55:50",
        "    the teacher gets no answer",
        "  learner: failed since 11:59:51",
        "    OSError: disk full",
        "  judge: failing since 2026-03-04 09:00:00",
        "    the judge refuses (HTTP 401)",
    ]
    assert told[8:] == ["$1.2500 spent of the budget of $5"]
    paused = {"judge": "paused", "learner": "paused", "learner_since": NOON - 60}
    told = lines(Health(), **paused, status="paused", spending_paused="$5 are spent.")
    assert told[1:3] == ["  spending: paused since 11:59:00", "    $5 are spent."]


@pytest.mark.parametrize(
    ("away", "learner", "judge", "waiting", "says"),
    [
        (None, "waiting", "ok", 5, "v3; 5 of 16 samples for the next step are queued."),
        (None, "finished", "ok", 5, "v3; learning has ended."),
        (None, "recovering", "ok", 1, "being loaded; 1 sample is queued, none is lost."),
        (None, "failed", "ok", 0, "learning has stopped until a restart; nothing is lost."),
        (None, "waiting", "failed", 0, "judging has started again; nothing is lost."),
        ("learning", "stalled", "ok", 12, "waits; 12 samples are queued, none is lost."),
        ("judging", "waiting", "stalled", 0, "as before; judging waits; nothing is lost."),
        ("serving", "waiting", "ok", 0, "in time gets an error; nothing is lost."),
    ],
)
def test_meaning(away: Any, learner: str, judge: str, waiting: int, says: str) -> None:
    health = Health()
    if away:
        health.outages.seen(away, OutageError("away"))
    health.learner_is(learner)
    health.judge.enter(judge)
    if learner == "failed":
        health.agreement.enter("alarm")
    assert health.snapshot(version=3, waiting=waiting, batch_size=16)["meaning"].endswith(says)


@pytest.mark.parametrize("part", ["judge", "learner", "upkeep"])
def test_a_part_that_failed_says_when_it_tries_again_if_it_does(part: str) -> None:
    health = Health()
    getattr(health, part).enter("failed", "KeyError: 3", next_try_s=4.2)
    told = lines(health, **{f"{part}_since": NOON - 60})
    assert told[0].endswith("degraded")
    assert told[1] == f"  {part}: failed since 11:59:00; next try in 4 s"
    assert "until a restart" not in told[3]
