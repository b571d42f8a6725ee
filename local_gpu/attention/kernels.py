"""Attention over a `PrefixTree`, by kernels that can be exchanged.

Rule: every kernel computes what `SdpaKernel` computes, to rounding, forward and backward. That one
is the reference: it runs everywhere, and is slow on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from local_gpu.attention.causal import attend
from local_gpu.packing import PrefixTree, Segment

Attend = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
"""query [1, H, T, D], key and value [1, G, T, D] with G dividing H, scale -> [1, H, T, D]."""


class Kernel(Protocol):
    """A way to compute attention over a tree."""

    name: str

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        """Once per tree; what comes back is called in every layer, forward and backward."""
        ...


class SdpaKernel:
    """One call of PyTorch's attention per segment, over its ancestors' rows and its own."""

    name = "sdpa"

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        segments = tree.segments

        def over_tree(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
            parts = [
                attend(query[:, :, s.first : s.last], _seen(key, s), _seen(value, s), scale)
                for s in segments
            ]
            return torch.cat(parts, dim=2)

        return over_tree


def _seen(rows: Tensor, segment: Segment) -> Tensor:
    """What a segment's queries may look at, [1, G, position + own, D]."""
    own = (segment.first, segment.last)
    pieces = [rows[:, :, first:last] for first, last in (*segment.ancestors, own)]
    return torch.cat(pieces, dim=2) if len(pieces) > 1 else pieces[0]
