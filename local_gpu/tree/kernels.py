"""Attention: per sequence, and over a tree of shared prefixes, by plain PyTorch.

Trainer and sampler share `causal_attention`: each sequence attends to its own keys only, without a
mask over the batch. It is registered under a name of its own, so that switching between training,
scoring and sampling changes nothing in a model.

Rule: no padding and no attention mask exist here. A sequence is whole, and causal.

Kernels for attention over a `PrefixTree` can be exchanged. Rule: every kernel computes what
`SdpaKernel` computes, to rounding, forward and backward. That one is the reference: it is short and
runs everywhere, but is neither the fastest nor the leanest.

`MergedKernel` needs no copies of keys and no masks: it computes pieces and merges their outputs.

A segment's rows attend causally among themselves; and because a subtree is one range of rows, all
rows below a segment attend to that segment in one dense call. A query row whose keys are in several
pieces merges them by the log of each piece's sum of exponentials. The backward pass needs no
merging: with the merged output and log-sum, the gradient of a piece is the gradient of the whole
with respect to that piece's keys. Rule: nothing is stored for the backward pass but query, key,
value, output and one number per row and head; sums over pieces are made in float32 at least.

Shapes: query [1, H, n, D], key and value [1, G, m, D] with G dividing H; log-sums [1, H, n].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from local_gpu.tree.prefix_tree import PrefixTree

ATTENTION = "tinker_claw_causal"
_QUERY_ROWS = 256
"""Query rows per masked call: bounds the mask to this many rows times the keys of a sequence."""

_HALF = (torch.bfloat16, torch.float16)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention of one sequence whose queries are its last n positions.

    query [1, H, n, D], key and value [1, G, m, D] with m >= n and G dividing H; returns
    [1, H, n, D]: softmax(q k^T * scale) v, where query i sees keys 0 .. m - n + i.
    """
    heads, n = query.shape[1], query.shape[2]
    groups, m = key.shape[1], key.shape[2]
    if n == 1:
        # One query sees every key, so the heads that share a key head can be its query rows.
        packed = query.reshape(1, groups, heads // groups, query.shape[3])
        out = scaled_dot_product_attention(packed, key, value, scale=scale)
        return out.reshape(1, heads, 1, value.shape[3])
    gqa = heads != groups
    if gqa and query.is_cuda and (n != m or query.dtype not in _HALF):
        # With fewer key heads the fused kernels there take neither a mask nor float32, and PyTorch
        # would silently compute all scores instead.
        key, value = (t.repeat_interleave(heads // groups, dim=1) for t in (key, value))
        gqa = False
    if n == m:
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=gqa
        )
    parts: list[Tensor] = []
    for first in range(0, n, _QUERY_ROWS):
        rows = query[:, :, first : first + _QUERY_ROWS]
        seen = m - n + first + rows.shape[2]
        mask = torch.ones(rows.shape[2], seen, dtype=torch.bool, device=query.device)
        parts.append(
            scaled_dot_product_attention(
                rows,
                key[:, :, :seen],
                value[:, :, :seen],
                attn_mask=mask.tril_(seen - rows.shape[2]),
                scale=scale,
                enable_gqa=gqa,
            )
        )
    return torch.cat(parts, dim=2)


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    over_tree: Callable[[Tensor, Tensor, Tensor, float | None], Tensor] | None = None,
    cached: Callable[[int, Tensor, Tensor, Tensor, float | None], Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function that transformers calls in every layer: [B, H, n, D] -> [B, n, H, D].

    With `over_tree` (a prepared kernel) the batch is one row that holds a tree of shared prefixes.
    With `cached` (`local_gpu.sample.cached`) it is one row, the new tokens of several sequences end
    to end; the number of the layer comes first.
    """
    if over_tree is not None:
        out = over_tree(query, key, value, scaling)
    elif cached is not None:
        layer = cast(int, module.layer_idx)
        out = cached(layer, query, key, value, scaling)
    else:
        rows = zip(query.split(1), key.split(1), value.split(1), strict=True)
        out = torch.cat([attend(q, k, v, scaling) for q, k, v in rows])
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, causal_attention)


Attend = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
"""query [1, H, T, D], key and value [1, G, T, D] with G dividing H, scale -> [1, H, T, D]."""


class Kernel(Protocol):
    """A way to compute attention over a tree."""

    name: str

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        """Prepare for one tree; the returned function is called in every layer, forward and
        backward."""
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


_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class AttentionPiece:
    """Query rows, and key rows which they see whole or, where both are the same, causally."""

    queries: slice
    keys: slice
    causal: bool


class MergedKernel:
    """PyTorch's flash attention on the CPU, or on CUDA in half precision."""

    name = "merged"

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        pieces = pieces_of(tree)
        flash = _Cpu() if device.type == "cpu" else _Cuda()

        def over_tree(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
            scale = query.shape[3] ** -0.5 if scale is None else scale
            return cast(Tensor, _Merged.apply(query, key, value, pieces, flash, scale))

        return over_tree


class Fa3Kernel(MergedKernel):
    """The same over FlashAttention 3, where its package is installed and PyTorch can take it.

    PyTorch then uses it in all of the process: `release` restores its own kernel.
    """

    name = "fa3"

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        """Raises ImportError or RuntimeError where there is none, or no GPU for it."""
        if device.type != "cuda":
            raise RuntimeError("FlashAttention 3 is for CUDA")
        if nn.attention.current_flash_attention_impl() != _FA3:
            nn.attention.activate_flash_attention_impl(_FA3)
        return super().prepare(tree, device)

    @staticmethod
    def release() -> None:
        """Restore PyTorch's flash attention, if it was replaced."""
        if nn.attention.current_flash_attention_impl() == _FA3:
            nn.attention.restore_flash_attention_impl()


_FA3 = "FA3"


def pieces_of(tree: PrefixTree) -> list[AttentionPiece]:
    """Pair each query row with every key row that it sees, once; its own segment comes first."""
    own = [slice(s.first, s.last) for s in tree.segments]
    below = [slice(s.last, s.subtree) for s in tree.segments]
    return [
        *(AttentionPiece(rows, rows, causal=True) for rows in own),
        *(
            AttentionPiece(q, k, causal=False)
            for q, k in zip(below, own, strict=True)
            if q.stop > q.start
        ),
    ]


class _Cpu:
    """The CPU's flash attention, which returns and takes the log-sums."""

    def forward(self, *inputs: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """`inputs`: query, key, value."""
        return _aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, causal, scale=scale)

    def backward(self, *saved: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
        """`saved`: the output's gradient, query, key, value, output, log-sums."""
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(*saved, 0.0, causal, scale=scale)


class _Cuda:
    """CUDA's flash attention, likewise."""

    def forward(self, *inputs: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        forward = _aten._scaled_dot_product_flash_attention
        out, logsum, *_ = forward(*inputs, 0.0, causal, False, scale=scale)
        return out, logsum

    def backward(self, *saved: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
        _, query, key, *_ = saved
        # No cumulative lengths: dense. Without dropout the random state is not read.
        unread = torch.zeros(2, dtype=torch.uint64, device=query.device)
        lengths = None, None, query.shape[2], key.shape[2]
        backward = _aten._scaled_dot_product_flash_attention_backward
        return backward(*saved, *lengths, 0.0, causal, unread, unread, scale=scale)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pieces: list[AttentionPiece],
        flash: _Cpu | _Cuda,
        scale: float,
    ) -> Tensor:
        merged = torch.empty_like(query, dtype=_summed(query))
        logsums = merged.new_empty(query.shape[:3])
        for piece in pieces:
            rows, keys = piece.queries, piece.keys
            inputs = query[:, :, rows], key[:, :, keys], value[:, :, keys]
            out, logsum = flash.forward(*inputs, causal=piece.causal, scale=scale)
            if piece.causal:  # the first piece of these rows
                merged[:, :, rows] = out
                logsums[:, :, rows] = logsum
            else:
                before = logsums[:, :, rows]
                both = torch.logaddexp(before, logsum)
                merged[:, :, rows].mul_((before - both).exp_()[..., None])
                merged[:, :, rows].addcmul_(out, (logsum - both).exp_()[..., None])
                before.copy_(both)
        output = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, logsums)
        ctx.pieces, ctx.flash, ctx.scale = pieces, flash, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, output, logsums = ctx.saved_tensors
        sums = [torch.empty_like(t, dtype=_summed(query)) for t in (query, key, value)]
        for piece in ctx.pieces:
            rows, keys = piece.queries, piece.keys
            grads = ctx.flash.backward(
                grad[:, :, rows],
                query[:, :, rows],
                key[:, :, keys],
                value[:, :, keys],
                output[:, :, rows],
                logsums[:, :, rows].contiguous(),
                causal=piece.causal,
                scale=ctx.scale,
            )
            for total, where, part in zip(sums, (rows, keys, keys), grads, strict=True):
                if piece.causal:
                    total[:, :, where] = part
                else:
                    total[:, :, where] += part
        return *(t.to(query.dtype) for t in sums), None, None, None


def _summed(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)
