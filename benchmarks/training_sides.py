"""The sides of the comparison: each trains the same adapter on the same samples in its own way.

Rule: every side shares the frozen base's tensors, starts from the same adapter, and does whole
steps: gradients of all samples, then Adam. At learning rate 0, so that every step is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.training_work import Work
from local_gpu.learn.passes import PassBudget, Passes
from local_gpu.learn.step import LoraOptimizer
from local_gpu.model.lora import BaseModel, LoraShape
from local_gpu.tree.body import Body
from local_gpu.tree.kernels import Attend, Kernel
from local_gpu.tree.prefix_tree import PrefixTree, grow
from tinker_claw.types import Adam, Datum, LossPass

STILL = Adam(learning_rate=0.0, grad_clip_norm=0.0)
ECHO = Adam(learning_rate=0.0, beta1=0.0, grad_clip_norm=0.0)
"""Adam settings that leave the gradient itself in the first moment."""

Gradients = dict[str, Tensor]
"""Gradients by the names of `local_gpu.model.lora.Adapter`, float32 on the CPU."""


class Side(Protocol):
    """A way to take a training step."""

    name: str

    def step(self, datums: Sequence[Datum]) -> Work:
        """Take one whole step; return what was computed for it."""
        ...

    def gradients(self, datums: Sequence[Datum]) -> Gradients:
        """Compute the gradients that a step on these samples would apply."""
        ...


@dataclass(frozen=True)
class Settings:
    """Settings shared by all sides."""

    base: BaseModel
    lora: LoraShape
    adapter: dict[str, Tensor]
    checkpointing: bool
    """Keep one activation per layer and recompute the rest in the backward pass."""
    pass_tokens: int
    """Tokens of one forward and backward pass where sequences are packed."""
    kernel: Kernel
    """Attention kernel of our sides."""


class Ours:
    """`local_gpu.learn`, with parts of it switched off."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        *,
        share: bool = True,
        pack: bool = True,
        all_rows: bool = False,
    ) -> None:
        """`all_rows`: the head computes every position, as if each had a loss."""
        self.name = name
        self._settings = settings
        self._share, self._pack, self._all_rows = share, pack, all_rows
        self._seen = _Counting(settings.kernel)
        base = settings.base
        self._optimizer = LoraOptimizer(
            base,
            settings.lora,
            settings.adapter,
            passes=Passes(
                Body(self._seen, base.device, share=share), PassBudget(settings.pass_tokens)
            ),
            context_tokens=base.context_tokens,
            checkpointing=settings.checkpointing,
        )

    def step(self, datums: Sequence[Datum]) -> Work:
        return self._step(datums, STILL)

    def gradients(self, datums: Sequence[Datum]) -> Gradients:
        self._step(datums, ECHO)
        moments = self._optimizer.masters.state().moments
        return {name: moments[f"{name}.exp_avg"] for name in self._settings.adapter}

    def _step(self, datums: Sequence[Datum], adam: Adam) -> Work:
        self._seen.tokens = self._seen.pairs = 0
        self._optimizer.passes.budget.tokens = self._budget(datums)
        wanted = tuple(everywhere(d) if self._all_rows else d for d in datums)
        self._optimizer.step([LossPass("ppo", wanted)], adam)
        rows = sum(len(d.tokens) - d.start for d in wanted)
        return Work(self._seen.tokens, self._seen.pairs, rows, 3, self._settings.checkpointing)

    def _budget(self, datums: Sequence[Datum]) -> int:
        """Distinct tokens per pass, so that it computes at most `pass_tokens`."""
        if not self._pack:
            return 1
        if self._share:
            return self._settings.pass_tokens
        # Cut by distinct tokens, but computed without sharing them.
        longest = max(len(d.tokens) for d in datums)
        some = datums[: max(1, self._settings.pass_tokens // longest)]
        return len(grow([torch.tensor(d.tokens) for d in some]).tokens)


class _Counting:
    """A kernel that counts the pairs that it is asked for."""

    def __init__(self, kernel: Kernel) -> None:
        self.name = kernel.name
        self._kernel = kernel
        self.tokens = 0
        self.pairs = 0

    def prepare(self, tree: PrefixTree, device: torch.device) -> Attend:
        self.tokens += len(tree.tokens)
        self.pairs += attended(tree)
        return self._kernel.prepare(tree, device)


def attended(tree: PrefixTree) -> int:
    """Pairs of a query and a key that it sees: attention's share of the work."""
    rows = [(s.last - s.first, s.position) for s in tree.segments]
    return sum(own * before + own * (own + 1) // 2 for own, before in rows)


def everywhere(datum: Datum) -> Datum:
    """Make the same loss with rows of advantage zero before it."""
    before = datum.start - 1
    return replace(
        datum,
        start=1,
        logprobs=(0.0,) * before + datum.logprobs,
        advantages=(0.0,) * before + datum.advantages,
    )
