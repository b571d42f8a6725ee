"""A ledger after a long use stays small; LEDGER_TURNS=100000 makes it that long."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from benchmarks.ledger import SYSTEM, Result, measure
from tests.support.ledger import sql
from tinker_claw.ledger.ledger import Ledger

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
    with sql(ledger).transaction() as tx:
        tx.execute("UPDATE turns SET state = 'refused', reason = 'side turn'")
        tx.execute("UPDATE turns SET created_at = 1 WHERE id <= ?", (TURNS // 2,))
    size = ledger.live_bytes()
    assert asyncio.run(ledger.trim(before=2)) == TURNS // 2 - measured[1].forgotten_turns
    assert ledger.live_bytes() <= 0.7 * size
    assert len(ledger.turns.get(TURNS).prompt) > SYSTEM
    assert ledger.turns.get(1).prompt == ()
    ledger.close()
