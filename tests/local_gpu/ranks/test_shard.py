"""A sharded base learns and scores like a whole one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from local_gpu.learn.learning import LearningCore
from local_gpu.learn.world import Alone
from local_gpu.model.load import open_base
from local_gpu.model.lora import LoraShape, fresh_adapter, with_lora
from local_gpu.ranks.remote import RankedLearning
from local_gpu.ranks.shard import Shards
from tests.support.backends import tiny_model
from tests.support.local_reference import rl_datum
from tests.support.ranks import (
    ADAM,
    PASSES,
    PATIENCE_S,
    apart,
    build_full,
    config,
    learn_the_same,
    one_process,
    rank_pids,
    same_report,
    score_the_same,
    weights,
    write_warm,
)
from tinker_claw.errors import BackendError, OutageError, StepError
from tinker_claw.types import Datum, LossPass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers with odd widths, so that parts of two ranks differ in size."""
    folder = tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=3, intermediate_size=63)
    write_warm(folder, folder / "warm")
    return folder


@pytest.fixture(scope="module")
def ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankedLearning]:
    wanted = config(
        tmp_path_factory.mktemp("ranks"),
        2,
        model=str(model),
        micro_batch_tokens=90,
        shard="on",
    )
    learning = RankedLearning(wanted, hangs_s=PATIENCE_S)
    yield learning
    learning.close()


@pytest.mark.slow
def test_a_cut_base_learns_as_a_whole_one(
    one: LearningCore, many: RankedLearning, tmp_path: Path
) -> None:
    learn_the_same(one, many, tmp_path)


@pytest.mark.slow
def test_a_cut_base_scores_as_a_whole_one_and_goes_on_learning(
    one: LearningCore, many: RankedLearning, model: Path, tmp_path: Path
) -> None:
    score_the_same(one, many, tmp_path)
    for learning in (one, many):
        learning.read_state(model / "warm")
    same_report(many.step(PASSES, ADAM), one.step(PASSES, ADAM))


@pytest.mark.slow
def test_a_rank_without_work_enters_the_passes_of_the_others(
    one: LearningCore, many: RankedLearning, tmp_path: Path
) -> None:
    single = (LossPass("ppo", (rl_datum(40, 9, 3),)),)
    same_report(many.step(single, ADAM), one.step(single, ADAM))
    assert apart(weights(many, tmp_path / "a"), weights(one, tmp_path / "b")) < 1e-5


@pytest.mark.slow
def test_a_loss_that_fails_on_one_rank_voids_the_step_and_nobody_waits(
    one: LearningCore, many: RankedLearning, tmp_path: Path
) -> None:
    bad = rl_datum(70, 30, 5)
    bad = Datum(bad.tokens, bad.start, bad.logprobs, (float("nan"),) * len(bad.advantages))
    before = weights(many, tmp_path / "before")
    with pytest.raises(StepError, match="loss is nan"):
        many.step((LossPass("ppo", (*PASSES[0].datums, bad)),), ADAM)
    assert apart(weights(many, tmp_path / "after"), before) == 0
    same_report(many.step(PASSES, ADAM), one.step(PASSES, ADAM))


def test_only_the_layers_are_cut_and_nothing_keeps_them_whole(model: Path, tmp_path: Path) -> None:
    base = open_base(str(model), device="cpu", dtype="auto", threads=1)
    layers = [weakref.ref(p) for p in base.module.model.layers.parameters()]
    head = base.module.get_output_embeddings().weight
    with one_rank(tmp_path):
        wanted = config(tmp_path, 1, model=str(model))
        shards = Shards(base, torch.device("cpu"), 1)
        learning = LearningCore(wanted, base, Alone(), shards)
        gc.collect()
        assert not [ref for ref in layers if ref() is not None]
        assert learning.facts.vocabulary == len(head)
        learning.read_state(model / "warm")
        one = one_process(model, tmp_path / "one")
        one.read_state(model / "warm")
        same_report(learning.step(PASSES, ADAM), one.step(PASSES, ADAM))


def test_each_layer_is_let_go_of_before_the_next_is_cut(model: Path, tmp_path: Path) -> None:
    """To be sharded, a layer stands whole on the GPU, which has no room for two copies of all."""
    base = open_base(str(model), device="cpu", dtype="auto", threads=1)
    shape = LoraShape(4, 8)
    module = with_lora(base, shape, fresh_adapter(base, shape, 0))
    cut: list[int] = []
    for layer in base.module.model.layers:
        weakref.finalize(layer.mlp.up_proj.weight, lambda: cut.append(_cut(module)))
    with one_rank(tmp_path):
        Shards(base, torch.device("cpu"), 1).cut(module)
        assert cut == [1, 2, 3]


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=(folder / "meeting").as_uri(), rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _cut(module: Any) -> int:
    """Number of sharded layers."""
    return sum(isinstance(layer, FSDPModule) for layer in module.base_model.layers)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ranks_whose_memory_is_full_start_again_with_half_the_tokens_of_a_pass(
    one: LearningCore, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The others are in the same pass, so none of them can leave it alone."""
    monkeypatch.setenv("FULL", where)
    settings: dict[str, Any] = {"shard": "on", "micro_batch_tokens": 400}
    root = tmp_path / "ranks"
    many = RankedLearning(config(root, 2, model=str(model), **settings), build=build_full)
    try:
        many.read_state(model / "warm")
        pids, outages = rank_pids(root), list[str]()
        report = None
        while report is None:
            try:
                report = many.step(PASSES, ADAM)
            except OutageError as error:
                outages.append(str(error))
                many.read_state(model / "warm")
        same_report(report, one.step(PASSES, ADAM))
        assert 1 <= len(outages) < 4
        assert all("The next passes have" in sentence for sentence in outages)
        assert f"rank 1 is full, {where}" in (root / "logs" / "ranks.log").read_text()
        assert not {*pids} & {*(pids := rank_pids(root))}
        same_report(many.step(PASSES, ADAM), one.step(PASSES, ADAM))
        assert rank_pids(root) == pids, "what fits is remembered"
        long = LossPass("ppo", (rl_datum(200, 9, 3),))  # that no rank has room for
        with pytest.raises(BackendError, match="One sample alone does not fit in the memory") as no:
            many.step((long,), ADAM)
        assert not isinstance(no.value, OutageError), "waiting does not help"
    finally:
        many.close()
