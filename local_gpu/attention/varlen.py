"""Attention over a tree by flash attention for sequences of unequal lengths.

One call: every segment is a sequence whose queries are its own rows and whose keys are its
ancestors' rows and its own, spelt out. Where there are fewer queries than keys the kernel aligns
them at the end, which is what a segment needs.

Rule: CUDA, in half precision. The keys' gradients are summed in float32, segment after segment:
indexing rows instead would add in bfloat16, in an order that changes from run to run.

Memory: a copy of keys and values of as many rows as all segments see, a layer at a time. A tree of
so many segments that this would be many GB is attended to by merging instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

from local_gpu.attention.kernels import Attend
from local_gpu.attention.merged import MergedKernel
from local_gpu.packing import PrefixTree
from local_gpu.packing.tree import Rows

CAUSAL = (-1, 0)
"""As a window: everything to the left, nothing to the right."""
_MOST_ROWS: Final = 1 << 20
"""Of keys spelt out: 4 GB with the values, where a row has eight heads of 128 in half precision."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The tree as sequences, end to end."""

    pieces: tuple[Rows, ...]
    """Rows of the tree, in the order in which the segments' keys are spelt out."""
    query_cuts: tuple[int, ...]
    key_cuts: tuple[int, ...]
    """Where each segment's rows begin, and the end behind them."""


def layout_of(tree: PrefixTree) -> Layout:
    segments = tree.segments
    own = [s.last - s.first for s in segments]
    seen = [s.position + rows for s, rows in zip(segments, own, strict=True)]
    return Layout(
        pieces=tuple(rows for s in segments for rows in (*s.ancestors, (s.first, s.last))),
        query_cuts=(0, *accumulate(own)),
        key_cuts=(0, *accumulate(seen)),
    )


class VarlenKernel:
    name = "varlen"

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        layout = layout_of(tree)
        if layout.key_cuts[-1] > _MOST_ROWS:
            return MergedKernel().prepare(tree, device)
        query_cuts = torch.tensor(layout.query_cuts, dtype=torch.int32, device=device)
        key_cuts = torch.tensor(layout.key_cuts, dtype=torch.int32, device=device)
        longest = max(s.last - s.first for s in tree.segments)
        longest_seen = max(s.position + s.last - s.first for s in tree.segments)

        def over_tree(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
            out: Any = varlen_attn(
                query[0].transpose(0, 1),
                spelt(key[0].transpose(0, 1), layout.pieces),
                spelt(value[0].transpose(0, 1), layout.pieces),
                query_cuts,
                key_cuts,
                longest,
                longest_seen,
                scale=scale,
                window_size=CAUSAL,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            return out.transpose(0, 1)[None]

        return over_tree


def spelt(rows: Tensor, pieces: tuple[Rows, ...]) -> Tensor:
    """[T, G, D] -> the rows of all pieces, end to end."""
    return cast(Tensor, _Spelt.apply(rows, pieces))


class _Spelt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, pieces: tuple[Rows, ...]) -> Tensor:
        ctx.pieces, ctx.shape = pieces, rows.shape
        return torch.cat([rows[first:last] for first, last in pieces])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.shape, dtype=wide)
        at = 0
        for first, last in ctx.pieces:
            total[first:last] += grad[at : at + last - first]
            at += last - first
        return total.to(grad.dtype), None
