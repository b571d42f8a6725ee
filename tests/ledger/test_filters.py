"""Filters on turns give the same result as a full scan, without one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.many_turns import fill
from tinker_claw.ledger.database import FILE, Outside, open_read_only
from tinker_claw.ledger.views import Filter, read_turns

TURNS, LIMIT = 1500, 51


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    directory = tmp_path_factory.mktemp("filters")
    fill(directory, TURNS)
    with open_read_only(directory / FILE) as opened, opened.moment():
        yield opened


def fits(turn: dict[str, Any], wanted: Filter) -> bool:
    verdict = {None: "none", 1: "good", 0: "neutral", -1: "bad"}[turn["verdict"]]
    return (
        wanted.user in (None, turn["user"])
        and wanted.kind in (None, turn["kind"])
        and (wanted.verdict is None or (turn["judged"] and wanted.verdict == verdict))
        and wanted.trained in (None, turn["state"] == "trained")
        and turn["id"] < (wanted.before or TURNS + 1)
    )


def test_filters_find_what_fits(ledger: Outside) -> None:
    everything = read_turns(ledger, Filter(), None)
    assert len(everything) == TURNS
    for user, kind, verdict, trained, before in itertools.product(
        (None, "user1", "nobody"),
        (None, "main", "side"),
        (None, "good", "bad", "none"),
        (None, True, False),
        (None, 1200),
    ):
        wanted = Filter(None, user, kind, verdict, trained, None, before)
        expected = [turn for turn in everything if fits(turn, wanted)][-LIMIT:]
        assert read_turns(ledger, wanted, LIMIT) == expected, wanted


@pytest.mark.parametrize(
    "wanted",
    [
        Filter(user="user1"),
        Filter(kind="side"),
        Filter(verdict="bad"),
        Filter(verdict="none"),
        Filter(trained=True),
        Filter(trained=False),
        Filter(session="key7"),
        Filter(session="7"),
        Filter(kind="main", before=TURNS // 2),
    ],
    ids=str,
)
def test_filters_do_not_look_at_all_turns(ledger: Outside, wanted: Filter) -> None:
    counted, connection = list[int](), ledger._connection

    def taken(wanted: Filter, limit: int | None) -> int:
        """Instructions of SQLite's virtual machine, in tens."""
        counted.clear()
        connection.set_progress_handler(lambda: counted.append(1), 10)
        read_turns(ledger, wanted, limit)
        connection.set_progress_handler(None, 0)
        return len(counted)

    assert taken(wanted, LIMIT) < taken(Filter(), None) / 5
