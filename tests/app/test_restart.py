"""Starts over refused versions, other runs, damage, or a wrong clock."""

from __future__ import annotations

import functools
import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.clients import talking
from tests.support.ledger import KEPT_STATES, check, one, read
from tests.support.lives import Fate, Life, life, refused, until

FLAGS = ("--batch-size", "2", "--lora-rank", "4", "--learning-rate", "1e-3")


def learned(data: Path, version: int, *flags: str, fate: Fate | None = None) -> Life:
    """A life that was killed as soon as it served this version, unless it had died before."""
    with life(data, *FLAGS, *flags, fate=fate) as running, talking(running.url) as who:
        assert running.serves()
        who.wanted.set()
        if fate and fate.dies_at:
            running.ends()
        else:
            until(lambda: running.health()["policy_version"] >= version)
            running.kill()
        who.over.set()
    return running


def digest_of(data: Path) -> dict[str, str]:
    """Digests of all files except SQLite's index of its log, which readers rebuild."""
    files = [path for path in data.rglob("*") if path.is_file()]
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if not path.name.endswith("-shm")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "passes", "batch"), [("published", 1, "queued"), ("state loaded", 0, "refused")]
)
def test_killed_while_a_version_is_refused_the_one_before_serves_and_learns_on(
    tmp_path: Path, point: str, passes: int, batch: str
) -> None:
    """A candidate is published and not admitted, and the state before it is loaded again."""
    data = tmp_path / "data"
    refuses = {"tinker_claw.learner.gate:CanaryLoss.is_too_large": functools.partial(bool, 1)}
    learned(data, 1, fate=Fate(point, passes=passes, constants=refuses))
    assert one(data, "SELECT COUNT(*) FROM versions") == 1
    taken = (
        "SELECT DISTINCT state FROM turns JOIN samples ON turn_id = turns.id "
        "JOIN step_samples ON sample_id = samples.id WHERE step_samples.step_id = 1"
    )
    assert [row[0] for row in read(data, taken)] == [batch]
    with life(data, *FLAGS) as again, talking(again.url) as who:
        assert again.serves()
        assert again.health()["policy_version"] == 0
        who.wanted.set()
        until(lambda: again.health()["policy_version"] >= 1)
        who.over.set()
        assert again.stop() == 0
    check(data, who.seen, batch_size=2)


@pytest.mark.slow
def test_directory_in_use_is_refused_and_the_lock_of_a_dead_process_is_not(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with life(data, *FLAGS) as first:
        assert first.serves()
        assert "is in use by another process" in refused(data, *FLAGS)
        with life(data, *FLAGS, port=int(first.url.rpartition(":")[2][:-3])) as same:
            assert same.ends() == 2
        assert "is in use by another process" in same.said()
        assert "cannot listen" not in same.said()
        assert first.health()["status"] == "ok"
        first.kill()
    with life(data, *FLAGS) as third:
        assert third.serves()


def test_run_that_never_began_binds_nobody(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with life(data, *FLAGS, fate=Fate("saving")) as first:
        assert first.ends() == -9
    with life(data, *FLAGS, "--method", "binary", "--lora-rank", "8") as other:
        assert other.serves()


def talked(running: Life) -> None:
    """Kill it after a few replies."""
    with talking(running.url) as who:
        who.wanted.set()
        until(lambda: len(who.seen) > 4)
        running.kill()
        who.over.set()


def settle(data: Path) -> None:
    """Move everything from SQLite's log into the file."""
    with closing(sqlite3.connect(data / "ledger.sqlite3")) as ledger:
        ledger.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def overwrite(file: Path, page: int) -> None:
    with file.open("r+b") as damaged:
        damaged.seek((page - 1) * 4096)
        damaged.write(b"\xff" * 64)


@pytest.mark.slow
def test_damaged_ledger_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    data = tmp_path / "data"
    file = data / "ledger.sqlite3"
    with life(data, *FLAGS) as running:
        assert running.serves()
        settle(data)
        talked(running)  # killed: the newest transactions are in SQLite's log
    # A page that none of them is about: nothing is billed here.
    overwrite(file, one(data, "SELECT rootpage FROM sqlite_master WHERE name = 'spend_by_turn'"))
    before = digest_of(data)
    assert before[f"{file}-wal"]
    said = refused(data, *FLAGS)
    assert f"{file} is damaged" in said
    assert "put a backup of that directory back" in said
    assert digest_of(data) == before

    settle(data)
    overwrite(file, 1)
    before = digest_of(data)
    said = refused(data, *FLAGS)
    assert f"{file} cannot be used as a ledger (file is not a database)" in said
    assert digest_of(data) == before


@pytest.mark.slow
def test_torn_end_of_the_write_ahead_log_costs_the_last_transaction_only(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with life(data, *FLAGS) as running:
        assert running.serves()
        talked(running)
    log = data / "ledger.sqlite3-wal"
    turns = one(data, "SELECT COUNT(*) FROM turns")
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 100)
    with life(data, *FLAGS) as running:
        assert running.serves()
        assert one(data, "SELECT COUNT(*) FROM turns") >= turns - 1
        check(data, [], batch_size=2)
        assert running.stop() == 0


@pytest.mark.slow
def test_clock_that_goes_back_confuses_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    learned(data, KEPT_STATES + 2, fate=Fate(clock_s=86_400))
    start = check(data, [], batch_size=2)
    for _ in range(2):  # dies with a new state on disk that is not committed
        learned(data, 0, fate=Fate("saved", passes=2))
    with life(data, *FLAGS) as running, talking(running.url) as who:
        assert running.serves(), "the newest committed state is still there"
        assert check(data, [], batch_size=2) >= start + 4
        who.wanted.set()
        before = running.health()["policy_version"]
        until(lambda: running.health()["policy_version"] > before)
        who.over.set()
        assert running.stop() == 0
    check(data, who.seen, batch_size=2)
    times = [row[0] for row in read(data, "SELECT created_at FROM turns ORDER BY id")]
    assert times != sorted(times), "the clock did go back"
