"""Trials of kernels, some of which break their process; run in place of the product's."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from local_gpu.tree.kernels import Attend, MergedKernel, SdpaKernel
from local_gpu.tree.prefix_tree import PrefixTree
from local_gpu.tree.trials import main


class Kills(SdpaKernel):
    """A kernel that kills its process, as a driver's fault in native code does."""

    name = "kills"

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        os.kill(os.getpid(), signal.SIGSEGV)
        raise AssertionError


class Breaks(SdpaKernel):
    """A kernel that breaks its device."""

    name = "breaks"

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class Raises(SdpaKernel):
    name = "raises"

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        raise ValueError("not for this machine")


if __name__ == "__main__":
    with Path(os.environ["TRIALS"]).open("a") as file:
        file.write(f"{os.getpid()}\n")
    print("a library says hello")
    all_of_them = {"kills": Kills, "raises": Raises, "breaks": Breaks, "merged": MergedKernel}
    main([all_of_them[name]() for name in os.environ["KERNELS"].split()])
