"""The product with sinks: a real run of the tiny model, killed and started again."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.sinks.test_follow import scalars, steps
from tests.support.clients import learn
from tests.support.ledger import read
from tests.support.lives import product

FLAGS = ("--report-to", "tensorboard", "--batch-size", "4", "--gate", "on")


@pytest.mark.slow
def test_a_real_run_is_told_whole_over_a_kill(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with product(data, *FLAGS) as running:
        learn(running, 1, range(0, 40))
        running.kill()
    with product(data, *FLAGS) as running:
        assert "tinker_claw_policy_version 1.0" in metrics(running.url), "as it serves"
        learn(running, 2, range(100, 140))
        assert 'tinker_claw_steps_total{status="committed"}' in metrics(running.url)
        assert running.stop() == 0
    committed = [row[0] for row in read(data, "SELECT id FROM steps WHERE status = 'committed'")]
    assert steps(data) == committed
    assert len(committed) >= 2
    found = scalars(data)
    assert found["step/steps_from_base"][-1][1] >= 2
    assert {"step/reward_mean", "verdicts/good", "gate/asked"} <= found.keys()
    words = b"How many"  # every problem asks that
    kept = [file.read_bytes() for file in (data / "sinks").rglob("*") if file.is_file()]
    assert words.lower() not in b"".join(kept).lower()


def metrics(url: str) -> str:
    return httpx.get(url.removesuffix("/v1") + "/metrics").text
