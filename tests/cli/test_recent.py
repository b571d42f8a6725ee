"""`tinker-claw log turns` over the last requests: each turn's end and its meaning."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.ledger import new_turn, sql
from tests.support.lives import ROOT
from tests.support.stories import run
from tinker_claw.errors import LedgerError
from tinker_claw.ledger.database import SCHEMA_VERSION, open_read_only
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.turn_view import Record
from tinker_claw.ledger.views import Filter, read_turns


def newest(path: Path, limit: int) -> list[Record]:
    with open_read_only(path) as rows, rows.moment():
        return read_turns(rows, Filter(), limit)


def test_reading_takes_no_lock_and_does_not_stop_the_writer(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from tests.support.ledger import *\n"
        "ledger = Ledger(pathlib.Path(sys.argv[1]))\n"
        "ledger.versions.add_first(state_ref='s', sampler_ref='p')\n"
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
                assert seen[-1]["id"] >= max(written, last), "what is committed is seen at once"
                last = seen[-1]["id"]
        finally:
            writer.kill()  # not closed: what it wrote last lies in the journal beside the file
        rest = [int(line) for line in writer.stdout.read().split("\n")[:-1]]
    after = newest(tmp_path / "ledger.sqlite3", 1)
    assert after[0]["id"] >= max(rest, default=last)
    Ledger(tmp_path).close()  # the directory is free, the journal is whole
    assert newest(tmp_path / "ledger.sqlite3", 1) == after


def test_a_ledger_that_cannot_be_read_is_named(ledger: Ledger, tmp_path: Path) -> None:
    with closing(sqlite3.connect(ledger.path)) as raw:
        raw.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    (tmp_path / "text").write_text("no database at all" * 100)
    sqlite3.connect(tmp_path / "empty").close()
    for path, why in (
        (ledger.path, "was written by another release"),
        (tmp_path / "text", "cannot be read as a ledger"),
        (tmp_path / "empty", "is no ledger"),
        (tmp_path / "nothing", "does not exist"),
    ):
        with pytest.raises(LedgerError, match=why):
            newest(path, 1)
    assert not (tmp_path / "nothing").exists()


def test_table_of_several_days_and_of_names_that_steer_terminals(ledger: Ledger) -> None:
    first = ledger.turns.add(new_turn(ledger, "\x1b[2Jagent:main:\u202eabcdefghijkl"))
    ledger.turns.add(new_turn(ledger, session_id=ledger.turns.session("ben", "s")))
    with sql(ledger).transaction() as tx:
        tx.execute("UPDATE turns SET created_at = created_at - 172800 WHERE id = ?", (first,))
    lines = run("log", "turns", directory=ledger.path.parent).stdout.splitlines()
    assert any(" ben " in line for line in lines)
    assert len(lines[1].split()[1]) == len("2026-11-19"), "the day of a turn not of today"
    assert all(line.isprintable() for line in lines)
