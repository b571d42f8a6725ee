"""The serving benchmark, tiny: streams go on through a step and a publication, and none fails."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from backends import VOCABULARY, start_local
from rich.console import Console

from benchmarks import sampler, serving
from benchmarks.serving_run import Load, quantile, run
from local_gpu.config import LocalConfig
from tinker_claw.shipped import MODEL_DIR

LOAD = Load(
    streams=2,
    shared=24,
    own=8,
    new_tokens=6,
    seconds=1.0,
    steps=1,
    samples=2,
    vocabulary=VOCABULARY,
)


@pytest.mark.slow
async def test_streams_go_on_while_versions_change(tmp_path: Path) -> None:
    trainer = await start_local(tmp_path)
    try:
        traffic, published = await run(trainer, LOAD)
    finally:
        await trainer.aclose()
    assert traffic.failures == []
    assert [one.persons for one in published] == [True, False]
    assert all(min(one.step, one.publish, one.first_token) > 0 for one in published)
    seen = traffic.figures["alone"]
    assert seen.requests > 0
    assert seen.seconds > 0.2
    assert len(seen.each) > len(seen.first) > 0
    written = json.loads(json.dumps(serving.document(traffic, published)))
    assert written["phases"]["alone"]["first_token_s"]["p95"] > 0
    out = io.StringIO()
    shown = Console(width=120, file=out)
    serving.show(traffic, published, shown)
    assert "publish" in out.getvalue()
    assert "times alone (goal 1.6)" in out.getvalue()


async def test_a_failed_request_is_counted(tmp_path: Path) -> None:
    trainer = await start_local(tmp_path, context_tokens=32)
    try:
        traffic, _ = await run(trainer, replace(LOAD, steps=0))  # 24 + 8, and 6 that do not fit
    finally:
        await trainer.aclose()
    assert traffic.figures["alone"].failed > 0
    assert traffic.failures


def test_quantiles_of_few_values() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3.0], 0.95) == 3.0
    assert quantile([float(v) for v in range(101)], 0.95) == pytest.approx(95.0)
    assert quantile([1.0, 3.0], 0.5) == pytest.approx(2.0)


async def test_the_sampler_takes_turns_with_generate(tmp_path: Path) -> None:
    prompts = [tuple(range(10, 30)), tuple(range(30, 50))]
    config = LocalConfig(model=str(MODEL_DIR), root=tmp_path, rank=4, alpha=4, context_tokens=64)
    found = await sampler.measure(config, prompts, new_tokens=4, turns=1)
    assert [*found] == ["generate, merged", "base", "adapter"]
    for (taken,) in found.values():
        assert taken.wall > 0
        assert taken.cpu > 0
