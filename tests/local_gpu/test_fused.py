"""Fused kernels of a library are used where they compute what the model's own modules compute.

The library is a stand-in on the CPU: one that is right, and some that are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from local_gpu.config import LocalConfig
from local_gpu.learn.learning import LearningCore
from local_gpu.model.fused import Patch, fuse
from local_gpu.model.load import load_base
from local_gpu.model.lora import BaseModel, LoraShape, fresh_adapter, with_lora
from tests.support.backends import tiny_model

CPU = torch.device("cpu")
calls: list[str] = []
Gate = Callable[[Tensor, Tensor], Tensor]


def norm(self: Any, x: Tensor) -> Tensor:
    calls.append("norm")
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * (wide * scale).to(x.dtype)


def gate(a: Tensor, b: Tensor) -> Tensor:
    calls.append("gate")
    return a * a.sigmoid() * b


def broken(*_: Any) -> Tensor:
    raise RuntimeError("no kernel image is available\nfor this device")


def library(gate: Gate) -> Patch:
    """A library that changes models as liger-kernel does: a method in each module."""

    def block(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(gate(self.gate_proj(x), self.up_proj(x)))

    def patch(model: Any, wanted: dict[str, bool]) -> None:
        assert {name for name, is_wanted in wanted.items() if is_wanted} == {"rms_norm", "swiglu"}
        for module in model.modules():
            if isinstance(module, Qwen3RMSNorm):
                module.forward = MethodType(norm, module)
                module.in_place = True
            if isinstance(module, Qwen3MLP):
                module.forward = MethodType(block, module)

    return patch


@pytest.fixture
def base(tmp_path: Path) -> BaseModel:
    calls.clear()
    return load_base(str(tiny_model(tmp_path / "model")), device=CPU, dtype=torch.float32)


def told_by(base: BaseModel, patch: Patch) -> str:
    said: list[str] = []
    fuse(base.module, dtype=base.dtype, say=said.append, patch=patch)
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
    assert "liger" in told_by(base, library(gate))
    assert list(base.module.state_dict()) == names
    assert not any(getattr(module, "in_place", False) for module in base.module.modules())
    for module, right in ((base.module, plain), (with_lora(base, shape, adapter), plain_lora)):
        calls.clear()
        torch.testing.assert_close(logits(module), right)
        layers = base.module.config.num_hidden_layers
        assert calls.count("gate") == layers
        assert calls.count("norm") == 4 * layers + 1, "two of a layer, two of its heads, one last"


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (lambda a, b: gate(a, b) * 1.001, "output of Qwen3MLP is off"),
        (lambda a, b: gate(a.detach() + (a - a.detach()) / 2, b), "gradient of Qwen3MLP is off"),
        (broken, "no kernel image"),
        (lambda a, b: gate(a, b) * torch.nan, "off by nan"),
        (lambda a, b: gate(a, b).double(), "float64"),
    ],
)
def test_what_is_wrong_is_left_out_and_the_model_s_own_go_on(
    wrong: Gate, problem: str, base: BaseModel
) -> None:
    right = logits(base.module)
    assert problem in told_by(base, library(wrong))
    calls.clear()
    torch.testing.assert_close(logits(base.module), right)
    assert calls == []


def test_bfloat16_may_round_as_the_model_does(base: BaseModel) -> None:
    half = replace(base, module=base.module.to(torch.bfloat16), dtype=torch.bfloat16)
    assert "liger" in told_by(half, library(gate))


def test_without_the_library_the_model_s_own_go_on(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: False)
    said: list[str] = []
    fuse(base.module, dtype=base.dtype, say=said.append)
    assert "ImportError" in said[0]
    monkeypatch.setattr("local_gpu.learn.learning.fuse", lambda *_, **__: pytest.fail("on a CPU"))
    LearningCore(LocalConfig(model="m", root=tmp_path), base, say=said.append)
