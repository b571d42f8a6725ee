"""Optimizers over tiny models, and their gradients beside those of peft's own model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from local_gpu.learn.passes import PassBudget, Passes
from local_gpu.learn.step import LoraOptimizer
from local_gpu.model.files import write_adapter
from local_gpu.model.lora import BaseModel, LoraShape, fresh_adapter
from local_gpu.model.vision import Vision
from local_gpu.tree.body import Body
from local_gpu.tree.kernels import Kernel, SdpaKernel
from tests.support.local_reference import full_logprobs, reference, reference_loss
from tinker_claw.types import Adam, Datum, LossPass

SHAPE = LoraShape(rank=4, alpha=8)
STILL = Adam(learning_rate=0.0, beta1=0.0, grad_clip_norm=0.0)
"""A step that leaves the weights as they are, and its gradient as Adam's first moment."""
Gradient = dict[str, Tensor]


def warm(base: BaseModel, shape: LoraShape = SHAPE) -> Gradient:
    """Draw an adapter with values in both halves, so that both have gradients."""
    draw = torch.Generator().manual_seed(5)
    fresh = fresh_adapter(base, shape, seed=0)
    return {n: t + 0.1 * torch.randn(t.shape, generator=draw) for n, t in fresh.items()}


def learner(
    base: BaseModel,
    shape: LoraShape = SHAPE,
    *,
    kernel: Kernel | None = None,
    tokens: int | None = None,
    share: bool = True,
    checkpointing: bool = False,
    vision: Vision | None = None,
) -> LoraOptimizer:
    body = Body(kernel or SdpaKernel(), base.device, packs=base.packs, share=share)
    return LoraOptimizer(
        base,
        shape,
        warm(base, shape),
        passes=Passes(body, PassBudget(tokens), vision=vision),
        context_tokens=10_000,
        checkpointing=checkpointing,
    )


def gradient(learning: LoraOptimizer, passes: Sequence[LossPass]) -> Gradient:
    learning.step(passes, STILL)
    moments, ending = learning.masters.state().moments, ".exp_avg"
    return {n.removesuffix(ending): t for n, t in moments.items() if n.endswith(ending)}


def rows_of(model: Any, datum: Datum) -> Tensor:
    """Logprobs of the whole vocabulary, a row for each token that is learned."""
    return full_logprobs(model, datum.tokens)[datum.start - 1 :]


def peft_gradient(
    base: BaseModel,
    learning: LoraOptimizer,
    model: Path,
    folder: Path,
    passes: Sequence[LossPass],
    dtype: torch.dtype = torch.float32,
    rows: Any = rows_of,
) -> Gradient:
    """Gradient by autograd through full logits, one sequence at a time, of peft's own model.

    Args:
        folder: where the adapter is written for peft.
    """
    write_adapter(folder, base, learning.shape, learning.masters.adapter())
    whole = reference(model, folder, dtype)
    for each in passes:
        for datum in each.datums:
            reference_loss(each.loss, rows(whole, datum), datum).backward()
    prefix = "base_model.model."
    named = {
        name.removeprefix(prefix).replace(".default.", "."): parameter.grad
        for name, parameter in whole.named_parameters()
        if parameter.grad is not None
    }
    gradients = {name: named.pop(base.name_in_files(name)) for name in learning.masters.adapter()}
    assert not named, "no other parameter learns"
    return gradients


def apart(first: Gradient, second: Gradient) -> float:
    """Distance of two gradients, relative to the second."""
    assert first.keys() == second.keys()
    a, b = (torch.cat([g[name].flatten().double() for name in sorted(g)]) for g in (first, second))
    return float((a - b).norm() / b.norm())
