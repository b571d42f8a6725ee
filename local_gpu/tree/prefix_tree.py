"""A batch of token sequences as one row in which every shared prefix appears once.

The turns of a session repeat one another, and all sessions repeat the system prompt. In a causal
model the hidden states of a prefix do not depend on what follows. So a prefix is computed once, and
all its continuations attend to it. That gives the logprobs and the summed gradients of the separate
sequences, to rounding.

Rule: pure; nothing is padded, cut or reordered within a sequence.

Shapes: T = tokens of the row, n_i = tokens of sequence i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int32]
Rows = tuple[int, int]
"""A range of rows, the end excluded."""

MIN_SHARED = 32
"""A shorter common piece is computed twice: every segment costs an attention call of its own."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens without a fork among them. Each sees the ancestors whole, and its own segment
    causally. Where a sequence ends and others go on there is no fork: a session whose turns extend
    one another is one segment."""

    first: int
    last: int
    """End of the segment's rows, which are first .. last - 1."""
    position: int
    """Position of its first token in every sequence that runs through it."""
    ancestors: tuple[Rows, ...]
    """Ancestors, root first. Together they have exactly `position` rows."""
    subtree: int
    """Rows first .. subtree - 1 are its own and its descendants': row k is seen by query row q if
    and only if k <= q < subtree of k's segment."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The row, its segments in depth-first order, and the rows of each sequence."""

    tokens: Tensor
    """(T,) int64."""
    positions: Tensor
    """(T,) int64."""
    segments: tuple[Segment, ...]
    rows: tuple[Tensor, ...]
    """Per sequence, in the order given: (n_i,) int64, the row of each of its tokens."""


def grow(sequences: Sequence[Tensor], *, share: bool = True, least: int = MIN_SHARED) -> PrefixTree:
    """Build the tree of some sequences.

    Args:
        sequences: each (n_i,) int64 on the CPU, n_i >= 1; one that is a prefix of another, or its
            equal, is computed with it, however short.
        share: False keeps them apart, end to end (for comparison).
        least: prefixes of sequences that fork are shared in pieces of at least so many tokens.
    """
    return _Growth([s.numpy().astype(np.int32) for s in sequences], share, least).tree()


def shared(a: Ids, b: Ids) -> int:
    """Number of tokens that two sequences have in common at their beginnings."""
    n = min(len(a), len(b))
    unequal = np.flatnonzero(a[:n] != b[:n])
    return int(unequal[0]) if len(unequal) else n


def chains(sequences: Sequence[Ids], *, share: bool = True) -> list[list[int]]:
    """Indices in lexicographic order, cut into chains: each sequence is a prefix of the next.

    In this order sequences with a common prefix are neighbours, and one that is a prefix of any
    other is a prefix of its successor. So the last of each chain is a prefix of none, and the rows
    of the others are the first of its rows.

    Args:
        share: False makes each sequence a chain of its own.
    """
    # Big-endian bytes of non-negative ids sort like the ids.
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">i4").tobytes())
    ordered: list[list[int]] = []
    for i in order:
        before = sequences[ordered[-1][-1]] if ordered and share else None
        if before is not None and shared(before, sequences[i]) == len(before):
            ordered[-1].append(i)
        else:
            ordered.append([i])
    return ordered


_Group = tuple[int, int, int, tuple[Rows, ...]]
"""First member, the one after the last, the tokens already placed, and where those are."""


class _Growth:
    """State of one call of `grow`: the last sequence of each chain in order, neighbours' shared
    lengths, and the row so far."""

    def __init__(self, sequences: Sequence[Ids], share: bool, least: int) -> None:
        self._sequences = sequences
        self._least = least
        self._chains = chains(sequences, share=share)
        self._longest = [sequences[chain[-1]] for chain in self._chains]
        self._common = [0] + [shared(a, b) if share else 0 for a, b in pairwise(self._longest)]
        self._pieces: list[Ids] = []
        self._segments: list[Segment] = []
        self._rows: list[list[NDArray[np.int64]]] = [[] for _ in self._chains]
        self._length = 0

    def tree(self) -> PrefixTree:
        self._place_all()
        spans = [np.arange(s.position, s.position + s.last - s.first) for s in self._segments]
        rows = {
            i: torch.from_numpy(longest[: len(self._sequences[i])])
            for chain, longest in zip(self._chains, map(np.concatenate, self._rows), strict=True)
            for i in chain
        }
        return PrefixTree(
            tokens=torch.from_numpy(np.concatenate(self._pieces).astype(np.int64)),
            positions=torch.from_numpy(np.concatenate(spans)),
            segments=tuple(_closed(self._segments, self._length)),
            rows=tuple(rows[i] for i in range(len(rows))),
        )

    def _place_all(self) -> None:
        """Place all segments, depth first, by a stack: forks nest deeper than recursion may."""
        todo = self._groups(0, len(self._chains), 0, ())
        while todo:
            low, high, depth, above = todo.pop()
            end = min([len(self._longest[low]), *self._common[low + 1 : high]])
            rows = (self._length, self._length + end - depth)
            self._length = rows[1]
            self._segments.append(Segment(*rows, position=depth, ancestors=above, subtree=rows[1]))
            self._pieces.append(self._longest[low][depth:end])
            span = np.arange(*rows)
            for placed in self._rows[low:high]:
                placed.append(span)
            if high - low > 1:
                todo.extend(self._groups(low, high, end, (*above, rows)))

    def _groups(self, low: int, high: int, depth: int, above: tuple[Rows, ...]) -> list[_Group]:
        """Members low .. high - 1, whose first `depth` tokens are placed, by what comes next.

        The last group comes first, because they are taken from the end.
        """
        cuts = [i for i in range(low + 1, high) if self._common[i] < depth + self._least]
        return [(a, b, depth, above) for a, b in pairwise([low, *cuts, high])][::-1]


def _closed(segments: list[Segment], length: int) -> list[Segment]:
    """Set the ends of the segments' subtrees: where the next segment that is not below begins."""
    ends = [length] * len(segments)
    above: list[int] = []
    for i, segment in enumerate(segments):
        while len(above) > len(segment.ancestors):
            ends[above.pop()] = segment.first
        above.append(i)
    return [replace(s, subtree=end) for s, end in zip(segments, ends, strict=True)]
