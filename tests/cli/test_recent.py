"""`tinker-claw log turns` over the last requests: each turn's end and its meaning."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ledger import new_turn, sql
from tests.support.lives import ROOT
from tinker_claw.cli import main
from tinker_claw.cli.log import COLUMNS
from tinker_claw.errors import LedgerError
from tinker_claw.ledger.database import SCHEMA_VERSION, reading
from tinker_claw.ledger.judgements import Ballot
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.turn_view import TurnView
from tinker_claw.ledger.views import Filter, read, read_turns
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import Kind, NextState

SECRET = "my landlady's cat"


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "data")
    ledger.bind({"model": "demo", "method": "combine", "backend": "local"})
    ledger.steps.add_first_version(state_ref="s0", sampler_ref="p0")
    yield ledger
    ledger.close()


def recent(ledger: Ledger, limit: int = 10) -> list[TurnView]:
    """Read recent turns from outside, while the ledger is open."""
    return newest(ledger.path, limit)


def newest(path: Path, limit: int) -> list[TurnView]:
    with reading(path) as rows, rows.moment():
        return read_turns(rows, Filter(), limit)


def shown(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main.main(["log", "turns", "--data-dir", str(ledger.path.parent)]) == 0
    told = capsys.readouterr()
    return [*told.out.splitlines(), "", *told.err.splitlines()]


def add_every_kind_of_turn(ledger: Ledger) -> dict[str, int]:
    """Add one turn for every end that a turn can have, in the order of the table."""
    made: dict[str, int] = {}

    def turn(name: str, key: str | None = None, **changes: Any) -> int:
        made[name] = ledger.turns.add(new_turn(ledger, key or name, **changes))
        return made[name]

    def judged(name: str, value: Any, hints: tuple[str, ...] = (), **changes: Any) -> int:
        turn(name, **changes)
        ledger.turns.add_next_state(made[name], NextState("user", SECRET))
        ballots = [Ballot("I say so", value)]
        ledger.judgements.add(
            made[name],
            value=value,
            ballots=ballots,
            hints=hints,
        )
        return made[name]

    side = "an OpenClaw call without tools"
    reason = {
        "kind": Kind.SIDE,
        "kind_reason": side,
        "untrained_because": TurnRefusal(Reason.SIDE, side),
    }
    turn("side", **reason, call="recap")
    turn("passed over", key="one")
    turn("waits", key="one")
    turn("hot", untrained_because=TurnRefusal(Reason.SAMPLING, "temperature 0.6"))
    turn("closed")
    with sql(ledger).transaction() as tx:
        tx.execute("UPDATE sessions SET closed_at = 1 WHERE key = 'closed'")
    turn("tool")
    ledger.turns.add_next_state(made["tool"], NextState("tool", SECRET))
    judged("hinted", -1, ("be brief",))
    judged("unclear", None)
    ledger.turns.refuse(made["unclear"], TurnRefusal("no verdict, no hint"))
    judged("neutral", 0)
    ledger.turns.refuse(made["neutral"], TurnRefusal("neutral, no hint"))
    samples = {
        name: ledger.samples.add(judged(name, 1), 1, None)
        for name in ("trained", "expired", "bad", "queued")
    }
    step = ledger.steps.begin(0, [samples["trained"]])
    version = ledger.steps.version(0)
    assert version is not None
    ledger.steps.commit(step, version, state_ref="s1", sampler_ref="p1", metrics={})
    ledger.samples.expire_these([samples["expired"]], TurnRefusal(Reason.TOO_OLD))
    ledger.samples.quarantine(samples["bad"])
    turn("stood in", fallback="v1 failed three times", call="user turn")
    return made


def test_why_each_turn_was_trained_or_not(ledger: Ledger) -> None:
    made = add_every_kind_of_turn(ledger)
    turns = {turn.id: turn for turn in recent(ledger, 50)}
    assert {name: turns[number].outcome for name, number in made.items()} == {
        "side": "not trained: side turn: an OpenClaw call without tools",
        "passed over": "waits for the next message",
        "waits": "waits for the next message",
        "hot": "not trained: sampling parameters: temperature 0.6",
        "closed": "waits for the next message",
        "tool": "waits for the judge",
        "hinted": "waits for the judge",
        "unclear": "not trained: no verdict, no hint",
        "neutral": "not trained: neutral, no hint",
        "trained": "trained in step 1",
        "expired": "not trained: too old",
        "bad": "not trained: steps with it failed",
        "queued": "waits for a step",
        "stood in": "waits for the next message",
    }
    records = {record["id"]: record for record in read(sql(ledger), "turns", Filter(), 50)}
    columns = {column.name: column for column in COLUMNS["turns"]}
    seen = {
        name: (columns["next"].value(records[n]), columns["verdict"].value(records[n]))
        for name, n in made.items()
    }
    assert seen["waits"] == (None, None)
    assert seen["tool"] == ("tool", None)
    assert seen["hinted"] == ("user", "-1 hint")
    assert seen["unclear"] == ("user", "none")
    assert seen["neutral"] == ("user", "0")
    assert seen["queued"] == ("user", "+1")


def test_table_is_aligned_and_says_nothing_that_was_said(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    made = add_every_kind_of_turn(ledger)
    turns = recent(ledger, 50)
    lines = shown(ledger, capsys)
    for said in (SECRET, "be brief", "I say so", "do it"):
        assert not any(said in line for line in lines)
    lines = lines[: lines.index("")]
    assert lines[0].split()[:3] == ["id", "when", "user"]
    begin = lines[0].index("outcome")
    assert all(line[begin - 1] == " " and line[begin] != " " for line in lines)
    rows = [line for line in lines[1:] if line[:begin].strip()]
    assert [line.split()[0] for line in rows] == [str(n) for n in sorted(made.values())]
    for line, turn in zip(rows, turns, strict=True):
        assert line[begin:].startswith(turn.outcome[:20])


def test_table_of_several_days_and_of_names_that_steer_terminals(
    ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ledger.turns.add(new_turn(ledger, "\x1b[2Jagent:main:\u202eabcdefghijkl"))
    other = new_turn(ledger, session_id=ledger.turns.session("ben", "s"))
    ledger.turns.add(other)
    with sql(ledger).transaction() as tx:
        tx.execute("UPDATE turns SET created_at = created_at - 172800 WHERE id = ?", (first,))
    lines = shown(ledger, capsys)
    assert any(" ben " in line for line in lines)
    assert len(lines[1].split()[1]) == len("2026-11-19"), "the day of a turn not of today"
    assert all(line.isprintable() for line in lines)


def test_newest_requests_are_those_that_are_read(ledger: Ledger) -> None:
    ids = [ledger.turns.add(new_turn(ledger)) for _ in range(5)]
    assert [turn.id for turn in recent(ledger, 2)] == ids[-2:]
    assert recent(ledger, 0) == []


def test_reading_takes_no_lock_and_does_not_stop_the_writer(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from tests.support.ledger import *\n"
        "ledger = Ledger(pathlib.Path(sys.argv[1]))\n"
        "ledger.steps.add_first_version(state_ref='s', sampler_ref='p')\n"
        "while True: print(ledger.turns.add(new_turn(ledger)), flush=True)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        try:
            last = 0
            for _ in range(30):
                written = int(writer.stdout.readline())
                seen = newest(tmp_path / "ledger.sqlite3", 3)
                assert seen[-1].id >= max(written, last), "what is committed is seen at once"
                last = seen[-1].id
        finally:
            writer.kill()  # not closed: what it wrote last lies in the journal beside the file
        rest = [int(line) for line in writer.stdout.read().split("\n")[:-1]]
    after = newest(tmp_path / "ledger.sqlite3", 1)
    assert after[0].id >= max(rest, default=last)
    Ledger(tmp_path).close()  # the directory is free, the journal is whole
    assert newest(tmp_path / "ledger.sqlite3", 1) == after


def test_a_ledger_that_cannot_be_read_is_named(ledger: Ledger, tmp_path: Path) -> None:
    with sqlite3.connect(ledger.path) as raw:
        raw.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(LedgerError, match="was written by another release"):
        recent(ledger)
    with sqlite3.connect(ledger.path) as raw:
        raw.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    (tmp_path / "text").write_text("no database at all" * 100)
    with pytest.raises(LedgerError, match="cannot be read as a ledger"):
        newest(tmp_path / "text", 1)
    sqlite3.connect(tmp_path / "empty").close()
    with pytest.raises(LedgerError, match="is no ledger"):
        newest(tmp_path / "empty", 1)
    with pytest.raises(LedgerError, match="does not exist"):
        newest(tmp_path / "nothing", 1)
    assert not (tmp_path / "nothing").exists()
