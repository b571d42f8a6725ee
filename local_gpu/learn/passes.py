"""Passes that fit into memory.

Rule: a pass that runs out of memory is halved and tried again; its partial results are discarded.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from local_gpu.device import out_of_memory
from local_gpu.learn.world import Alone, World
from local_gpu.model.vision import Pictures, Vision, paint
from local_gpu.plan.memory import DEFAULT_TOKENS
from local_gpu.tree.body import Body
from local_gpu.tree.cuts import cut, even_keys
from local_gpu.tree.prefix_tree import grow
from tinker_claw.errors import ClawError, StepError
from tinker_claw.types import Images

T = TypeVar("T")

FAILURES = (ClawError, RuntimeError, ValueError, TypeError, IndexError)
"""Errors of a computation that leave this process as it was."""
_BUSY: Final = 1024
"""Tokens that keep a CPU busy: more at once are no faster, and take more memory."""


class PassBudget:
    """Token budget of a pass. An out-of-memory error lowers it for good."""

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens or DEFAULT_TOKENS

    def run(
        self,
        passes: Sequence[Sequence[int]],
        compute: Callable[[Sequence[int]], list[T]],
        *,
        sequences: Sequence[Tensor],
        undo: Callable[[], None],
        idle: Callable[[], None],
    ) -> dict[int, T]:
        """Compute every pass; return the results by index.

        Args:
            passes: this rank's, each with the indices of its sequences.
            compute: one pass; results in the order of its indices.
            sequences: what the indices stand for.
            undo: removes what a failed pass has left behind.
            idle: an empty pass, for ranks that must run as many passes as the others.

        Raises:
            StepError: a single sequence is too long for the memory.
        """
        results: dict[int, T] = {}
        waiting = [list(indices) for indices in reversed(passes)]
        while waiting:
            indices = waiting.pop()
            done = self._try(indices, compute)
            if done is not None:
                results.update(zip(indices, done, strict=True))
                continue
            self._forget(undo)
            waiting += self._halves(indices, sequences)
        return results

    @staticmethod
    def _forget(undo: Callable[[], None]) -> None:
        undo()
        # The exception's frames, which held the failed pass's tensors, are gone by now.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _halves(self, indices: Sequence[int], sequences: Sequence[Tensor]) -> list[list[int]]:
        """Split a pass that did not fit into halves, the last first; an empty one into none."""
        if not indices:
            return []
        if len(indices) == 1:
            raise StepError(
                "One sample alone does not fit in the memory. Let --context-tokens be less, or use "
                "more or larger GPUs."
            )
        half = len(indices) // 2
        failed = len(grow([sequences[i] for i in indices]).tokens)
        self.tokens = min(self.tokens, max(1, failed // 2))
        return [list(indices[half:]), list(indices[:half])]

    @staticmethod
    def _try(indices: list[int], compute: Callable[[Sequence[int]], list[T]]) -> list[T] | None:
        """Compute one pass; None: out of memory."""
        try:
            return compute(indices)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        return None


@dataclass(frozen=True, slots=True)
class Passes:
    """How a batch is computed: cut into passes, by all ranks together."""

    body: Body
    """How hidden states are computed."""
    budget: PassBudget
    world: World = Alone()  # noqa: RUF009 - it has no state
    vision: Vision | None = None
    """The vision half of the base; None: there are no images."""

    def run(
        self,
        module: Any,
        shown: Sequence[tuple[Tensor, Images]],
        compute: Callable[[Sequence[int], Sequence[Tensor], Pictures | None], list[T]],
        *,
        undo: Callable[[], None],
        learns: bool = False,
    ) -> list[T]:
        """Compute this rank's part of a batch; return the results of all ranks, in order.

        Args:
            shown: each sequence with its images.
            compute: one pass over the sequences of some indices; their results.
            undo: removes what a failed pass has left behind.
            learns: with a backward pass.

        Raises:
            StepError: it failed on some rank.
        """
        sequences, pictures = paint(self.vision, module, shown)
        tokens = self.budget.tokens if self.body.packs else 1  # 1: every sequence by itself
        even = even_keys(module.config)
        enough = _BUSY if self.body.device.type == "cpu" else math.inf
        parts = cut(sequences, ranks=self.world.size, tokens=tokens, even=even, enough=enough)
        failure: Exception | None = None
        mine: dict[int, T] = {}
        try:
            mine = self.budget.run(
                parts[self.world.rank],
                lambda part: compute(part, [sequences[i] for i in part], pictures),
                sequences=sequences,
                undo=undo,
                idle=lambda: self.body.idle(module, learn=learns),
            )
        except FAILURES as error:
            failure = error
        every = self.world.gather((failure and (str(failure) or type(failure).__name__), mine))
        if told := next((told for told, _ in every if told), None):
            raise StepError(told) from failure
        done = {i: one for _, part in every for i, one in part.items()}
        return [done[i] for i in range(len(shown))]
