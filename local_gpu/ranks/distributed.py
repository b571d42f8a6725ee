"""The processes that torchrun started, as a `World`.

Rule: all but tensors is sent as plain bytes: anyone who reaches the ports of other machines' ranks
can send data, and torch's own object collectives would unpickle it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from local_gpu.learn.world import OutOfStep
from local_gpu.ranks.messages import as_tensor, decode, encode

T = TypeVar("T")


class Distributed:
    """Implements `World`: tensors by NCCL on CUDA, everything else by gloo."""

    def __init__(
        self, device: torch.device, store: Any, *, rank: int, size: int, timeout_s: float
    ) -> None:
        """Join the process group.

        Args:
            device: this rank's.
            store: torch's store, for the rendezvous.
            rank: from 0.
            size: how many there are.
            timeout_s: a collective that another rank has not reached by then fails; longer than
                ranks may differ by in one command.
        """
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        self.device = device
        self.rank = rank
        self.size = size
        self.sum(torch.ones(1, device=device))  # fails at once if GPUs cannot communicate

    def sum(self, flat: Tensor) -> None:
        with _together():
            dist.all_reduce(flat)

    def most(self, count: int) -> int:
        largest = torch.tensor(count)
        with _together():
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def gather(self, mine: T) -> list[T]:
        own = as_tensor(encode(mine))
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with _together():
            dist.all_gather(sizes, torch.tensor([len(own)]))
            longest = max(map(int, sizes))
            told = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(told, pad(own, (0, longest - len(own))))
        return [decode(t[: int(n)].numpy().tobytes()) for t, n in zip(told, sizes, strict=True)]

    def share(self, value: T) -> T:
        told = as_tensor(encode(value) if self.rank == 0 else b"")
        size = torch.tensor([len(told)])
        with _together():
            dist.broadcast(size, src=0)
            told = told if self.rank == 0 else told.new_empty(int(size))
            dist.broadcast(told, src=0)
        return value if self.rank == 0 else decode(told.numpy().tobytes())

    def leave(self) -> None:
        dist.destroy_process_group()


@contextmanager
def _together() -> Generator[None]:
    """Turn an error of a collective call, which another rank did not reach, or left, into
    OutOfStep."""
    try:
        yield
    except RuntimeError as error:
        raise OutOfStep(f"The ranks lost one another ({error}).") from error
