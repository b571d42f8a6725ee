"""Interface of the ranks that train together, and its implementation for one process.

Rule: every rank makes the same calls in the same order. A rank that fails alone reports it by
`gather`, before the others make a call that it would never reach.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class OutOfStep(Exception):
    """This rank has left a pass that the others are in. Not a ClawError: it ends all ranks."""

    def __init__(self, sentence: str, *, follows: bool = False, budget: int | None = None) -> None:
        """See `RankLost` for the arguments."""
        super().__init__(sentence)
        self.follows = follows
        self.budget = budget


class World(Protocol):
    """The ranks that train together. Every method must be called by all of them."""

    rank: int
    size: int

    def sum(self, flat: Tensor) -> None:
        """Add up over the ranks, in place: afterwards the same bits on each."""
        ...

    def gather(self, mine: T) -> list[T]:
        """Return small objects of all ranks, in rank order, on every rank."""
        ...


class Alone:
    """A world of one process, without torch.distributed."""

    rank = 0
    size = 1

    def sum(self, flat: Tensor) -> None:
        pass

    def gather(self, mine: T) -> list[T]:
        return [mine]


class Sharding(Protocol):
    """Sharding of the frozen base over the ranks, where no rank holds all of it."""

    def cut(self, module: Any) -> None:
        """Shard the layers of a module over the base, in place."""
        ...
