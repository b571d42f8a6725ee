"""A ledger of another release is refused by name and left alone."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tinker_claw.errors import LedgerError
from tinker_claw.ledger.database import FILE, SCHEMA_VERSION, open_read_only
from tinker_claw.ledger.ledger import Ledger


def open_it(file: Path) -> None:
    Ledger(file.parent).close()


def read_it(file: Path) -> None:
    with open_read_only(file):
        pass


@pytest.mark.parametrize("use", [open_it, read_it])
@pytest.mark.parametrize(
    ("version", "says"),
    [
        (
            SCHEMA_VERSION + 1,
            rf"schema is version {SCHEMA_VERSION + 1}, this program knows {SCHEMA_VERSION}\), "
            "and was left as it is; get that release",
        ),
        (SCHEMA_VERSION - 1, "tinker-claw carry"),
        (10, "get that release"),
        (-1, "is no ledger"),
    ],
)
def test_a_ledger_of_another_schema_is_left_as_it_is(
    tmp_path: Path, use: Callable[[Path], None], version: int, says: str
) -> None:
    Ledger(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE)) as ledger:
        ledger.execute(f"PRAGMA user_version = {version}")
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(LedgerError, match=says):
        use(tmp_path / FILE)
    assert (tmp_path / FILE).read_bytes() == before
