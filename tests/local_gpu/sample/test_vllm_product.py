"""The product with a real vLLM: it learns through it, and no request fails while it publishes.

Not in the default suite: `make vllm` installs it, `make test-vllm` runs this.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.clients import learn, talking
from tests.support.ledger import read
from tests.support.lives import product
from tests.support.real_vllm import Numbers, serving
from tinker_claw.shipped import MODEL_DIR

pytestmark = pytest.mark.vllm
FLAGS = ("--learning-rate", "3e-3", "--lora-rank", "8", "--batch-size", "4")


def test_it_learns_and_no_request_fails(
    request: pytest.FixtureRequest, numbers: Numbers, tmp_path: Path
) -> None:
    environment = Path(request.config.getoption("vllm")).absolute()
    data = tmp_path / "data"
    with (
        serving(environment, MODEL_DIR, tmp_path / "vllm.log", dtype=numbers.dtype) as url,
        product(data, *FLAGS, "--sampler-urls", url) as running,
    ):
        with talking(running.url, clients=2, kind="side") as callers:
            callers.wanted.set()
            learn(running, 3, range(0, 60))
        assert len(callers.seen) > 0
        assert callers.broken == 0, callers.errors
        assert running.health()["status"] == "ok"
        newest = read(data, "SELECT sampler_ref FROM versions ORDER BY id")[-1][0]
        models = httpx.get(f"{url}/v1/models").json()["data"]
        assert newest in {model["id"] for model in models}
        assert running.stop() == 0
        left = httpx.get(f"{url}/v1/models").json()["data"]
        assert len(left) == 1, "no adapter stays behind"
    steps = [event for event in running.events() if event["event"] == "step"]
    compared = [step for step in steps if step["agrees"] is not None]
    assert len(steps) >= 3
    assert compared, "at least the first batch was sampled by the version that it trains"
    assert all(step["agrees"] for step in compared)
