"""A ledger after a long use stays small; LEDGER_TURNS=100000 makes it that long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.ledger import SYSTEM, Result, measure
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.prune import trim

TURNS = int(os.environ.get("LEDGER_TURNS", "2400"))
MEANT = 100_000
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    directory = tmp_path_factory.mktemp("large")
    return directory, measure(directory, TURNS)


def test_hundred_thousand_turns_take_less_than_two_gigabytes(
    measured: tuple[Path, Result],
) -> None:
    result = measured[1]
    assert result.prompt_tokens > SYSTEM + 1000
    assert result.completion_tokens > 250
    assert result.bytes_per_turn * MEANT < 2e9, result


def test_prompts_come_back_and_old_turns_go_a_few_at_a_time(
    measured: tuple[Path, Result],
) -> None:
    ledger = Ledger(measured[0])
    assert len(ledger.turns.get(TURNS).prompt) > SYSTEM
    with ledger._db.transaction() as tx:
        tx.execute("UPDATE turns SET settled = 1, untrained_because = 'side turn: test'")
    size = ledger.live_bytes()
    per_transaction = list(trim(ledger._db, None, size // 2))
    dropped = sum(per_transaction)
    assert max(per_transaction) <= 25
    assert TURNS // 4 < dropped < TURNS
    assert ledger.live_bytes() <= size // 2
    assert len(ledger.turns.get(TURNS).prompt) > SYSTEM
    assert ledger.turns.get(1).prompt == ()
    ledger.close()
