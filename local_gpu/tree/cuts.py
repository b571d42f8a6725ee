"""Cut a batch: among the ranks, and into passes that fit in memory.

Rule: pure, and the same on every rank. A cut never changes a result, because losses are sums; it
only decides how often a shared prefix is computed: once in every pass that holds a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from torch import Tensor

from local_gpu.tree.prefix_tree import Ids, chains, shared

Batches = list[list[int]]
"""Passes of one rank: indices of sequences, neighbours in prefix order."""
_LITTLE: Final = 1 / 16
"""Share of a pass's tokens that may be computed once more to keep the pass small."""


def even_keys(config: Any) -> float:
    """Keys at which attention costs a token as much as all matrix products of the body do.

    Counted in operations, in a layer with matrices of `linear` elements and heads of `queries` in
    all. A token takes 2 linear forward and again backward: the base has no gradient of its own. A
    key that it sees takes 4 queries forward (scores, sum) and 10 backward (scores again, four
    products). Checkpointing computes both forward parts twice. Without it, or a backward pass,
    there are up to half as many more: runs of about equal work need no better. Adapters are left
    out: a few per cent.

    Args:
        config: of a transformers causal LM.
    """
    text = config.get_text_config()
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or hidden // heads)
    queries, keys = heads * width, int(getattr(text, "num_key_value_heads", None) or heads) * width
    # In a mixture of experts, the experts that one token goes through.
    experts = int(getattr(text, "num_experts_per_tok", None) or 1)
    moe = getattr(text, "moe_intermediate_size", None)
    inner = experts * int(moe) if moe else int(getattr(text, "intermediate_size", 4 * hidden))
    linear = hidden * (2 * queries + 2 * keys + 3 * inner)
    return (2 * 2 + 2) * linear / ((2 * 4 + 10) * queries)


def cut(
    sequences: Sequence[Tensor],
    *,
    ranks: int,
    tokens: int,
    even: float,
    enough: float = math.inf,
) -> list[Batches]:
    """Cut sequences into passes, per rank.

    Neighbours in lexicographic order share the longest prefixes, so every rank and every pass gets
    a run of that order. Ranks get runs of about equal work; there may be fewer runs than ranks.
    A sequence that is a prefix of another goes with it, where it costs nothing.

    Args:
        sequences: each (n_i,) int64 on the CPU.
        ranks: how many share the work.
        tokens: most distinct tokens of one pass; or as many as the longest sequence has, since that
            needs the room in any case. 1: every sequence is a pass of its own.
        even: see `even_keys`.
        enough: tokens from which on a pass ends where the next sequence shares little with it.
    """
    ids = [s.numpy().astype(np.int32) for s in sequences]
    together = chains(ids, share=tokens > 1)
    longest = [ids[chain[-1]] for chain in together]
    common = [0] + [shared(a, b) for a, b in pairwise(longest)]
    alone = [_work(sequence, 0, even) for sequence in longest]
    # ... and when its neighbour before it is in the same pass.
    further = [
        _work(sequence, computed, even) for sequence, computed in zip(longest, common, strict=True)
    ]
    runs = _balanced(alone, further, ranks)
    if tokens > 1:
        tokens = max(tokens, *map(len, ids))
    parts = [
        _passes(together, longest, common, range(first, last), tokens, enough)
        for first, last in runs
    ]
    return parts + [[] for _ in range(ranks - len(parts))]


def _work(sequence: Ids, computed: int, even: float) -> float:
    """Cost of the tokens after the first `computed`, in units of a token at position 0."""
    n = len(sequence)
    return (n - computed) * (1 + (n + computed) / 2 / even)


def _balanced(
    alone: Sequence[float], further: Sequence[float], ranks: int
) -> list[tuple[int, int]]:
    """At most `ranks` runs whose largest is as small as possible, to one part in a thousand."""
    low, high = max(alone), sum(alone)
    best = [(0, len(alone))]
    while high - low > high / 1000:
        middle = (low + high) / 2
        runs = _fill(alone, further, middle)
        if len(runs) <= ranks:
            best, high = runs, middle
        else:
            low = middle
    return best


def _fill(alone: Sequence[float], further: Sequence[float], most: float) -> list[tuple[int, int]]:
    """Runs from the left, each as long as its work stays within `most`."""
    runs: list[tuple[int, int]] = []
    first, work = 0, alone[0]
    for i in range(1, len(alone)):
        if work + further[i] > most:
            runs.append((first, i))
            first, work = i, alone[i]
        else:
            work += further[i]
    return [*runs, (first, len(alone))]


def _passes(
    together: Sequence[Sequence[int]],
    longest: Sequence[Ids],
    common: Sequence[int],
    run: range,
    tokens: int,
    enough: float,
) -> Batches:
    passes: Batches = []
    used = 0
    for i in run:
        new = len(longest[i]) - common[i]
        ends = used >= enough and common[i] <= _LITTLE * used
        if passes and used + new <= tokens and not ends:
            passes[-1] += together[i]
            used += new
        else:
            passes.append([*together[i]])
            used = len(longest[i])
    return passes
