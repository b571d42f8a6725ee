"""Attention over whole sequences, over a tree of shared prefixes, and over a paged cache."""

from local_gpu.attention.causal import ATTENTION, attend
from local_gpu.attention.kernels import Attend, Kernel, SdpaKernel
from local_gpu.attention.merged import MergedKernel

__all__ = ["ATTENTION", "Attend", "Kernel", "MergedKernel", "SdpaKernel", "attend"]
