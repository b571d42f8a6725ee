"""tinker-cookbook's two loops, their files unmodified, against `python -m local_gpu.tinker`.

Not in the default suite: `make cookbook` installs it, `make test-cookbook` runs this.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.support.recipes import SERVED_AS, Cookbook, Done
from tests.support.tinker import KEY, WireProcess, wire_process

pytestmark = pytest.mark.cookbook
RL = {"batch_size": 4, "group_size": 8, "max_tokens": 16, "learning_rate": 0.002, "max_steps": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WireProcess]:
    with wire_process(tmp_path_factory.mktemp("wire") / "root", "--name", SERVED_AS) as running:
        yield running


@pytest.fixture(scope="module")
def cookbook(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, server: WireProcess
) -> Cookbook:
    environment = Path(request.config.getoption("cookbook"))
    return Cookbook(environment, tmp_path_factory.mktemp("cookbook"), server.url)


@pytest.fixture(scope="module")
def taught(cookbook: Cookbook) -> Done:
    """Result of sl_loop: a model that answers 1 or 2."""
    settings = {"batch_size": 8, "learning_rate": 0.01, "lora_rank": 8, "save_every": 10}
    return cookbook.run("sl_loop", "sl", train_on_what="last_assistant_message", **settings)


def there(server: WireProcess, done: Done) -> None:
    """Check that both last checkpoints are at the server."""
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    for path in (done.checkpoint["state_path"], done.checkpoint["sampler_path"]):
        run = path.split("/")[2]
        listed = rest.list_checkpoints(run).result(60).checkpoints
        assert path in {one.tinker_path for one in listed}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_sl_loop(server: WireProcess, taught: Done) -> None:
    nll = taught.of("train_mean_nll")
    assert nll[-1] < 0.1 * nll[0]
    there(server, taught)


def test_rl_loop(server: WireProcess, cookbook: Cookbook, taught: Done) -> None:
    """From a model that answers 1 or 2, one that answers 2."""
    cookbook.begin_from("rl", taught.checkpoint)
    done = cookbook.run("rl_loop", "rl", loss_fn="importance_sampling", **RL)
    reward = done.of("reward/total")
    assert 0.1 < reward[0] < 0.9
    assert mean(reward[-2:]) > reward[0] + 0.1
    there(server, done)


def test_rl_loops_own_default_is_refused_with_a_sentence(cookbook: Cookbook, taught: Done) -> None:
    cookbook.begin_from("rl-default", taught.checkpoint)
    told = cookbook.fail("rl_loop", "rl-default", **RL)
    assert "record_stability_info is True, which is not served here" in told
