"""Attention that trainer and sampler share: causal, per sequence, without a mask over the batch.

transformers' own SDPA path for continuous batching attends with one dense mask over all queries
and all keys of a batch; here each sequence meets its own keys only. Registered under a name of its
own, so that switching between training, scoring and paged sampling changes nothing in a model.

Rule: no padding and no attention mask exist here. A sequence is whole, and causal.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

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
        # would compute all scores instead, without a word.
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
    cache: Any = None,
    over_tree: Callable[[Tensor, Tensor, Tensor, float | None], Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention layer: [B, H, n, D] -> [B, n, H, D].

    With `over_tree` (a prepared kernel, `local_gpu.attention.kernels`) the batch is one row that
    holds a tree of shared prefixes. With a paged cache (transformers' PagedAttentionCache) it is
    one row, all sequences end to end, cut by cu_seq_lens.
    """
    if over_tree is not None:
        return over_tree(query, key, value, scaling).transpose(1, 2).contiguous(), None
    if cache is None:
        rows = zip(query.split(1), key.split(1), value.split(1), strict=True)
        out = torch.cat([attend(q, k, v, scaling) for q, k, v in rows])
        return out.transpose(1, 2).contiguous(), None
    key, value = cache.update(key, value, layer_idx=module.layer_idx, kwargs=kwargs)
    out = torch.empty_like(query)
    cuts_q, cuts_k = kwargs["cu_seq_lens_q"].tolist(), kwargs["cu_seq_lens_k"].tolist()
    for (q0, q1), (k0, k1) in zip(pairwise(cuts_q), pairwise(cuts_k), strict=True):
        out[:, :, q0:q1] = attend(query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1], scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, causal_attention)
