"""A program that reads the ledger without a pause: writing goes on, and the log shrinks again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.ledger import new_turn, sql
from tinker_claw.ledger import database
from tinker_claw.ledger.database import FILE
from tinker_claw.ledger.ledger import Ledger

READER = """
import sqlite3, sys
reader = sqlite3.connect(sys.argv[1], isolation_level=None)
reader.execute("BEGIN")
reader.execute("SELECT COUNT(*) FROM turns").fetchone()
print("reads", flush=True)
sys.stdin.readline()
"""


@contextmanager
def reader(ledger: Ledger) -> Iterator[None]:
    """Another process that holds a read transaction while the context lasts."""
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(ledger.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "reads\n"
        try:
            yield
        finally:
            process.stdin.write("\n")
            process.stdin.close()
            process.wait(60)


def write(ledger: Ledger, turns: int) -> None:
    for number in range(turns):
        ledger.turns.add(new_turn(ledger, f"s{number}", request_text="x" * 20_000))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """A small size of the log, for every connection that is opened from now on."""
    size = 100_000
    monkeypatch.setattr(database, "LOG_BYTES", size)
    monkeypatch.setattr("tinker_claw.ledger.ledger.LOG_BYTES", size)
    return size


async def test_the_log_is_emptied_when_its_reader_lets_go(small: int, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.versions.add_first(state_ref="s0", sampler_ref="p0")
    log = tmp_path / f"{FILE}-wal"
    with reader(ledger):
        write(ledger, 400)
        assert log.stat().st_size > 50 * small
        assert not await ledger.empty_log(), "it is tried, and nothing waits for the reader"
        write(ledger, 20)
        assert len(sql(ledger).rows("SELECT id FROM turns")) == 420
    assert await ledger.empty_log()
    assert log.stat().st_size == 0
    ledger.close()


def test_writing_alone_cuts_the_log_when_its_reader_has_let_go(small: int, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.versions.add_first(state_ref="s0", sampler_ref="p0")
    with reader(ledger):
        write(ledger, 400)
    write(ledger, 400)
    assert (tmp_path / f"{FILE}-wal").stat().st_size < 5_000_000
    ledger.close()
