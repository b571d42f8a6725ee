"""Devices: training, scoring and sampling keep their tensors on one, and ask CUDA for free memory.

On tensors that only say they are on a GPU (`tests/support/fake_cuda.py`): which device each is on,
what kernels are given, and when the host waits. Speed, memory and rounding of a GPU are in
docs/owed.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from local_gpu.config import LocalConfig
from local_gpu.halves import ScoreAsk
from local_gpu.learn.learning import LearningCore
from local_gpu.learn.losses import LOSSES
from local_gpu.model.load import keep_memory_whole, load_base
from local_gpu.model.lora import BaseModel
from local_gpu.sample.drawing import Recipe, draw
from local_gpu.tree.body import obstacle
from local_gpu.tree.choice import Heads, Trial, choose
from local_gpu.tree.kernels import Kernel, MergedKernel, SdpaKernel, attend
from tests.support.backends import tiny_model
from tests.support.fake_cuda import CPU, GPU, FakeCuda, on_gpu
from tests.support.local_reference import entropy_datum, rl_datum
from tinker_claw.types import Adam, LossPass, StepReport, TokenLogprobs

ASKS = (
    ScoreAsk((*range(40), 3, 9, 4), 38, None, 0),
    ScoreAsk((*range(40), 5, 9), 39, tuple((1, 2) for _ in range(3)), 4),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda() as fake:
        yield fake


def base_of(model: Path, device: torch.device) -> BaseModel:
    """A base loaded on the CPU, where transformers needs no fake, and moved to the device."""
    base = load_base(str(model), device=CPU, dtype=torch.float32)
    if device.type == "cpu":
        return base
    with FakeCuda():
        module = base.module.to(device)
        assert obstacle(module) is None
    return replace(base, module=module, device=device)


def core(base: BaseModel, folder: Path, **settings: Any) -> LearningCore:
    """A learner in float32, which no flash attention of a GPU takes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("local_gpu.learn.learning.choose", lambda **_: SdpaKernel())
        return LearningCore(LocalConfig(model="model", root=folder, rank=4, **settings), base)


def passes() -> list[LossPass]:
    learned = [rl_datum(60, 20, salt) for salt in (1, 1, 2)]
    return [
        *(LossPass(loss, tuple(learned)) for loss in LOSSES if loss != "cross_entropy"),
        LossPass("cross_entropy", (entropy_datum(50, 30, 3),)),
    ]


def a_life(learner: LearningCore, folder: Path) -> tuple[list[StepReport], list[TokenLogprobs]]:
    """Take steps, publish, score under all kinds of weights, and load a state again."""
    reports = [learner.step(passes(), Adam(1e-2))]
    learner.write_adapter(folder / "adapter")
    learner.write_state(folder / "state")
    scores = learner.score(folder / "adapter", ASKS)
    reports.append(learner.step(passes(), Adam(1e-2)))
    scores += learner.score(folder / "adapter", ASKS) + learner.score(None, ASKS)
    learner.read_state(folder / "state")
    return [*reports, learner.step(passes(), Adam(1e-2))], scores


def test_a_learner_on_a_gpu_keeps_to_it_and_gives_the_same_numbers(
    model: Path, tmp_path: Path
) -> None:
    settings = {"micro_batch_tokens": 100}
    plain = a_life(core(base_of(model, CPU), tmp_path, **settings), tmp_path / "cpu")
    base = base_of(model, GPU)
    with FakeCuda() as cuda:
        faked = a_life(core(base, tmp_path, **settings), tmp_path / "gpu")
    for ours, theirs in zip(faked[0], plain[0], strict=True):
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    for ours, theirs in zip(faked[1], plain[1], strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert ours.topk_ids == theirs.topk_ids
    assert cuda.unfused == []


def test_beside_a_server_on_its_gpu_a_learner_keeps_to_its_share(
    model: Path, tmp_path: Path
) -> None:
    base = base_of(model, GPU)
    with FakeCuda() as cuda:
        core(base, tmp_path).step(passes(), Adam(1e-2))
        assert (cuda.shares, cuda.emptied) == ([], 0)
        core(base, tmp_path, gpu_memory=0.4).step(passes(), Adam(1e-2))
        assert (cuda.shares, cuda.emptied) == ([0.4], 1)


def test_the_host_waits_as_often_for_a_deep_model_as_for_a_shallow_one(tmp_path: Path) -> None:
    waits: list[int] = []
    for layers in (1, 3):
        base = base_of(tiny_model(tmp_path / str(layers), num_hidden_layers=layers), GPU)
        with FakeCuda() as cuda:
            learner = core(base, tmp_path)
            cuda.waits.clear()
            learner.step(passes(), Adam(1e-2))
            waits.append(len(cuda.waits))
    assert waits[0] == waits[1]


@pytest.mark.parametrize("kernel", [SdpaKernel(), MergedKernel()])
@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(3, 3, 16)])
def test_kernels_give_cuda_what_its_flash_attention_takes(
    kernel: Kernel, heads: Heads, cuda: FakeCuda
) -> None:
    here, there = (Trial.of(60, 9, 4, heads, place) for place in (CPU, GPU))
    pairs = zip(
        there.run(kernel, torch.bfloat16), here.run(SdpaKernel(), torch.float32), strict=True
    )
    for got, right in pairs:
        assert got.device.type == GPU.type
        assert float((got.cpu().float() - right).norm() / right.norm()) < 0.01
    assert cuda.unfused == []


def test_a_kernel_is_tried_out_on_the_gpu(cuda: FakeCuda) -> None:
    said: list[str] = []
    settings: dict[str, Any] = {"device": GPU, "dtype": torch.bfloat16, "heads": Heads(2, 1, 8)}
    assert isinstance(choose(say=said.append, only="merged", **settings), MergedKernel)
    assert said == []


def test_where_flash_attention_3_is_missing_the_others_have_pytorchs_own(cuda: FakeCuda) -> None:
    said: list[str] = []
    taken = choose(device=GPU, dtype=torch.bfloat16, heads=Heads(2, 1, 8), say=said.append)
    assert type(taken) is MergedKernel
    (sentence,) = said
    assert sentence.startswith("Attention by fa3 is left out: ")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("queries", [1, 40, 300, 500])
def test_no_attention_of_one_sequence_computes_all_scores(
    dtype: torch.dtype, queries: int, cuda: FakeCuda
) -> None:
    query = torch.randn(1, 4, queries, 8, dtype=dtype, device=GPU)
    key, value = (torch.randn(1, 2, 500, 8, dtype=dtype, device=GPU) for _ in range(2))
    got = attend(query, key, value, None)
    expected = attend(query.cpu().float(), key.cpu().float(), value.cpu().float(), None)
    torch.testing.assert_close(got.cpu().float(), expected, atol=0.02, rtol=0.02)
    assert cuda.unfused == []


def test_tokens_are_drawn_on_the_gpu(cuda: FakeCuda) -> None:
    recipes = [
        Recipe(temperature=0, top_p=1, top_k=None, uniform=0.5, student_topk=0),
        Recipe(temperature=1, top_p=1, top_k=None, uniform=0.3, student_topk=3),
        Recipe(temperature=0.7, top_p=0.8, top_k=None, uniform=0.9, student_topk=1),
        Recipe(temperature=1.3, top_p=0.9, top_k=5, uniform=0.1, student_topk=0),
        Recipe(temperature=1, top_p=1, top_k=None, uniform=0.3, student_topk=0),
    ]
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    logits[4, 7] = float("nan")
    drawn = draw(logits, recipes)
    assert draw(logits.to(GPU), recipes) == drawn
    assert [d is None for d in drawn] == [False] * 4 + [True]


def test_the_allocator_keeps_memory_whole_unless_the_user_has_said_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: list[str] = []
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", options.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:False")
        keep_memory_whole()
        assert options == []
        monkeypatch.delenv(name)
    keep_memory_whole()
    assert options == ["expandable_segments:True"]
    assert "PYTORCH_ALLOC_CONF" not in os.environ, "servers that are started would inherit it"


def test_the_fake_refuses_what_cuda_refuses(cuda: FakeCuda) -> None:
    here, there = torch.zeros(3), on_gpu(torch.zeros(3))
    for wrong in (
        lambda: here + there,
        lambda: torch.cat([here, there]),
        lambda: torch.nn.functional.embedding(torch.zeros(2).long(), there[:, None]),
    ):
        with pytest.raises(RuntimeError, match="two devices"):
            wrong()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    assert there[here.long()].device == (there + torch.tensor(1.0)).device == GPU
    assert there.cpu().device == CPU
