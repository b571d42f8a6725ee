"""`carry`: what a ledger of commit 793ab30f has learned, in a new directory."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import ask
from tests.support.ledger import read
from tests.support.lives import product
from tests.support.stories import run
from tinker_claw.gateway.lessons import LessonChooser
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.reference import read_fallen
from tinker_claw.ledger.turns import hidden, read_private
from tinker_claw.privacy.marker import Privacy

LEDGER = "ledger.sqlite3"
DUMP = Path(__file__).parents[1] / "data/ledger_793ab30f.sql"
"""A demo of two sessions and one step; a lesson by the judge, one by the user, one dropped."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The old run's directory, with a file in each folder of weights, and a key."""
    directory = tmp_path / "old"
    directory.mkdir()
    change(directory, DUMP.read_text())
    for state, sampler in text_rows(directory, "SELECT state_ref, sampler_ref FROM versions"):
        for folder in directory / "states" / state, directory / "adapters" / sampler:
            folder.mkdir(parents=True)
            (folder / "weights").write_text(folder.name)
    (directory / "api-key").write_text("key-of-before-the-carry")
    return directory


def change(directory: Path, script: str) -> None:
    with closing(sqlite3.connect(directory / LEDGER)) as ledger:
        ledger.executescript(script)


def text_rows(directory: Path, query: str) -> list[tuple[str, ...]]:
    return [tuple(map(str, row)) for row in read(directory, query)]


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in ("ledger.sqlite3-shm", "ledger.sqlite3-wal")
    }


def test_carry_takes_versions_steps_lessons_and_key(old: Path, tmp_path: Path) -> None:
    change(old, "INSERT INTO channels VALUES ('default', 'telegram', x'01', 0, 0)")
    before, new = files(old), tmp_path / "new"
    done = run("carry", str(old), str(new))
    assert done.returncode == 0, done.stderr
    assert "v1 (1 step)" in done.stdout
    assert "2 lessons" in done.stdout
    assert "[gateway.chats]" in done.stdout, "the first sender of a channel is no owner any more"
    assert files(old) == before
    for table in ("versions", "steps", "meta"):
        assert read(new, f"SELECT * FROM {table}") == read(old, f"SELECT * FROM {table}")
    lessons = read(new, "SELECT id, text, state, turn_id FROM lessons")
    assert lessons[0][0::2] == (1, "candidate"), "the judge's: its user has not kept it"
    assert lessons[1:] == [(2, "use metric units", "told", None)]
    weights = {name: content for name, content in before.items() if "weights" in name}
    carried = files(new)
    assert carried.pop("api-key") == b"key-of-before-the-carry"
    assert {name: carried[name] for name in weights} == weights
    assert read(new, "SELECT COUNT(*) FROM turns") == [(0,)]
    assert not [path for path in (new, *new.rglob("*")) if path.stat().st_mode & 0o077]


def test_carry_leaves_versions_that_a_rollback_left_behind(old: Path, tmp_path: Path) -> None:
    same = "SELECT 2, 0, 0, state_ref, sampler_ref, 0 FROM versions WHERE id = 0"
    change(old, f"INSERT INTO versions {same}; INSERT INTO meta VALUES ('accepted', '1')")
    empty, link = tmp_path / "empty", tmp_path / "link"
    empty.mkdir()
    link.symlink_to(empty)
    assert run("carry", str(old), str(link)).returncode == 0
    assert read(empty, "SELECT id, parent FROM versions") == [(0, None), (2, 0)]
    assert read(empty, "SELECT * FROM steps") == []
    with closing(Ledger(empty)) as new:
        assert new.reference.version == new.versions.get(0), "v1 was accepted, and is left behind"


def test_carry_keeps_a_lesson_that_its_user_kept_and_leaves_what_was_set_aside(
    old: Path, tmp_path: Path
) -> None:
    change(old, "UPDATE lessons SET state = 'vain', kept = (id = 2)")
    assert run("carry", str(old), str(tmp_path / "new")).returncode == 0
    assert read(tmp_path / "new", "SELECT id, state FROM lessons") == [(2, "told")]
    change(old, "UPDATE lessons SET state = 'aside', kept = 1")
    assert run("carry", str(old), str(tmp_path / "other")).returncode == 0
    assert read(tmp_path / "other", "SELECT * FROM lessons") == []


def test_carry_takes_what_was_billed_so_that_a_budget_counts_on(old: Path, tmp_path: Path) -> None:
    change(
        old,
        "INSERT INTO spend (created_at, purpose, turn_id, step_id, prefill, cached, sampled, "
        "trained, usd) VALUES (5, 'judge', 1, NULL, 7, 0, 3, 0, .25), (6, 'train', NULL, 1, 0, 0, "
        "0, 9, .5)",
    )
    assert run("carry", str(old), str(tmp_path / "new")).returncode == 0
    bills = "SELECT created_at, purpose, step_id, prefill, cached, sampled, trained, usd FROM spend"
    assert read(tmp_path / "new", bills) == read(old, bills)
    with closing(Ledger(tmp_path / "new")) as ledger:
        assert ledger.spend.total().usd == 0.75
        # Whose samples are not here, so that no price of one follows.
        assert ledger.spend.of_newest_steps(8)[0] == 0
    assert "$0.75" in run("status", directory=tmp_path / "new").stdout


def test_carry_keeps_the_version_that_its_owner_accepted(old: Path, tmp_path: Path) -> None:
    gate = '{"gate": {"fell": ["chess"], "whole": 1.0}}'
    change(old, f"UPDATE steps SET metrics = '{gate}' WHERE version = 1")
    assert run("carry", str(old), str(tmp_path / "paused")).returncode == 0
    change(old, "INSERT INTO meta VALUES ('accepted', '1')")
    assert run("carry", str(old), str(tmp_path / "new")).returncode == 0
    with closing(Ledger(tmp_path / "paused")) as paused, closing(Ledger(tmp_path / "new")) as new:
        assert "chess" in (read_fallen(paused.rows) or "")
        assert read_fallen(new.rows) is None
        assert new.reference.version == new.versions.get(1)


def test_new_lesson_has_no_number_of_one_that_the_carried_version_has_practised(
    old: Path, tmp_path: Path
) -> None:
    change(old, "UPDATE lessons SET state = 'dropped'; UPDATE steps SET lesson = 1")
    assert run("carry", str(old), str(tmp_path / "new")).returncode == 0
    with closing(Ledger(tmp_path / "new")) as new:
        number = new.lessons.rule("add", "default", None, "be brief")
        assert number not in new.lessons.practised(1)
        assert LessonChooser(new.lessons, lambda text: ()).for_session(
            new.turns.session("default", "s"), "default", 1
        )


def test_private_sessions_stay_private(old: Path, tmp_path: Path) -> None:
    change(old, "UPDATE sessions SET private = id, key = 'of-' || id")
    earlier = f"SELECT 'default', '{hidden('default', 'of-3')}', 0, 1"
    again = "SELECT 'default', 'of-3', 0, 2"  # the name was forgotten, and used again
    change(old, f"INSERT INTO sessions (user, key, created_at, private) {earlier}")
    change(old, f"INSERT INTO sessions (user, key, created_at, private) {again}")
    assert run("carry", str(old), str(tmp_path / "new")).returncode == 0
    with closing(Ledger(tmp_path / "new")) as new:
        assert read_private(new.rows) == {
            ("default", hidden("default", f"of-{number}")): Privacy(privacy)
            for number, privacy in ((1, 1), (2, 2), (3, 2))
        }
    assert "of-" not in str(read(tmp_path / "new", "SELECT key FROM sessions"))


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("DELETE FROM steps; DELETE FROM versions", "no version"),
        ("PRAGMA user_version = 10", "another release"),
        ("PRAGMA user_version = 0", "no ledger"),
        ("UPDATE versions SET state_ref = 'elsewhere' WHERE id = 1", "missing"),
    ],
)
def test_carry_refuses_and_leaves_nothing(
    script: str, word: str, old: Path, tmp_path: Path
) -> None:
    change(old, script)
    done = run("carry", str(old), str(tmp_path / "new"))
    assert done.returncode == 2
    assert word in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_carried_run_serves_its_version_and_tells_its_lessons(old: Path, tmp_path: Path) -> None:
    first: Any = tmp_path / "first"
    with product(first, "--gate=off") as running:
        assert running.stop() == 0
    ((state, sampler),) = text_rows(first, "SELECT state_ref, sampler_ref FROM versions")
    for kind, ref in ("states", state), ("adapters", sampler):
        shutil.copytree(first / kind / ref, old / kind / ref)
    change(old, f"UPDATE versions SET state_ref = '{state}', sampler_ref = '{sampler}'")
    new = tmp_path / "new"
    assert run("carry", str(old), str(new)).returncode == 0
    with product(new, "--gate=off") as running:
        assert running.health()["policy_version"] == 1
        ask(running, "a", [{"role": "user", "content": "Leo has 3 apples. How many are 2 more?"}])
        assert running.stop() == 0
    ((prompt,),) = read(new, "SELECT told FROM turns WHERE kind = 'main'")
    assert str(prompt).startswith("[[2]"), "the kept lesson, not the candidate"


def test_carry_refuses_a_directory_with_something_in_it_and_one_in_use(
    old: Path, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/file").touch()
    done = run("carry", str(old), str(tmp_path / "new"))
    assert (done.returncode, "there already" in done.stderr) == (2, True)
    with closing(Ledger(tmp_path / "used")):
        done = run("carry", str(tmp_path / "used"), str(tmp_path / "other"))
    assert (done.returncode, "stop it" in done.stderr) == (2, True)
