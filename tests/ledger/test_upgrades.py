"""A ledger of an older release becomes one of this release whole or not at all; one of a newer
release is left alone.

No release has changed the schema yet, so that later ones are made up here: their SQL is what
`UPGRADES` will hold.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.ledger.test_ledger import new_turn, queue
from tests.processes import ROOT
from tinker_claw.errors import LedgerError
from tinker_claw.ledger import database
from tinker_claw.ledger.database import COPY, FILE, reading
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.prune import from_turn, trim

SECOND = """
ALTER TABLE turns ADD COLUMN mood TEXT;
CREATE TABLE moods (turn_id INTEGER PRIMARY KEY REFERENCES turns (id), mood TEXT NOT NULL) STRICT;
INSERT INTO moods SELECT id, 'as ' || request_text FROM turns;
UPDATE turns SET mood = (SELECT mood FROM moods WHERE turn_id = id) -- and no semicolon"""
THIRD = """
CREATE TABLE new_steps AS SELECT * FROM steps;
DROP TABLE steps; -- rows of other tables name its own
ALTER TABLE new_steps RENAME TO steps;
CREATE UNIQUE INDEX steps_id ON steps (id);
"""
LATER = (SECOND, THIRD)


def become(monkeypatch: pytest.MonkeyPatch, *upgrades: str) -> None:
    """Make the program a release that has these migrations from here on."""
    monkeypatch.setattr(database, "UPGRADES", upgrades)
    monkeypatch.setattr(database, "SCHEMA_VERSION", 1 + len(upgrades))


def old(directory: Path, turns: int = 40) -> list[tuple[Any, ...]]:
    """Make a ledger of the first release, with some of it in its log; return its turns."""
    ledger = Ledger(directory)
    ledger.steps.add_first_version(state_ref="s0", sampler_ref="p0")
    ledger.steps.begin(0, queue(ledger, turns - 1))
    with closing(sqlite3.connect(ledger.path)) as late:  # whose closing is not the last
        late.execute("SELECT * FROM meta")
        ledger.turns.add(new_turn(ledger, "last"))
        ledger.close()
        kept = {name: (directory / name).read_bytes() for name in (FILE, f"{FILE}-wal")}
    for name, data in kept.items():
        (directory / name).write_bytes(data)
    assert kept[f"{FILE}-wal"]
    return turns_of(directory / FILE)


def turns_of(file: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(file)) as ledger:
        return ledger.execute("SELECT id, request_text, tokens FROM turns").fetchall()


def version_of(file: Path) -> int:
    with closing(sqlite3.connect(file)) as ledger:
        assert ledger.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return ledger.execute("PRAGMA user_version").fetchone()[0]


def whole(directory: Path, turns: list[tuple[Any, ...]]) -> bool:
    """Whether the ledger is all new; otherwise it is all old."""
    with closing(sqlite3.connect(directory / FILE)) as ledger:
        tables = {name for (name,) in ledger.execute("SELECT name FROM sqlite_master")}
        columns = {row[1] for row in ledger.execute("PRAGMA table_info(turns)")}
        marks = {"moods" in tables, "mood" in columns, "steps_id" in tables}
        if marks == {True}:
            told = ledger.execute("SELECT count(*) FROM turns JOIN moods USING (mood)").fetchone()
            assert told == (len(turns) * len(turns),), "each turn asks the same"
    assert len(marks) == 1
    assert turns_of(directory / FILE) == turns
    assert version_of(directory / FILE) == (1 + len(LATER) if marks == {True} else 1)
    return marks == {True}


def test_older_ledger_is_copied_and_brought_up_to_date_by_what_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = old(tmp_path)
    become(monkeypatch, *LATER)
    mask = os.umask(0)
    ledger = Ledger(tmp_path)
    os.umask(mask)
    assert ledger.turns.get(turns[-1][0]).request_text == "do it"
    ledger.turns.add(new_turn(ledger, "new"))
    ledger.close()
    assert version_of(tmp_path / FILE) == 3
    copy = tmp_path / COPY
    assert (version_of(copy), turns_of(copy)) == (1, turns)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    Ledger(tmp_path).close()
    assert (version_of(copy), turns_of(copy)) == (1, turns), "it is no copy of what is new"
    with reading(tmp_path / FILE) as there:
        assert there.one("SELECT count(*) FROM moods") == len(turns)
    become(monkeypatch)
    os.replace(copy, tmp_path / FILE)  # as docs/ledger.md says
    ledger = Ledger(tmp_path)
    assert ledger.turns.get(turns[-1][0]).request_text == "do it"
    ledger.close()


def test_upgrades_that_were_made_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = old(tmp_path)
    become(monkeypatch, SECOND)
    Ledger(tmp_path).close()
    become(monkeypatch, *LATER)
    Ledger(tmp_path).close()
    assert whole(tmp_path, turns)
    assert version_of(tmp_path / COPY) == 2


async def test_retention_that_is_stopped_half_way_leaves_no_copy_of_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old(tmp_path)
    become(monkeypatch, *LATER)
    ledger = Ledger(tmp_path)
    assert await ledger.trim(0.0, None) == 0
    assert (tmp_path / COPY).exists(), "nothing was old enough"

    ledger.turns.add(new_turn(ledger, "side", untrained_because="side"))
    dropping = trim(ledger._db, before=time.time() + 1)
    assert next(dropping) == 1
    assert not (tmp_path / COPY).exists()
    ledger.close()


DYING = """
import os, signal, sqlite3, sys
from pathlib import Path
from tests.ledger.test_upgrades import LATER
from tinker_claw.ledger import database
from tinker_claw.ledger.database import Database

moment, passes = sys.argv[2], int(sys.argv[3])
database.UPGRADES, database.SCHEMA_VERSION = LATER, 1 + len(LATER)

def count(*_):
    global passes
    passes -= 1
    if passes < 0:
        os.kill(os.getpid(), signal.SIGKILL)

class Dying(sqlite3.Connection):
    def backup(self, target, **_):
        if moment == "copying":
            super().backup(target, pages=1, progress=count)
        else:
            super().backup(target)
    def executescript(self, script):
        if moment == "changing":
            self.set_progress_handler(count, 10)
        super().executescript(script)
        self.set_progress_handler(None, 0)
    def execute(self, query, *values):
        if moment == "before " + query:
            count()
        done = super().execute(query, *values)
        if moment == "after " + query:
            count()
        return done

really = sqlite3.connect
def connect(*arguments, **options):
    return really(*arguments, factory=Dying, **options)
sqlite3.connect = connect
Database(Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("moment", "passes", "new"),
    [
        ("copying", 0, False),
        ("copying", 12, False),
        ("changing", 0, False),
        ("changing", 240, False),
        ("changing", 160, False),
        ("before COMMIT", 0, False),
        ("after COMMIT", 0, True),
    ],
)
def test_killed_at_any_moment_it_is_the_old_one_whole_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, passes: int, new: bool
) -> None:
    turns = old(tmp_path)
    command = [sys.executable, "-c", DYING, str(tmp_path), moment, str(passes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert whole(tmp_path, turns) is new
    become(monkeypatch, *LATER)
    Ledger(tmp_path).close()
    assert whole(tmp_path, turns)
    assert turns_of(tmp_path / COPY) == turns


@pytest.mark.parametrize(
    ("upgrade", "why"),
    [
        ("CREATE TABLE x (a INTEGER) STRICT; INSERT INTO x VALUES ('no number')", "x.a"),
        ("CREATE TABLE x (a INTEGER) STRICT; DELETE FROM turns WHERE id = 1", "1 rows would name"),
        ("CREATE TABLE x (a INTEGER) STRICT; this is no SQL", "syntax error"),
    ],
)
def test_what_does_not_work_is_taken_back_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upgrade: str, why: str
) -> None:
    turns = old(tmp_path)
    become(monkeypatch, upgrade)
    said = rf"from schema version 1 to 2 \(.*{why}.*\); it is as it was\. Go on with the release"
    for _ in range(2):
        with pytest.raises(LedgerError, match=said):
            Ledger(tmp_path)
    assert not whole(tmp_path, turns)
    become(monkeypatch)
    Ledger(tmp_path).close()


def test_a_disk_without_room_for_the_copy_is_told_and_nothing_is_changed(tmp_path: Path) -> None:
    turns = old(tmp_path)
    short = (
        "import resource, sys\nfrom pathlib import Path\n"
        "from tests.ledger.test_upgrades import LATER\n"
        "from tinker_claw.errors import LedgerError\nfrom tinker_claw.ledger import database\n"
        "database.UPGRADES, database.SCHEMA_VERSION = LATER, 1 + len(LATER)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "try:\n    database.Database(Path(sys.argv[1]))\n"
        "except LedgerError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", short, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "disk" in done.stdout
    assert not whole(tmp_path, turns)


def open_it(file: Path) -> None:
    Ledger(file.parent).close()


def read_it(file: Path) -> None:
    with reading(file):
        pass


def test_who_only_reads_an_older_ledger_leaves_it_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ledger(tmp_path).close()
    before = (tmp_path / FILE).read_bytes()
    become(monkeypatch, *LATER)
    with pytest.raises(LedgerError, match=r"by an older release .* start it with the flags"):
        read_it(tmp_path / FILE)
    assert (tmp_path / FILE).read_bytes() == before
    assert not (tmp_path / COPY).exists()


@pytest.mark.parametrize("use", [open_it, read_it])
@pytest.mark.parametrize("copied", [True, False])
def test_newer_ledger_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], None], copied: bool
) -> None:
    old(tmp_path)
    with monkeypatch.context() as later:
        become(later, *LATER)
        Ledger(tmp_path).close()
    if not copied:
        (tmp_path / COPY).unlink()
    before = (tmp_path / FILE).read_bytes()
    said = (
        r"by a newer release \(its schema is version 3, this program knows 1\), and was left as it "
        r"is; get that release, or use another --data-dir"
    )
    with pytest.raises(LedgerError, match=said) as told:
        use(tmp_path / FILE)
    assert (str(tmp_path / COPY) in str(told.value)) is copied
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize("use", [open_it, read_it])
def test_version_that_no_release_has_is_that_of_no_ledger(
    tmp_path: Path, use: Callable[[Path], None]
) -> None:
    Ledger(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE)) as ledger:
        ledger.execute("PRAGMA user_version = -1")
    with pytest.raises(LedgerError, match="is no ledger"):
        use(tmp_path / FILE)


def test_the_copy_goes_with_the_first_words_that_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old(tmp_path)
    become(monkeypatch, *LATER)
    ledger = Ledger(tmp_path)
    assert (tmp_path / COPY).exists()
    with ledger._db.transaction() as tx:
        tx.execute("DELETE FROM moods")
    ledger.forget(from_turn(40))
    ledger.close()
    assert not (tmp_path / COPY).exists()
    assert version_of(tmp_path / FILE) == 3
