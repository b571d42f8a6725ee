"""Sequences as a tree of shared prefixes, and how a batch is cut into passes and among ranks."""

from local_gpu.packing.budget import cut
from local_gpu.packing.tree import PrefixTree, Segment, grow

__all__ = ["PrefixTree", "Segment", "cut", "grow"]
