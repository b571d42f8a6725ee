"""The data folder, or the ledger in it, is deleted, emptied or replaced under a running gateway."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.support.lives import Life, life
from tinker_claw.cli import main
from tinker_claw.errors import LedgerError
from tinker_claw.ledger.database import FILE, beside
from tinker_claw.ledger.ledger import Ledger


def deleted(data: Path) -> None:
    shutil.rmtree(data)


def emptied(data: Path) -> None:
    with closing(sqlite3.connect(data / FILE)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (data / FILE).write_bytes(b"")


def replaced(data: Path) -> None:
    shutil.copy(data / FILE, data / "copy")
    (data / "copy").rename(data / FILE)


def ask(running: Life) -> httpx.Response:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    return httpx.post(f"{running.url}/chat/completions", json=body, timeout=240)


BEFALLS = {
    deleted: "is not there any more (No such file or directory)",
    emptied: "was emptied",
    replaced: "is another file than the one that was opened",
}


@pytest.mark.parametrize("befalls", BEFALLS)
def test_write_says_what_befell_the_ledger(tmp_path: Path, befalls: Callable[[Path], None]) -> None:
    with closing(Ledger(tmp_path / "data")) as ledger:
        befalls(tmp_path / "data")
        with pytest.raises(LedgerError, match=re.escape(BEFALLS[befalls])):
            ledger.turns.session("me", "a")


@pytest.mark.slow
@pytest.mark.parametrize("befalls", [deleted, replaced])
def test_turn_is_refused_and_health_and_terminal_say_what_befell_the_ledger(
    tmp_path: Path, befalls: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    data, why = tmp_path / "data", BEFALLS[befalls]
    with life(data, "--batch-size", "64") as running:
        assert running.serves()
        assert ask(running).status_code == 200
        befalls(data)
        answer = ask(running)
        assert answer.status_code == 503
        assert "cannot write its records" in answer.text
        told = running.health()
        assert (told["status"], told["records"]) == ("degraded", "failing")
        assert f"{data / FILE} {why}: stop the gateway" in told["records_error"]
        assert told["meaning"].startswith("Requests are refused")
        assert len(running.events("ledger.failing")) == 1
        code = main.main(["status", "--data-dir", str(data)])
        shown = "".join(capsys.readouterr())
        if befalls is deleted:  # nothing there leads to the gateway any more
            assert code == 2
            assert f"{data / FILE} does not exist" in shown
            assert "put the folder back from a backup" in shown
        else:
            assert code == 1
            assert f"{FILE} {why}" in shown
        assert running.stop() == 0
    assert "Traceback" not in running.said()


def test_writes_end_once_the_lock_is_gone_and_a_second_gateway_may_write(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path)) as first:
        first.turns.session("me", "a")
        (tmp_path / "lock").unlink()
        with closing(Ledger(tmp_path)) as second:
            with pytest.raises(LedgerError, match="lock was deleted, so another gateway may write"):
                first.turns.session("me", "b")
            assert second.turns.session("me", "b") == 2


def test_folder_that_comes_back_as_it_was_is_written_again(tmp_path: Path) -> None:
    data, away = tmp_path / "data", tmp_path / "away"
    with closing(Ledger(data)) as ledger:
        data.rename(away)
        with pytest.raises(LedgerError, match="is not there any more"):
            ledger.turns.session("me", "a")
        away.rename(data)
        assert ledger.turns.session("me", "a") == 1


async def test_long_work_makes_no_ledger_where_one_was_deleted(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path)) as ledger:
        ledger.path.unlink()
        with pytest.raises(LedgerError, match="cannot be written"):
            await beside(ledger.path, lambda writer: writer.write("DELETE FROM meta"))
        assert not ledger.path.exists()
