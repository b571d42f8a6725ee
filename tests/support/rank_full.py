"""Ranks whose memory is full beyond some number of rows.

`FULL` says where it shows: in the forward pass of the second layer, or in its backward pass. Rank 1
has less room than rank 0.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from local_gpu.config import LocalConfig
from local_gpu.learn.learning import LearningCore
from local_gpu.learn.world import World
from local_gpu.ranks.rank import build_learner

ROOM = (150, 60)
"""Rows that fit, by rank."""


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        ctx.rank = rank
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        check("backward", ctx.rank, grad.shape[1])
        return grad, None


def check(where: str, rank: int, rows: int) -> None:
    if rows > ROOM[rank]:
        print(f"rank {rank} is full, {where}: {rows} rows", flush=True)
        raise torch.OutOfMemoryError("CUDA out of memory, say")


def build_full(config: LocalConfig, world: World) -> LearningCore:
    """Build a learner with little memory."""
    built, where = build_learner(config, world), os.environ["FULL"]
    layer: Any = built._models["policy"].module.base_model.layers[1]

    def look(_: Any, args: tuple[Tensor, ...]) -> Any:
        if where == "forward":
            check(where, world.rank, args[0].shape[1])
        if where == "backward" and args[0].requires_grad:
            return (_Backward.apply(args[0], world.rank), *args[1:])
        return None

    layer.mlp.register_forward_pre_hook(look)
    return built
