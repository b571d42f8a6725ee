"""The sampler's benchmark, tiny: both sides take turns."""

from __future__ import annotations

from pathlib import Path

from benchmarks import sampler
from local_gpu.config import LocalConfig
from tinker_claw.shipped import MODEL_DIR


async def test_the_sampler_takes_turns_with_generate(tmp_path: Path) -> None:
    prompts = [tuple(range(10, 30)), tuple(range(30, 50))]
    config = LocalConfig(model=str(MODEL_DIR), root=tmp_path, rank=4, alpha=4, context_tokens=64)
    found = await sampler.measure(config, prompts, new_tokens=4, turns=1)
    assert [*found] == ["generate, merged", "adapter"]
    for (taken,) in found.values():
        assert taken.wall > 0
        assert taken.cpu > 0
