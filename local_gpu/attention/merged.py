"""Attention over a tree without gathering keys and without masks: pieces, merged by their weights.

A segment's rows attend causally among themselves; and because a subtree is one range of rows, all
rows below a segment attend to that segment in one dense call. A query row that has met its keys
in several pieces merges them by the log of each piece's sum of exponentials. The backward pass
needs no merging: with the merged output and log-sum, the gradient of a piece is the gradient of
the whole with respect to that piece's keys.

Rule: nothing is stored for the backward pass but query, key, value, output and one number per row
and head; sums over pieces are made in float32 at least.

Shapes: query [1, H, n, D], key and value [1, G, m, D] with G dividing H; log-sums [1, H, n].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from local_gpu.attention.kernels import Attend
from local_gpu.packing import PrefixTree

_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Piece:
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


def pieces_of(tree: PrefixTree) -> list[Piece]:
    """Every query row meets every key row that it sees, once; its own segment comes first."""
    own = [slice(s.first, s.last) for s in tree.segments]
    below = [slice(s.last, s.subtree) for s in tree.segments]
    return [
        *(Piece(rows, rows, causal=True) for rows in own),
        *(Piece(q, k, causal=False) for q, k in zip(below, own, strict=True) if q.stop > q.start),
    ]


class _Flash(Protocol):
    """A device's flash attention that gives, and takes, the log-sums."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsum: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class _Cpu:
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        forward = _aten._scaled_dot_product_flash_attention_for_cpu
        return forward(query, key, value, 0.0, causal, scale=scale)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsum: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, query, key, value, out, logsum, 0.0, causal, scale=scale)


class _Cuda:
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        forward = _aten._scaled_dot_product_flash_attention
        out, logsum, *_ = forward(query, key, value, 0.0, causal, False, scale=scale)
        return out, logsum

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsum: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # No cumulative lengths: dense. Without dropout the random state is not read.
        unread = torch.zeros(2, dtype=torch.uint64, device=query.device)
        return _aten._scaled_dot_product_flash_attention_backward(
            grad,
            query,
            key,
            value,
            out,
            logsum,
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            unread,
            unread,
            scale=scale,
        )


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pieces: list[Piece],
        flash: _Flash,
        scale: float,
    ) -> Tensor:
        merged = torch.empty_like(query, dtype=_summed(query))
        logsums = merged.new_empty(query.shape[:3])
        for piece in pieces:
            rows, keys = piece.queries, piece.keys
            out, logsum = flash.forward(
                query[:, :, rows], key[:, :, keys], value[:, :, keys], piece.causal, scale
            )
            if piece.causal:  # the first that these rows meet
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
            found = ctx.flash.backward(
                grad[:, :, rows],
                query[:, :, rows],
                key[:, :, keys],
                value[:, :, keys],
                output[:, :, rows],
                logsums[:, :, rows].contiguous(),
                piece.causal,
                ctx.scale,
            )
            for total, where, part in zip(sums, (rows, keys, keys), found, strict=True):
                if piece.causal:
                    total[:, :, where] = part
                else:
                    total[:, :, where] += part
        return *(t.to(query.dtype) for t in sums), None, None, None


def _summed(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)
