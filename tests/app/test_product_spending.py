"""The product against a server that bills: its estimate, its count, and its limit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import HELLO, ask, converse
from tests.support.ledger import read
from tests.support.lives import Life, product
from tests.support.tinker import wire_process

PRICES = """\
as_of = 2026-01-01
[models.demo]
prefill = 1.0
cached = 0.2
sample = 2.0
train = 3.0
"""
ENV = {"TINKER_API_KEY": "tml-test"}


def wait_for(running: Life, key: str, seconds: float = 180) -> dict[str, Any]:
    """Return /healthz once this entry is set."""
    deadline = time.monotonic() + seconds
    while not (health := running.health())[key]:
        assert time.monotonic() < deadline, health
        time.sleep(0.2)
    return health


def events(running: Life, name: str) -> list[dict[str, Any]]:
    return [event for event in running.events() if event["event"] == name]


@pytest.mark.slow
def test_budget_pauses_learning_over_restarts_and_never_serving(tmp_path: Path) -> None:
    data, table = tmp_path / "data", tmp_path / "prices.toml"
    table.write_text(PRICES)
    with wire_process(tmp_path / "served") as wire:
        flags = ("--backend", "tinker", "--base-url", wire.url, "--prices", str(table))
        flags += ("--batch-size", "4", "--lora-rank", "8")
        with product(data, *flags, env=ENV) as running:
            (told,) = events(running, "spend.estimate")
            assert (told["prices_of"], told["note"]) == ("2026-01-01", None)
            assert told["step_usd"] > 0
            assert running.health()["spent_usd"] == 0, "told before anything was spent"
            for seed in range(6):
                converse(running, seed)
            wait_for(running, "policy_version")
            assert running.stop() == 0
            step = events(running, "step")[0]
            prices = {"prefill": 1, "cached": 0.2, "sampled": 2, "trained": 3}
            usd = sum(step["billed"].get(of, 0) * price for of, price in prices.items()) / 1e6
            assert step["usd"] == pytest.approx(usd)
            assert all(turn["usd"] > 0 for turn in events(running, "turn.captured"))
        unserved = "SELECT COUNT(*) FROM turns WHERE id NOT IN (SELECT turn_id FROM spend "
        assert read(data, unserved + "WHERE purpose = 'serve')") == [(0,)]

        ((spent,),) = read(data, "SELECT SUM(usd) FROM spend")  # type: ignore[misc]
        limit = ("--budget-usd", f"{spent + 1e-6:.9f}")
        learned = "SELECT COUNT(*), SUM(usd) FROM spend WHERE purpose <> 'serve'"
        before = read(data, learned)
        with product(data, *flags, *limit, env=ENV) as running:
            for seed in range(100, 103):
                converse(running, seed)
            health = wait_for(running, "spending_paused")
            assert (health["status"], health["learner"], health["judge"]) == ("paused",) * 3
            assert "higher --budget-usd" in health["spending_paused"]
            assert ask(running, "after", [HELLO])
            assert running.stop() == 0
        with product(data, *flags, *limit, env=ENV) as running:
            wait_for(running, "spending_paused")
            assert running.stop() == 0
        assert read(data, learned) == before
