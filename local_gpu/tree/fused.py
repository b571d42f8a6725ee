"""Attention over a tree by fused kernels, for CUDA.

`FlexKernel` is FlexAttention: one fused call that skips the blocks that no query sees.

Row k is seen by query row q if and only if k <= q < end of k's subtree. Which blocks see which
follows from the segments alone, so no T x T mask is ever made; within a block that is seen in part
the kernel reads the ends of the subtrees.

Rule: forward and backward on CUDA, where the call is compiled; PyTorch has no backward on the CPU.

`VarlenKernel` is flash attention for sequences of unequal lengths.

One call: every segment is a sequence whose queries are its own rows and whose keys are its
ancestors' rows and its own, copied out. Where there are fewer queries than keys the kernel aligns
them at the end, which is what a segment needs. Rule: CUDA, in half precision. The keys' gradients
are summed in float32, segment after segment: indexing rows instead would add in bfloat16, in an
order that changes from run to run.

Memory: a copy of keys and values of as many rows as all segments see, a layer at a time. A tree of
so many segments that this would be many GB goes to `MergedKernel` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from itertools import accumulate
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from local_gpu.tree.kernels import Attend, MergedKernel, SdpaKernel
from local_gpu.tree.prefix_tree import PrefixTree, Rows
from tinker_claw.errors import ConfigError

BLOCK = 128
"""Rows of a block, of queries and of keys."""
_VARIANTS: Final = 64


class FlexKernel:
    name = "flex"

    def __init__(self, flex: Callable[..., Any] | None = None) -> None:
        """`flex`: FlexAttention that is not compiled, forward only; None: PyTorch's, compiled."""
        self._flex = flex

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        if self._flex is None and device.type == "cpu":
            raise ConfigError("FlexAttention has no backward pass on the CPU; use auto there.")
        if self._flex is None and len(tree.tokens) <= BLOCK:
            # A mask of one block has shapes of its own to compile for, and nothing to skip.
            return SdpaKernel().prepare(tree, device)
        mask = block_mask(tree, device)
        flex: Any = self._flex or compiled()

        def over_tree(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
            gqa = query.shape[1] != key.shape[1]
            try:
                return flex(query, key, value, block_mask=mask, scale=scale, enable_gqa=gqa)
            except FailOnRecompileLimitHit:
                # A new shape beyond the limit of variants: slower, with the same numbers.
                return MergedKernel().prepare(tree, device)(query, key, value, scale)

        return over_tree


def block_mask(tree: PrefixTree, device: torch.device, block: int = BLOCK) -> BlockMask:
    """Make the same mask as `create_block_mask`, with (T / block)^2 comparisons instead of T^2."""
    ends = subtree_ends(tree).to(device)
    rows = len(ends)
    blocks = -(-rows // block)
    padded = ends.new_zeros(blocks * block)
    padded[:rows] = ends
    by_block = padded.reshape(blocks, block)
    first = torch.arange(0, blocks * block, block, device=device)[:, None]
    below = torch.ones(blocks, blocks, dtype=torch.bool, device=device).tril(-1)
    # Every row of an earlier block stands before every query, so only its subtree's end decides.
    # The last block's padding ends nothing, and no end is behind T: a block that reaches beyond T
    # is never whole.
    seen = below & (by_block.amax(1) > first)
    whole = below & (by_block.amin(1) >= first + block)
    diagonal = torch.eye(blocks, dtype=torch.bool, device=device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    return BlockMask.from_kv_blocks(
        *_ordered(seen & ~whole | diagonal),
        *_ordered(whole),
        BLOCK_SIZE=block,
        mask_mod=visible,
        seq_lengths=(rows, rows),
    )


def subtree_ends(tree: PrefixTree) -> Tensor:
    """(T,) int32: the row after the last that may see this one."""
    ends = torch.tensor([s.subtree for s in tree.segments], dtype=torch.int32)
    return ends.repeat_interleave(torch.tensor([s.last - s.first for s in tree.segments]))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of a square of booleans: how many are set, and their columns before the
    others."""
    columns = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], columns.int()[None, None]


@cache
def compiled(backend: Any = "inductor") -> Any:
    """Compile FlexAttention once for the process, for any number of rows.

    A variant is compiled with and without gradients, and again where sizes that were equal by
    chance, e.g. heads and blocks, no longer are. Past its limit of eight PyTorch would compute all
    T x T scores from then on, with only a warning: the limit is raised, and past it, as where
    something cannot be compiled, an error is raised.
    """
    settings: Any = import_module("torch._dynamo.config")
    settings.recompile_limit = max(settings.recompile_limit, _VARIANTS)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)


CAUSAL = (-1, 0)
"""Attention window with everything to the left and nothing to the right."""
_MOST_ROWS: Final = 1 << 20
"""Most rows of copied keys: 4 GB with the values, where a row has eight heads of 128 in half
precision."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The tree as sequences, end to end."""

    pieces: tuple[Rows, ...]
    """Rows of the tree, in the order in which the segments' keys are copied out."""
    query_cuts: tuple[int, ...]
    key_cuts: tuple[int, ...]
    """Where each segment's rows begin, and the end of the last."""


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

    def __init__(self, varlen: Callable[..., Any] = varlen_attn) -> None:
        """`varlen`: PyTorch's; before 2.12 it takes as many heads of keys as of queries."""
        self._varlen = varlen
        self._groups = "enable_gqa" in signature(varlen).parameters

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        layout = layout_of(tree)
        if layout.key_cuts[-1] > _MOST_ROWS:
            return MergedKernel().prepare(tree, device)
        query_cuts = torch.tensor(layout.query_cuts, dtype=torch.int32, device=device)
        key_cuts = torch.tensor(layout.key_cuts, dtype=torch.int32, device=device)
        longest = max(s.last - s.first for s in tree.segments)
        longest_seen = max(s.position + s.last - s.first for s in tree.segments)

        def over_tree(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
            times = query.shape[1] // key.shape[1]
            if times > 1 and not self._groups:
                key, value = (t.repeat_interleave(times, dim=1) for t in (key, value))
            out = self._varlen(
                query[0].transpose(0, 1),
                spelt(key[0].transpose(0, 1), layout.pieces),
                spelt(value[0].transpose(0, 1), layout.pieces),
                query_cuts,
                key_cuts,
                longest,
                longest_seen,
                scale=scale,
                window_size=CAUSAL,
                **({"enable_gqa": times > 1} if self._groups else {}),
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
