"""`tinker-claw status` over a ledger: with a gateway, without one, as JSON and as a live view."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import gateway
from tests.support.ledger import new_turn
from tests.support.lives import ROOT
from tests.support.stories import SECRET, Told, every_state, run
from tinker_claw.cli import main
from tinker_claw.cli.status import board
from tinker_claw.ledger.decline import SIZE
from tinker_claw.ledger.figures import read_overview
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.spend import Bill
from tinker_claw.render.renderer import Renderer
from tinker_claw.turn_state import Reason
from tinker_claw.types import NextState, Usage, Vote
from tinker_claw.words import run_fields

KEYS = (
    "data_dir batch_size headlines run policy_version pinned held step samples_waiting "
    "sessions private_sessions episodes turns verdicts lessons feedback hints unheard "
    "samples steps gate "
    "not_trained lost_next_states unclear strangers usd judge_billed "
    "bills_without_price accepted"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("every") / "data"
    every_state(directory)
    return directory


def test_a_ledger_without_a_turn_has_a_short_board(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path)):
        overview = read_overview(tmp_path, 16)
    lines = dict(run_fields(overview))
    assert lines["outcomes"] == "trained: 0"
    assert "lessons" not in lines
    assert board(overview)[-1].startswith("outcomes"), "no table of no steps"


@pytest.mark.parametrize(
    ("rejections", "hints", "messages", "says"),
    [
        (3, 2, 100, "me: 3 rejections and 2 hints in the newest 100 judged messages"),
        (9, 0, 100, "me: 9 rejections and 0 hints in the newest 100 judged messages"),
        (4, 1, 100, None),
        (0, 0, 91, None),
        (0, 0, 90, None),
    ],
)
def test_a_judge_that_hears_nothing_is_told(
    tmp_path: Path, rejections: int, hints: int, messages: int, says: str | None
) -> None:
    with closing(Ledger(tmp_path)) as ledger:
        ledger.steps.add_first_version(state_ref="s", sampler_ref="a")

        def judged(value: Vote, *hints: str, role: Any = "user", user: str = "me") -> None:
            session = ledger.turns.session(user, "s")
            turn = ledger.turns.add(new_turn(ledger, session_id=session))
            ledger.turns.add_next_state(turn, NextState(role, "so it is"))
            ledger.judgements.add(turn, value=value, ballots=(), hints=hints, prompt="p")

        for _ in range(9):
            judged(-1, "an old hint")
        for n in range(messages):
            judged(-1 if n < rejections else 1, *["be brief"] * (n < hints))
            judged(-1, role="tool")
        for _ in range(99):
            judged(1, user="another")
    lines = dict(run_fields(read_overview(tmp_path, 16)))
    if says is None:
        assert "unheard" not in lines
    else:
        assert says in lines["unheard"]


def test_without_a_gateway_the_ledger_is_told_all_the_same(directory: Path) -> None:
    done = run("status", directory=directory)
    assert done.returncode == 2
    assert f"No gateway runs on {directory}." in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "First judged turns accepted: 100% (14% to 100%) of 2 by the base model; "
        "67% (15% to 98%) of 6 by"
    )
    for line in (
        f"run        combine · demo · local · {directory}",
        "policy     v1, 1 step from the base",
        "next step  [####....................] 3 of 16 samples",
        "turns      19 main, 1 side · 18 sessions",
        "lost       1 message could not be tied to a reply",
    ):
        assert any(shown.strip() == line.strip() for shown in lines), line
    assert "outcomes   trained: 2 · waits for the next message: 6 · " in done.stdout
    assert "\nverdicts   6 good, 1 neutral, 3 bad · 1 without a valid vote · 3 hints" in done.stdout
    (taken,) = [line for line in lines if line.split()[0:1] == ["1"] and "taken" in line]
    assert taken.split()[3:] == ["v1", "0.25", "-0.5", "1.5", "0", "0.125", "0.0312", "-"]
    (void,) = [line for line in lines if line.endswith("it makes no sense")]
    assert "void" in void
    assert SECRET not in done.stdout


def test_hold_is_told_until_a_rollback(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path)) as ledger:
        ledger.bind({"model": "demo", "method": "combine", "backend": "local"})
        version = ledger.steps.add_first_version(state_ref="s", sampler_ref="a")
        none: Any = {"ballots": (), "hints": ()}
        for number in range(2 * SIZE):
            turn = ledger.turns.add(new_turn(ledger, str(number)))
            ledger.turns.add_next_state(turn, NextState("user", "so it is"))
            ledger.judgements.add(turn, value=1 if number < SIZE else -1, **none)
        (told,) = [line for line in board(read_overview(tmp_path, 16)) if line.startswith("paused")]
        assert told.startswith("paused     learning is paused: 0% of the newest 32 first judged tu")
        ledger.steps.roll_back(version)
        assert read_overview(tmp_path, 16)["held"] is None


def test_pause_for_canaries_that_fell_is_told_until_the_version_is_accepted(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path)) as ledger:
        ledger.bind({"model": "demo", "method": "combine", "backend": "local"})
        version = ledger.steps.add_first_version(state_ref="s", sampler_ref="a")
        for whole in (0.02, 0.05, 0.2):
            gate = {"asked": 24, "whole": whole} | (
                {"fell": ["“2 + 2?” (0.9)"]} if whole == 0.2 else {}
            )
            version = ledger.steps.commit(
                ledger.steps.begin(version.id, []),
                version,
                state_ref="s",
                sampler_ref="a",
                metrics={"gate": gate},
            )
        told = " ".join(" ".join(board(read_overview(tmp_path, 16))).split())
        assert "0.20 nats less likely than with v0, above all to “2 + 2?” (0.9)." in told
        assert "`tinker-claw rollback v2` goes on from the last version" in told
        assert "`tinker-claw accept` keeps v3" in told
        assert ledger.reference.accept() == 3
        assert read_overview(tmp_path, 16)["held"] is None


def test_every_turn_is_trained_or_has_its_reason(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["status", "--json", "--data-dir", str(directory)]) == 2
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["status", "error", "ledger"]
    assert told["status"] == "unreachable"
    ledger = told["ledger"]
    assert ledger.keys() == set(KEYS.split())
    assert ledger["turns"] == {"main": 19, "side": 1}
    assert sum(ledger["not_trained"].values()) + ledger["samples"]["trained"] == 20
    assert ledger["not_trained"] == {
        "waits for the next message": 6,
        "waits for the judge": 3,
        "waits for a step": 3,
        Reason.TOO_OLD: 1,
        Reason.STEPS_FAILED: 1,
        Reason.SIDE: 1,
        Reason.HUNG_UP: 1,
        "neutral verdict, no hint": 1,
        "no valid vote, no hint": 1,
    }
    assert ledger["lost_next_states"] == 1
    shares = [(one["version"], one["good"], one["of"]) for one in ledger["accepted"]]
    assert shares == [(0, 2, 2), (1, 4, 6)]


async def test_with_a_gateway_both_are_told(
    directory: Path, tmp_path: Path, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with gateway(tmp_path, renderer):
        flags = ["status", "--data-dir", str(tmp_path)]
        assert await asyncio.to_thread(main.main, flags) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "First judged turns accepted: none yet"
        assert lines[1].endswith(": ok")
        assert any(line.startswith("next step  [....") for line in lines)
        assert await asyncio.to_thread(main.main, [*flags, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["status"], told["ledger"]["policy_version"]) == ("ok", 0)


def test_a_pin_is_told_and_versions_left_behind_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Told(tmp_path)
    base = story.version
    for number in range(40):
        story.judged(f"base {number}", 1)
    story.step(story.sampled("s", -1)[1])
    for number in range(40):
        story.judged(f"worse {number}", -1)
    flags = ["status", "--json", "--data-dir", str(tmp_path)]

    def accepted() -> Any:
        assert main.main(flags) == 2
        told = json.loads(capsys.readouterr().out)["ledger"]
        return told["pinned"], [(one["version"], one["share"]) for one in told["accepted"]]

    assert accepted() == (None, [(0, 40 / 41), (1, 0)])
    story.ledger.pin.to(0)
    assert accepted()[0] == 0
    assert main.main(["status", "--data-dir", str(tmp_path)]) == 2
    assert "policy     v1, 1 step from the base · v0 answers, which is pinned" in (
        capsys.readouterr().out
    )
    story.ledger.steps.roll_back(base)
    assert accepted() == (None, [(0, 40 / 41)])
    story.ledger.close()


def test_spend_is_told_where_something_was_billed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Told(tmp_path)
    story.ledger.spend.add(Bill("serve", Usage(prefill=1), 0.25))
    turn = story.judged("s", 1)
    judge = Usage(prefill=1000, cached=200, sampled=70)
    story.ledger.spend.add(Bill("judge", judge, 0.5), turn_id=turn)
    story.ledger.spend.add(Bill("judge", Usage(prefill=1), None))
    story.ledger.close()
    assert main.main(["status", "--data-dir", str(tmp_path)]) == 2
    told = capsys.readouterr().out
    assert "spent      $0.7500 · judge $0.5000, serve $0.2500 · 1 bills without a price" in told


def test_a_ledger_that_cannot_be_read_does_not_hide_the_gateway(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ledger.sqlite3").write_bytes(b"no database at all, but something else" * 100)
    assert main.main(["status", "--data-dir", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "No gateway runs on" in told
    assert "No figures of the ledger: " in told
    assert "cannot be read as a ledger" in told


@pytest.mark.parametrize(("size", "last"), [("120x80", b"under way"), ("80x24", b"outcomes")])
def test_live_view_is_drawn_and_ends_with_ctrl_c(directory: Path, size: str, last: bytes) -> None:
    columns, lines = size.split("x")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "run.py",
            "status",
            "--live",
            "--data-dir",
            str(directory),
        ],
        cwd=ROOT,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": columns, "LINES": lines},
    )
    os.close(theirs)
    seen = b""
    deadline = threading.Timer(120, process.kill)
    deadline.start()
    try:
        while last not in seen:
            seen += os.read(ours, 65536)  # an error ends the process, and this with an OSError
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # a terminal reads to the end, else the last picture may not fit
            while True:
                seen += os.read(ours, 65536)
        assert process.wait() == 0, seen.decode()
    finally:
        deadline.cancel()
        process.kill()
        process.wait()
        os.close(ours)
    text = seen.decode()
    assert "No gateway runs" in text
    assert text.index("First judged turns accepted") < text.index("No gateway runs")
    assert "next step  [####" in text
    assert SECRET not in text
