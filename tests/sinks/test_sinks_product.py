"""The product with sinks: a real run of the tiny model, killed and started again."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.processes import product
from tests.sinks.test_follow import scalars, steps
from tests.sinks.test_grafana import asked, shown
from tests.sinks.test_otel import Collector, values
from tests.talk import learn, rows

FLAGS = ("--report-to", "tensorboard,otel", "--batch-size", "4", "--gate", "shadow")


@pytest.mark.slow
def test_a_real_run_is_told_whole_over_a_kill(tmp_path: Path) -> None:
    data, collector = tmp_path / "data", Collector()
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    try:
        with product(data, *FLAGS, env=env) as running:
            learn(running, 1, range(0, 40))
            running.process.kill()
            running.process.wait()
        with product(data, *FLAGS, env=env) as running:
            assert "tinker_claw_policy_version 1.0" in metrics(running.url), "as it serves"
            learn(running, 2, range(100, 140))
            there = shown(metrics(running.url))
            assert running.stop() == 0
    finally:
        collector.close()
    for name, labels in asked().items():
        assert name in there, name
        assert not there[name] or labels <= there[name], name
    committed = [row[0] for row in rows(data, "SELECT id FROM steps WHERE status = 'committed'")]
    assert steps(data) == committed
    assert len(committed) >= 2
    found = scalars(data)
    assert found["step/steps_from_base"][-1][1] >= 2
    assert {"step/reward_mean", "step/moved", "verdicts/good", "gate/asked"} <= found.keys()

    told = [values(span)["tinker_claw.step"] for span in collector.spans if span.name == "step"]
    assert sorted(set(told)) == committed
    ids = {span.span_id for span in collector.spans if span.name == "step"}
    assert len(ids) == len(committed), "one that was sent twice is the same span"
    assert any(span.name == "chat demo" for span in collector.spans)
    words = b"How many"  # every problem asks that
    assert words.lower() not in b"".join(collector.raw).lower()
    kept = [file.read_bytes() for file in (data / "sinks").rglob("*") if file.is_file()]
    assert words.lower() not in b"".join(kept).lower()


def metrics(url: str) -> str:
    return httpx.get(url.removesuffix("/v1") + "/metrics").text
