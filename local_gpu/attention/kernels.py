"""Attention over a `PrefixTree`, by kernels that can be exchanged.

Rule: every kernel computes what `SdpaKernel` computes, to rounding, forward and backward. That one
is the reference: it is short, runs everywhere, and is neither the fastest nor the leanest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from local_gpu.attention.causal import attend
from local_gpu.packing import PrefixTree

Attend = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
"""query [1, H, T, D], key and value [1, G, T, D] with G dividing H, scale -> [1, H, T, D]."""


class Kernel(Protocol):
    """A way to compute attention over a tree."""

    name: str

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        """Once per tree; what comes back is called in every layer, forward and backward."""
        ...


class SdpaKernel:
    """PyTorch's own attention per segment, over its ancestors' rows and its own."""

    name = "sdpa"

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        segments = tree.segments
        lengths = [s.last - s.first for s in segments]
        at = {(s.first, s.last): i for i, s in enumerate(segments)}
        seen = [[*(at[rows] for rows in s.ancestors), i] for i, s in enumerate(segments)]

        def over_tree(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
            # Split once: the gradient of a slice is a row of zeros as long as the whole batch.
            keys, values = key.split(lengths, 2), value.split(lengths, 2)
            parts = [
                attend(rows, _together(keys, ids), _together(values, ids), scale)
                for rows, ids in zip(query.split(lengths, 2), seen, strict=True)
            ]
            return torch.cat(parts, dim=2)

        return over_tree


def _together(pieces: tuple[Tensor, ...], ids: list[int]) -> Tensor:
    return torch.cat([pieces[i] for i in ids], dim=2) if len(ids) > 1 else pieces[ids[0]]
