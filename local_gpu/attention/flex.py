"""Attention over a tree by FlexAttention: one fused call that skips the blocks nobody sees.

Row k is seen by query row q if and only if k <= q < end of k's subtree. Which blocks of rows see
which follows from the segments alone, so no T x T mask is ever made; within a block that is seen
in part the kernel asks for the ends of the subtrees.

Rule: forward and backward on CUDA, where the call is compiled; PyTorch has no backward on the CPU.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from local_gpu.attention.kernels import Attend, SdpaKernel
from local_gpu.packing import PrefixTree
from tinker_claw.errors import BackendError, ConfigError

BLOCK = 128
"""Rows of a block, of queries as of keys."""
_VARIANTS: Final = 64


class FlexKernel:
    """`compiled` False computes all scores, forward only: for tests of the mask."""

    name = "flex"

    def __init__(self, *, compiled: bool = True) -> None:
        self._compiled = compiled

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        if self._compiled and device.type == "cpu":
            raise ConfigError("FlexAttention has no backward pass on the CPU; use auto there.")
        if self._compiled and len(tree.tokens) <= BLOCK:
            # A mask of one block has shapes of its own to compile for, and nothing to skip.
            return SdpaKernel().prepare(tree, device)
        mask = block_mask(tree, device)
        flex: Any = compiled() if self._compiled else flex_attention

        def over_tree(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
            gqa = query.shape[1] != key.shape[1]
            try:
                return flex(query, key, value, block_mask=mask, scale=scale, enable_gqa=gqa)
            except FailOnRecompileLimitHit as error:
                raise BackendError(
                    f"FlexAttention has been compiled {_VARIANTS} times for this model's shapes: "
                    "start again with --attention merged."
                ) from error

        return over_tree


def block_mask(tree: PrefixTree, device: torch.device, block: int = BLOCK) -> BlockMask:
    """What `create_block_mask` would find, from (T / block)^2 comparisons instead of T^2."""
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
    """(T,) int32: the row behind the last that may see this one."""
    ends = torch.tensor([s.subtree for s in tree.segments], dtype=torch.int32)
    return ends.repeat_interleave(torch.tensor([s.last - s.first for s in tree.segments]))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of a square of booleans: per row how many are set, and their columns before the others."""
    columns = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], columns.int()[None, None]


@cache
def compiled(backend: Any = "inductor") -> Any:
    """Once for the process, for rows of any number.

    A variant is compiled with and without gradients, and again where sizes that were equal by
    chance, heads and blocks say, no longer are. Past PyTorch's limit of eight it would compute all
    T x T scores from then on, and say so in a warning alone: the limit is raised, and past it, as
    where something cannot be compiled, it raises.
    """
    settings: Any = import_module("torch._dynamo.config")
    settings.recompile_limit = max(settings.recompile_limit, _VARIANTS)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
