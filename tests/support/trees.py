"""Random batches of sequences that share prefixes, for tests of packing and of attention."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

SETTINGS = settings(derandomize=True, deadline=None, database=None)


@st.composite
def batches(draw: st.DrawFn, *, most: int = 8) -> list[list[int]]:
    """Draw sequences, many of which extend, repeat or cut short an earlier one."""
    found: list[list[int]] = []
    for _ in range(draw(st.integers(1, most))):
        parent = draw(st.sampled_from(found)) if found else []
        kept = parent[: draw(st.integers(0, len(parent)))]
        longest = draw(st.sampled_from([0, 2, 9]))
        tail = draw(st.lists(st.integers(0, 2), min_size=0 if kept else 1, max_size=longest or 1))
        found.append(kept + tail)
    return found


def tensors(sequences: list[list[int]], stretch: int = 1) -> list[Tensor]:
    """Tensors for the packing; each token is repeated, for longer ones with the same forks."""
    return [torch.tensor(s).repeat_interleave(stretch) for s in sequences]
