"""Attention over whole sequences, over a tree of shared prefixes, and over a paged cache."""

from local_gpu.attention.causal import ATTENTION, attend
from local_gpu.attention.kernels import Attend, Kernel, SdpaKernel

__all__ = ["ATTENTION", "Attend", "Kernel", "SdpaKernel", "attend"]
