"""The spend table: sums, means, and a ledger of the version before it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ledger.test_ledger import new_turn
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.spend import Bill, Spent
from tinker_claw.types import NextState, Usage

SCHEMA_1 = Path(__file__).parents[1] / "schema_1.sql"
"""As it was committed before there was a spend table."""


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path)
    ledger.steps.add_first_version(state_ref="s0", sampler_ref="p0")
    yield ledger
    ledger.close()


def test_bills_add_up_by_turn_step_and_purpose(ledger: Ledger) -> None:
    serve = Bill("serve", Usage(prefill=100, sampled=10), 0.5)
    turn = ledger.turns.add(new_turn(ledger), serve)
    step = ledger.steps.begin(0, [])
    ledger.spend.add(Bill("judge", Usage(prefill=30, cached=60, sampled=9), 0.25), turn_id=turn)
    ledger.spend.add(Bill("train", Usage(trained=109), 1.0), step_id=step)
    ledger.spend.add(Bill("serve", Usage(prefill=7), None))
    assert ledger.spend.of_turn(turn) == Spent(Usage(prefill=130, cached=60, sampled=19), 0.75)
    assert ledger.spend.of_step(step) == Spent(Usage(trained=109), 1.0)
    assert ledger.spend.total() == Spent(
        Usage(prefill=137, cached=60, sampled=19, trained=109), 1.75, Usage(prefill=7)
    )
    by_purpose = ledger.spend.by_purpose()
    assert by_purpose["serve"] == Spent(
        Usage(prefill=107, sampled=10), 0.5, unpriced=Usage(prefill=7)
    )
    assert by_purpose["teacher"] == Spent()


def test_sums_can_begin_at_a_time(ledger: Ledger) -> None:
    ledger.spend.add(Bill("serve", Usage(prefill=1), 1.0))
    (row,) = ledger._db.rows("SELECT created_at FROM spend")
    later = row["created_at"] + 1
    assert ledger.spend.total(since=row["created_at"]).usd == 1.0
    assert ledger.spend.total(since=later) == Spent()
    assert ledger.spend.by_purpose(since=later)["serve"] == Spent()


def test_means_are_of_what_was_counted_and_none_where_nothing_was(ledger: Ledger) -> None:
    empty = ledger.means()
    assert (empty.turns, empty.prompt_tokens, empty.judge, empty.admitted) == (0, None, None, None)
    for number in range(2):
        turn = ledger.turns.add(
            new_turn(ledger, str(number)), Bill("serve", Usage(prefill=4, sampled=3), None)
        )
        ledger.turns.add_next_state(turn, NextState("user", "ok"))
        ledger.spend.add(Bill("judge", Usage(prefill=10 + 10 * number), None), turn_id=turn)
        ledger.judgements.add(turn, value=1, verdict_ballots=(), hint_ballots=(), hints=())
    ledger.spend.add(Bill("serve", Usage(prefill=4), None))  # nobody was there to read the reply
    ledger.samples.add(turn, 1, None)
    means = ledger.means()
    assert (means.turns, means.prompt_tokens, means.reply_tokens) == (2, 4.0, 3.0)
    assert means.serve == Usage(prefill=6, sampled=3)
    assert means.judge == Usage(prefill=15)
    assert (means.teacher, means.stale) == (None, None)
    assert (means.admitted, means.hinted) == (0.5, 0.0)


def shape(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Columns, keys and indexes of every table, however they came about."""
    connection = sqlite3.connect(path)
    try:
        names = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
        ).fetchall()
        found: dict[str, list[tuple[object, ...]]] = {}
        for (name,) in names:
            for pragma in ("table_info", "foreign_key_list", "index_list"):
                rows = connection.execute(f"PRAGMA {pragma}({name})").fetchall()
                found[f"{pragma} {name}"] = sorted(rows, key=str)
        found["version"] = connection.execute("PRAGMA user_version").fetchall()
        return found
    finally:
        connection.close()


def test_ledger_of_schema_1_becomes_one_of_today_and_keeps_its_rows(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    connection = sqlite3.connect(old / "ledger.sqlite3")
    connection.executescript(
        SCHEMA_1.read_text()
        + "INSERT INTO versions VALUES (0, NULL, 0, 's0', 'p0', 1.0);"
        + "INSERT INTO steps VALUES (7, 'void', 0, NULL, 2.0, 3.0, NULL, 'it failed');"
        + "INSERT INTO meta VALUES ('model', 'mine');"
        + "PRAGMA user_version = 1;"
    )
    connection.close()

    migrated = Ledger(old)
    (step,) = migrated._db.rows("SELECT * FROM steps")
    assert (step["id"], step["status"], step["error"], step["outage"]) == (
        *(7, "void", "it failed"),
        0,
    )
    version = migrated.steps.newest_version()
    assert version is not None
    assert (version.id, version.state_ref) == (0, "s0")
    assert migrated.bind({"model": "mine"}) is True
    assert migrated.spend.total() == Spent()
    migrated.turns.add(new_turn(migrated), Bill("serve", Usage(prefill=1), 0.1))
    assert migrated.spend.total().usd == 0.1
    migrated.close()

    Ledger(new).close()
    assert shape(old / "ledger.sqlite3") == shape(new / "ledger.sqlite3")
    again = Ledger(old)
    assert again.spend.total().usd == 0.1, "opened a second time, nothing is migrated twice"
    again.close()
