"""tinker-cookbook's recipes, their files unmodified, against `python -m local_gpu.tinker`.

Not in the default suite: `make cookbook` installs it, `make test-cookbook` runs this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
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


@pytest.fixture(scope="module")
def rewarded(cookbook: Cookbook, taught: Done) -> Callable[[str], Done]:
    """Results of rl_loop by loss, starting from `taught`: models that answer 2."""

    @cache
    def run(loss: str) -> Done:
        cookbook.begin_from(f"rl-{loss}", taught.checkpoint)
        return cookbook.run("rl_loop", f"rl-{loss}", loss_fn=loss, **RL)

    return run


def there(server: WireProcess, done: Done) -> None:
    """Check that both last checkpoints are at the server, with a LoRA on the head."""
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    for path in (done.checkpoint["state_path"], done.checkpoint["sampler_path"]):
        info = rest.get_weights_info_by_tinker_path(path).result(60)
        assert (info.base_model, info.train_unembed) == (SERVED_AS, True)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_sl_loop(server: WireProcess, taught: Done) -> None:
    nll = taught.of("train_mean_nll")
    assert nll[-1] < 0.1 * nll[0]
    there(server, taught)


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo"])
def test_rl_loop(server: WireProcess, rewarded: Callable[[str], Done], loss: str) -> None:
    done = rewarded(loss)
    reward = done.of("reward/total")
    assert 0.1 < reward[0] < 0.9
    assert mean(reward[-2:]) > reward[0] + 0.1
    there(server, done)


def test_rl_loops_own_default_is_refused_with_a_sentence(cookbook: Cookbook, taught: Done) -> None:
    cookbook.begin_from("rl", taught.checkpoint)
    told = cookbook.fail("rl_loop", "rl", **RL)
    assert "stable_reinforce is not computed here" in told
    assert "Take loss_fn=gspo, ppo" in told


def test_dpo(server: WireProcess, cookbook: Cookbook, taught: Done) -> None:
    done = cookbook.run(
        "preference.dpo.train",
        "dpo",
        load_checkpoint_path=taught.checkpoint["state_path"],
        batch_size=4,
        max_steps=4,
        learning_rate=0.001,
    )
    loss = done.of("dpo_loss")
    assert loss[0] == pytest.approx(math.log(2), abs=1e-4)
    assert loss[-1] < 0.9 * loss[0]
    there(server, done)


def test_on_policy_distillation(
    server: WireProcess, cookbook: Cookbook, taught: Done, rewarded: Callable[[str], Done]
) -> None:
    """A model that answers 1 or 2 learns from a teacher that answers 2."""
    done = cookbook.run(
        "distillation.on_policy_distillation",
        "distilled",
        load_checkpoint_path=taught.checkpoint["state_path"],
        teacher_model=SERVED_AS,
        teacher_checkpoint=rewarded("gspo").checkpoint["sampler_path"],
        dataset="deepmath",
        groups_per_batch=4,
        group_size=8,
        max_tokens=16,
        learning_rate=0.001,
        max_steps=10,
    )
    apart = done.of("teacher_kl")
    assert mean(apart[-3:]) < 0.7 * mean(apart[:2])
    there(server, done)


OTHERS = {
    # Samples while it trains, on minibatches of what is a step old.
    "math_rl.train": {
        "loss_fn": "ppo",
        "groups_per_batch": 4,
        "max_steps_off_policy": 1,
        "num_substeps": 2,
    },
    "preference.shorter.train": {"renderer_name": "qwen3_instruct", "batch_size": 2},
    # The teacher's likeliest tokens are the student's targets. Its evaluation fails in the recipe.
    "sdft.train": {"topk": 5, "groups_per_batch": 4, "eval_every": 0, "max_tokens": 8},
}


@pytest.mark.parametrize("recipe", OTHERS)
def test_other_recipes_take_their_steps(
    server: WireProcess, cookbook: Cookbook, recipe: str
) -> None:
    """The model knows neither task: where all of a group fail alike, a step moves nothing."""
    done = cookbook.run(recipe, recipe, group_size=2, max_steps=2, **OTHERS[recipe])
    norms = done.of("unclipped_grad_l2:mean")
    assert len(norms) >= 2
    assert all(map(math.isfinite, norms))
    assert recipe != "sdft.train" or min(norms) > 0
    there(server, done)
