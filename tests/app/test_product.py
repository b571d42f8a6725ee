"""The product as a process with a port and a data directory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from tests.support.clients import learn
from tests.support.ledger import read
from tests.support.lives import product

TRAINED = "SELECT id FROM turns WHERE state = 'trained'"


@pytest.mark.slow
def test_it_learns_stops_in_order_and_goes_on(tmp_path: Path) -> None:
    data = tmp_path / "data"
    flags = ("--learning-rate", "3e-3", "--lora-rank", "16")
    with product(data, *flags) as running:
        before = running.health()
        assert (before["status"], before["policy_version"]) == ("ok", 0)
        learn(running, 1, range(0, 40))
        metrics = httpx.get(running.url.removesuffix("/v1") + "/metrics").text
        assert 'tinker_claw_steps_total{status="committed"} 1.0' in metrics
        page, turn = running.url.removesuffix("/v1") + "/ui", min(read(data, TRAINED))[0]
        assert "v1, 1 step from the base" in httpx.get(page).text
        shown = httpx.get(f"{page}/turns/{turn}").text
        assert re.search(r'class="(up|down)-[123]" title="[-+]', shown), "by its advantages"
        assert running.stop() == 0
    assert read(data, "SELECT COUNT(*) FROM turns WHERE state = 'trained'") == [(16,)]
    assert read(data, "SELECT COUNT(*) FROM step_samples") == [(16,)]
    log = running.log.read_text().lower()
    assert "turn.captured" in log
    assert "how many" not in log, "every problem asks that: logs carry no user text"
    (step,) = [json.loads(line) for line in (data / "metrics.jsonl").read_text().splitlines()]
    assert step["samples"] == 16
    assert step["fresh_tokens"] > 0
    assert step["agreement_k3"] < 1e-8, "trainer and sampler agree on the sampled tokens"

    with product(data, *flags) as running:
        resumed = running.health()
        assert resumed["policy_version"] == 1
        learn(running, 2, range(100, 140))
        assert running.stop() == 0
    assert [event["event"] for event in running.events()].count("resumed") == 1
    assert read(data, "SELECT id, parent, step FROM versions") == [
        (0, None, 0),
        (1, 0, 1),
        (2, 1, 2),
    ]
