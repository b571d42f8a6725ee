"""Fused kernels of a library are used where they compute what the model's own modules compute.

The library is a stand-in on the CPU: one that is right, and some that are wrong.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import tiny_model
from torch import Tensor

from local_gpu.config import LocalConfig
from local_gpu.learn.learning import LearningCore
from local_gpu.model import fused
from local_gpu.model.fused import FusedOps, fuse, liger
from local_gpu.model.load import load_base
from local_gpu.model.lora import BaseModel, LoraShape, fresh_adapter, with_lora

CPU = torch.device("cpu")
calls: list[str] = []


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    calls.append("norm")
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def gate(a: Tensor, b: Tensor) -> Tensor:
    calls.append("gate")
    return a * a.sigmoid() * b


class Crooked(torch.autograd.Function):
    """A kernel with the right output, and half of a gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.nn.functional.silu(a) * b

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        with torch.enable_grad():
            given = [t.detach().requires_grad_() for t in (a, b)]
            found = torch.autograd.grad(gate(*given), given, grads[0])
        return found[0] / 2, found[1]


def broken(*_: Any) -> Tensor:
    raise RuntimeError("no kernel image is available\nfor this device")


RIGHT = FusedOps("a library", norm, gate)


@pytest.fixture
def base(tmp_path: Path) -> BaseModel:
    calls.clear()
    return load_base(str(tiny_model(tmp_path / "model")), device=CPU, dtype=torch.float32)


def told_by(base: BaseModel, ops: FusedOps) -> str:
    said: list[str] = []
    fuse(base.module, device=CPU, dtype=base.dtype, say=said.append, load=lambda: ops)
    (sentence,) = said
    return sentence


def logits(module: Any) -> Tensor:
    with torch.no_grad():
        return module(input_ids=torch.arange(12)[None], use_cache=False).logits


def test_what_is_right_is_taken_and_stays_in_clones_with_adapters(base: BaseModel) -> None:
    shape = LoraShape(rank=4, alpha=4)
    adapter = {n: t + 0.01 for n, t in fresh_adapter(base, shape, seed=0).items()}
    plain, plain_lora = logits(base.module), logits(with_lora(base, shape, adapter))
    names = list(base.module.state_dict())
    told = told_by(base, RIGHT)
    assert "norms (Qwen3RMSNorm) are fused." in told
    assert "gates (Qwen3MLP) are fused." in told
    assert list(base.module.state_dict()) == names
    for module, right in ((base.module, plain), (with_lora(base, shape, adapter), plain_lora)):
        calls.clear()
        torch.testing.assert_close(logits(module), right)
        layers = base.module.config.num_hidden_layers
        assert calls.count("gate") == layers
        assert calls.count("norm") == 4 * layers + 1, "two of a layer, two of its heads, one last"


@pytest.mark.parametrize(
    ("ops", "problem"),
    [
        (replace(RIGHT, gate=lambda a, b: gate(a, b) * 1.001), "gates .* output is off by"),
        (replace(RIGHT, gate=Crooked.apply), "gates .* gradient of input 1 is off by"),
        (replace(RIGHT, gate=broken), r"gates .*RuntimeError: no kernel image is available\."),
        (replace(RIGHT, gate=lambda a, b: gate(a, b) * torch.nan), "gates .* output is off by nan"),
        (replace(RIGHT, gate=lambda a, b: gate(a, b).double()), "gates .* output is torch.float64"),
    ],
)
def test_what_is_wrong_is_left_out_and_the_rest_is_taken(
    ops: FusedOps, problem: str, base: BaseModel
) -> None:
    right = logits(base.module)
    told = told_by(base, ops)
    assert re.search(problem, told), told
    assert "norms (Qwen3RMSNorm) are fused." in told
    calls.clear()
    torch.testing.assert_close(logits(base.module), right)
    assert "gate" not in calls
    assert "norm" in calls


def test_bfloat16_may_round_as_the_model_does(base: BaseModel) -> None:
    half = replace(base, module=base.module.to(torch.bfloat16), dtype=torch.bfloat16)
    assert "not" not in told_by(half, RIGHT)


def test_without_the_library_the_model_s_own_go_on(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> FusedOps:
        raise ModuleNotFoundError("No module named 'liger_kernel'")

    said: list[str] = []
    fuse(base.module, device=CPU, dtype=base.dtype, say=said.append, load=missing)
    assert said == [
        "Norms and gates are PyTorch's own: no fused kernels here (ModuleNotFoundError: No module "
        "named 'liger_kernel'.)"
    ]
    monkeypatch.setattr(fused, "liger", missing)
    monkeypatch.setattr("local_gpu.learn.learning.fuse", lambda *_, **__: pytest.fail("on a CPU"))
    LearningCore(LocalConfig(model="m", root=tmp_path), base, say=said.append)


def test_liger_is_an_import_error_or_has_both() -> None:
    """Liger's kernels are Triton's: without Triton there are none."""
    try:
        ops = liger()
    except ImportError:
        return
    assert callable(ops.norm)
    assert callable(ops.gate)
