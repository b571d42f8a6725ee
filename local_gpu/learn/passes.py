"""Passes through the body: many sequences in one row, every shared prefix once.

Rule: a pass that runs out of memory is cut in two and tried again, and what it had computed counts
for nothing. Logits exist for the rows that a loss or a reader asks for, a few at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from local_gpu.device import out_of_memory
from local_gpu.tree.kernels import Kernel
from local_gpu.tree.prefix_tree import grow
from tinker_claw.errors import StepError

T = TypeVar("T")

DEFAULT_TOKENS = 65_536
"""Of one pass: about 30 GB for an 8B model with checkpointed activations (arithmetic)."""


@dataclass(frozen=True, slots=True)
class Body:
    """How hidden states are computed on one device."""

    kernel: Kernel
    device: torch.device
    packs: bool = True
    """False: the model has layers that no prefix tree describes, and sequences go one by one."""
    share: bool = True
    """False: sequences stand in one row, and share nothing (for comparison)."""

    def hidden(
        self, module: Any, sequences: Sequence[Tensor], firsts: Sequence[int]
    ) -> list[Tensor]:
        """Last hidden states of each sequence from its `first` position on, (n_i - first, hidden).

        That of position p predicts token p + 1.
        """
        if not self.packs:
            return [self._alone(module, s)[at:] for s, at in zip(sequences, firsts, strict=True)]
        tree = grow(sequences, share=self.share)
        rows = module.base_model(
            input_ids=tree.tokens.to(self.device)[None],
            position_ids=tree.positions.to(self.device)[None],
            use_cache=False,
            over_tree=self.kernel.prepare(tree, self.device),
        ).last_hidden_state[0]
        wanted = [r[at:] for r, at in zip(tree.rows, firsts, strict=True)]
        # Taken at once: the gradient of each taking is zeros as large as the whole row.
        return list(rows[torch.cat(wanted).to(self.device)].split([len(w) for w in wanted]))

    def tokens_at_once(self, budget: int) -> int:
        """Of one pass: 1 makes every sequence a pass of its own."""
        return budget if self.packs else 1

    def idle(self, module: Any, *, learn: bool) -> None:
        """A pass that changes nothing, forwards and, where others learn, backwards."""
        with torch.set_grad_enabled(learn):
            (rows,) = self.hidden(module, [torch.zeros(1, dtype=torch.int64)], [0])
        if learn and rows.requires_grad:  # not where LoRA is on the head alone
            (rows * 0).sum().backward()

    def _alone(self, module: Any, sequence: Tensor) -> Tensor:
        inputs = sequence.to(self.device)[None]
        return module.base_model(input_ids=inputs, use_cache=False).last_hidden_state[0]


class PassBudget:
    """How many tokens a pass may have; an out-of-memory makes it smaller for good."""

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
        most: int,
    ) -> dict[int, T]:
        """Compute every pass; results by index.

        Args:
            passes: this rank's, each with the indices of its sequences.
            compute: one pass; results in the order of its indices.
            sequences: what the indices stand for.
            undo: removes what a failed pass has left behind.
            idle: a pass over nothing, for ranks that must enter as many as the others.
            most: how many passes any rank has.

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
            # The failed pass's tensors hang on its exception's frames, which are gone by now.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if len(indices) == 1:
                raise StepError(
                    "One sample alone does not fit in the memory. Let --context-tokens be less, "
                    "or use more or larger GPUs."
                )
            half = len(indices) // 2
            waiting += [indices[half:], indices[:half]]
            failed = len(grow([sequences[i] for i in indices]).tokens)
            self.tokens = min(self.tokens, max(1, failed // 2))
        return results

    @staticmethod
    def _try(indices: list[int], compute: Callable[[Sequence[int]], list[T]]) -> list[T] | None:
        """None: out of memory."""
        try:
            return compute(indices)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        return None
