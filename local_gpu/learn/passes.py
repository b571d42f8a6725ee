"""Passes that fit into memory.

Rule: a pass that runs out of memory is halved and tried again; its partial results are discarded.
Over a sharded base, where other ranks are in the same pass, all ranks end instead, and the next
ones have half the budget.
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
from local_gpu.learn.world import Alone, OutOfStep, World
from local_gpu.model.vision import BatchImages, Vision, paint
from local_gpu.plan.memory import DEFAULT_TOKENS
from local_gpu.tree.body import Body
from local_gpu.tree.cuts import cut, even_keys
from local_gpu.tree.prefix_tree import grow
from tinker_claw.errors import ClawError, StepError
from tinker_claw.types import Images

T = TypeVar("T")

FAILURES = (ClawError, RuntimeError, ValueError, TypeError, IndexError)
"""Errors of a computation that leave this process as it was."""
_NO_ROOM: Final = (
    "One sample alone does not fit in the memory. Let --context-tokens be less, or use more or "
    "larger GPUs."
)
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
    ) -> dict[int, T]:
        """Compute every pass; return the results by index.

        Args:
            passes: this rank's, each with the indices of its sequences.
            compute: one pass; results in the order of its indices.
            sequences: what the indices stand for.
            undo: removes what a failed pass has left behind.

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
            undo()
            # The exception's frames, which held the failed pass's tensors, are gone by now.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if len(indices) == 1:
                raise StepError(_NO_ROOM)
            self.tokens = self.halved(indices, sequences)
            half = len(indices) // 2
            waiting += [list(indices[half:]), list(indices[:half])]
        return results

    def halved(self, indices: Sequence[int], sequences: Sequence[Tensor]) -> int:
        """Half the tokens of a pass that ran out of memory, or the budget if that is less."""
        failed = len(grow([sequences[i] for i in indices]).tokens)
        return min(self.tokens, max(1, failed // 2))

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
    """Computation of a batch: cut into passes, by all ranks together."""

    body: Body
    """It computes the hidden states."""
    budget: PassBudget
    world: World = Alone()  # noqa: RUF009 - it has no state
    vision: Vision | None = None
    """The vision half of the base; None: there are no images."""
    together: bool = False
    """Whether the ranks must be in every pass together, as over a sharded base."""

    def run(
        self,
        module: Any,
        inputs: Sequence[tuple[Tensor, Images]],
        compute: Callable[[Sequence[int], Sequence[Tensor], BatchImages | None], list[T]],
        *,
        undo: Callable[[], None],
        learns: bool = False,
    ) -> list[T]:
        """Compute this rank's part of a batch; return the results of all ranks, in order.

        Args:
            inputs: each sequence with its images.
            compute: one pass over the sequences of some indices; their results.
            undo: removes what a failed pass has left behind.
            learns: with a backward pass.

        Raises:
            StepError: it failed on some rank.
        """
        sequences, pictures = paint(self.vision, module, inputs)
        tokens = self.budget.tokens if self.body.packs else 1  # 1: every sequence by itself
        even = even_keys(module.config)
        enough = _BUSY if self.body.device.type == "cpu" else math.inf
        parts = cut(sequences, ranks=self.world.size, tokens=tokens, even=even, enough=enough)
        failure: Exception | None = None
        mine: dict[int, T] = {}

        def compute_part(part: Sequence[int]) -> list[T]:
            return compute(part, [sequences[i] for i in part], pictures)

        try:
            if self.together:
                rest = [list(part) for part in parts[self.world.rank]]
                mine = self._in_step(module, rest, compute_part, sequences, learns=learns)
            else:
                mine = self.budget.run(
                    parts[self.world.rank], compute_part, sequences=sequences, undo=undo
                )
        except FAILURES as error:
            failure = error
        every = self.world.gather((failure and (str(failure) or type(failure).__name__), mine))
        if problem := next((problem for problem, _ in every if problem), None):
            raise StepError(problem) from failure
        results = {i: result for _, part in every for i, result in part.items()}
        return [results[i] for i in range(len(inputs))]

    def _in_step(
        self,
        module: Any,
        passes: Sequence[Sequence[int]],
        compute: Callable[[Sequence[int]], list[T]],
        sequences: Sequence[Tensor],
        *,
        learns: bool,
    ) -> dict[int, T]:
        """Compute every pass, and idle passes while other ranks have more.

        Raises:
            OutOfStep: a pass was left in the middle.
        """
        results: dict[int, T] = {}
        failure: ClawError | None = None
        for at in range(max(self.world.gather(len(passes)))):
            indices = passes[at] if at < len(passes) else ()
            try:
                if indices:
                    results.update(zip(indices, compute(indices), strict=True))
                else:
                    self.body.idle(module, learn=learns)
            except ClawError as error:  # raised after all passes
                failure = failure or error
            except FAILURES as error:
                full = isinstance(error, RuntimeError) and out_of_memory(error)
                if full and len(indices) > 1:
                    budget = self.budget.halved(indices, sequences)
                    # A cut leaves room for the longest sequence, unless each stands by itself.
                    budget = 1 if budget < max(map(len, sequences)) else budget
                    raise OutOfStep("Out of memory", budget=budget) from error
                sentence = _NO_ROOM if full else f"{type(error).__name__}: {error}"
                raise OutOfStep(sentence) from error
        if failure is not None:
            raise failure
        return results
