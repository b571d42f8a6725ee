"""Compute logprobs from hidden states, a few rows at a time.

Rule: logits of [tokens x vocabulary] are never materialised, neither forward nor backward: each
chunk is computed, read and dropped, and the backward pass computes it again (0.6 MB a token in
float32 at 151,936 columns). A head with a LoRA of its own is computed like any other: base and
update together, chunk by chunk, and the chunks' gradients of A and B add up.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_CHUNK_ELEMENTS = 1 << 24
"""Elements of a chunk of logits: 64 MiB in float32."""
_LARGEST_CHUNK = 1 << 27
"""Elements of a chunk on CUDA with enough memory: 883 rows of 151,936, which keep any GPU busy."""
_BYTES = 16
"""Bytes per logit: the computed value, its float32 copy, and a gradient of each."""
_SHARE = 8
"""Fraction (1/8) of the free memory that a chunk may take; the backward pass needs the rest."""


class TopLogprobs(NamedTuple):
    """Logprobs read from a head, float32, nats."""

    chosen: Tensor
    """(M, K) at the ids asked for."""
    top_ids: Tensor
    """(M, k) the likeliest ids; k may be 0."""
    top: Tensor
    """(M, k) their logprobs, descending."""


def head_logprobs(head: nn.Module, rows: Tensor, ids: Tensor) -> Tensor:
    """log_softmax(head(rows))[m, ids[m, k]] with gradients to `rows` and to a LoRA on the head.

    rows (M, hidden), ids (M, K) int64 -> (M, K) float32, nats, at temperature 1.
    """
    parts = [
        cast(Tensor, checkpoint(_gather, head, r, i, use_reentrant=False, preserve_rng_state=False))
        for r, i in _chunks(head, rows, ids)
    ]
    return torch.cat(parts)


def read_logprobs(head: nn.Module, rows: Tensor, ids: Tensor, top_k: int) -> TopLogprobs:
    """Like `head_logprobs` without gradients, with the `top_k` likeliest ids of every row."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for chunk, wanted in _chunks(head, rows, ids):
        logprobs = head(chunk).float().log_softmax(-1)
        top = logprobs.topk(top_k)
        parts.append((logprobs.gather(1, wanted), top.indices, top.values))
    chosen, top_ids, top_values = (torch.cat(column) for column in zip(*parts, strict=True))
    return TopLogprobs(chosen, top_ids, top_values)


def _gather(head: nn.Module, rows: Tensor, ids: Tensor) -> Tensor:
    logits = cast(Tensor, head(rows)).float()
    return logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)


def _chunks(head: nn.Module, rows: Tensor, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    vocabulary = cast(int, head.out_features)
    size = max(1, _elements(rows.device) // vocabulary)
    return list(zip(rows.split(size), ids.split(size), strict=True))


def _elements(device: torch.device) -> int:
    """Elements of a chunk: on CUDA as many as there is memory for, a power of two between bounds.

    Few rows at a time leave a GPU idle between kernel launches. Powers of two nearly always select
    the same kernels, which round alike.
    """
    if device.type != "cuda":
        return _CHUNK_ELEMENTS
    try:
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
    except (RuntimeError, AssertionError):  # the driver gives no figures
        return _CHUNK_ELEMENTS
    fitting = max(1, free // _SHARE // _BYTES)
    return min(_LARGEST_CHUNK, max(_CHUNK_ELEMENTS, 1 << (fitting.bit_length() - 1)))
