"""Shared parts of the contract suite: prompts, draws, scores, weights to step from.

Rule: Protocols only. The fixtures `backend`, `trainer` and `ground` are in `conftest`, and run on
every backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.support.backends import Backend
from tinker_claw.policy import Sampler, Trainer
from tinker_claw.types import Adam, Completion, Datum, LossPass, SamplingParams, StepReport

ADAM = Adam(learning_rate=0.003)
PLAIN = Adam(learning_rate=0.1, beta1=0.0, beta2=0.0, eps=1.0, grad_clip_norm=0.0)
"""Adam that makes a step a function of the gradient alone: -rate g / (|g| + eps) per weight."""
BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
RATIOS = (1.0, 1.2, 0.9, 2.0, 0.5, 1.6, 0.7)
"""Ratios of trainer to behaviour, away from the bounds, so that rounding does not decide."""


def prompt(backend: Backend, length: int = 50, salt: int = 1) -> tuple[int, ...]:
    return tuple((salt * 31 + i * i * 7 + i) % backend.vocabulary for i in range(length))


def rl_pass(prompt: tuple[int, ...], completion: Completion, advantage: float = 0.05) -> LossPass:
    datum = Datum(
        tokens=(*prompt, *completion.tokens),
        start=len(prompt),
        logprobs=completion.logprobs,
        advantages=(advantage,) * len(completion.tokens),
    )
    return LossPass("ppo", (datum,))


async def drawn(sampler: Sampler, prompt: tuple[int, ...], **params: object) -> Completion:
    settings = SamplingParams(**({"max_tokens": 12, "seed": 5} | params))  # type: ignore[arg-type]
    (completion,) = await sampler.sample(prompt, settings)
    return completion


async def scored(
    sampler: Sampler, prompt: tuple[int, ...], completion: Completion
) -> tuple[float, ...]:
    tokens = (*prompt, *completion.tokens)
    return (await sampler.logprobs(tokens, start=len(prompt))).logprobs


def pass_of(loss: Any, *datums: Datum) -> LossPass:
    return LossPass(loss, datums, BOUNDS if loss == "ppo" else {})


@dataclass(frozen=True)
class Ground:
    """Weights that have learned a little, to step from again and again."""

    backend: Backend
    trainer: Trainer
    state: str
    sampler: Sampler
    """Sampler of these weights."""
    prompt: tuple[int, ...]
    completions: tuple[Completion, ...]
    """Two completions drawn from these weights."""

    @classmethod
    async def prepare(cls, backend: Backend, trainer: Trainer) -> Ground:
        start = prompt(backend)
        first = await drawn(await trainer.publish(), start)
        await trainer.train_step([rl_pass(start, first)], ADAM)
        state, sampler = await trainer.save_state("ground: after 1/1"), await trainer.publish()
        completions = tuple([await drawn(sampler, start, seed=seed) for seed in (21, 22)])
        return cls(backend, trainer, state, sampler, start, completions)

    @property
    def probe(self) -> tuple[int, ...]:
        """Text whose scores every step moves."""
        return (*self.prompt, *(t for c in self.completions for t in c.tokens))

    def at(self, state: str) -> Ground:
        """The same ground, to step from another state."""
        return replace(self, state=state)

    async def step(self, passes: Sequence[LossPass], adam: Adam = PLAIN) -> StepReport:
        await self.trainer.load_state(self.state)
        return await self.trainer.train_step(passes, adam)

    async def after(self, passes: Sequence[LossPass], adam: Adam = PLAIN) -> list[float]:
        """Scores of the probe after one step from the ground."""
        await self.step(passes, adam)
        return await self.scores(await self.trainer.publish())

    async def scores(self, sampler: Sampler | None = None) -> list[float]:
        return list((await (sampler or self.sampler).logprobs(self.probe, start=1)).logprobs)

    def rl(self, which: int, *, scale: float = 1.0, ratios: Sequence[float] = RATIOS) -> Datum:
        """Datum whose behaviour logprobs make the trainer's ratio go through `ratios`."""
        completion = self.completions[which]
        length = len(completion.tokens)
        shift = [math.log(ratios[i % len(ratios)]) for i in range(length)]
        return Datum(
            tokens=(*self.prompt, *completion.tokens),
            start=len(self.prompt),
            logprobs=tuple(z - s for z, s in zip(completion.logprobs, shift, strict=True)),
            advantages=tuple(scale * 0.05 * (2 - i % 4 or 1) for i in range(length)),
        )

    def soft(self, which: int, *columns: int) -> Datum:
        """Datum with signed weights at targets; column k is another token id and weight for every
        row."""
        datum, size = self.rl(which), self.backend.vocabulary
        rows = range(len(datum.tokens) - datum.start)
        return Datum(
            tokens=datum.tokens,
            start=datum.start,
            targets=tuple(tuple((7 * i + 11 * k + 3) % size for k in columns) for i in rows),
            weights=tuple(tuple(0.04 * (k + 1) * (-1) ** (i + k) for k in columns) for i in rows),
        )

    def near(self, values: Sequence[float]) -> Any:
        return pytest.approx(list(values), abs=2 * self.backend.tolerance)

    def far(self, one: Sequence[float], other: Sequence[float]) -> bool:
        """Whether two values differ by much more than backends round."""
        gap = max(abs(a - b) for a, b in zip(one, other, strict=True))
        return gap > 50 * self.backend.tolerance
