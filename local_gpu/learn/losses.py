"""Sequences with their losses, and Tinker's loss functions.

A `LossRecord` is one sequence with its loss, in the form that the optimizer computes.

The gateway's `Datum` and Tinker's wire datum are both converted to it, so both give the same
numbers.

Rule: a record is checked before any forward pass; nothing in it is padded or cut.

Shapes: N = tokens that go through the body, R = rows that are scored (the last R of N), K = ids
per row.

The loss functions are Tinker's: sums over tokens. Rule: pure functions of the trainer's logprobs.
Normalisation is already in the advantages and weights, so a result does not depend on how a batch
was split. Source: Tinker's documentation (tinker-docs.thinkingmachines.ai, "Loss functions").

Notation: z = trainer logprobs (they carry the gradient), q = behaviour logprobs, A = advantages,
rho = exp(z - q); all of shape (M,), float32, nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from tinker_claw.errors import AlignmentError, StepError
from tinker_claw.types import Datum, Images, LossPass


@dataclass(frozen=True, slots=True)
class LossRecord:
    """Tokens in, ids to score after each of the last R of them, and their loss."""

    loss: Loss
    config: Config
    """Checked and complete, by `Loss.config`."""
    inputs: Tensor
    """(N,) int64."""
    ids: Tensor
    """(R, K) int64; row r is predicted by position N - R + r."""
    learns_from: int
    """Rows before it are scored without gradient; R means that none learns."""
    inputs_of_loss: LossInputs
    """Arrays over the rows from `learns_from` on."""
    loss_column: int = 0
    """The loss reads the columns from here on; before them are ids that are only reported."""
    images: Images = ()
    """Images among the inputs."""

    @property
    def scored_from(self) -> int:
        """The position whose row is the first that is scored."""
        return len(self.inputs) - len(self.ids)


@dataclass(frozen=True, slots=True)
class Scored:
    """Loss and logprobs of one record."""

    loss: float
    logprobs: Tensor
    """(R, K) float32, nats, on the CPU, before the step."""


def records_of(
    passes: Sequence[LossPass], *, vocabulary: int, context_tokens: int
) -> list[list[LossRecord]]:
    """Check the passes of a step and convert them; return the records of each.

    Raises:
        StepError, AlignmentError: naming what is wrong.
    """
    if not any(loss_pass.datums for loss_pass in passes):
        raise StepError("The step has no datums.")
    records = list[list[LossRecord]]()
    for loss_pass in passes:
        loss = loss_named(loss_pass.loss)
        config = loss.config(loss_pass.config)
        for datum in loss_pass.datums:
            loss.check(datum)
            _check_ids(datum, vocabulary, context_tokens)
        records.append([_record(loss, config, datum) for datum in loss_pass.datums])
    return records


def loss_named(name: str) -> Loss:
    """Return a loss. Raises StepError for one that is not computed here."""
    if name not in LOSSES:
        raise StepError(f"Unknown loss {name!r}; there are {', '.join(sorted(LOSSES))}.")
    return LOSSES[name]


def _check_ids(datum: Datum, vocabulary: int, context_tokens: int) -> None:
    ids = (*datum.tokens, *(i for row in datum.targets for i in row))
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise StepError(f"A datum has an id outside 0..{vocabulary - 1}.")
    if len(datum.tokens) > context_tokens:
        raise StepError(
            f"A datum has {len(datum.tokens)} tokens; the context has {context_tokens}."
        )


def _record(loss: Loss, config: Config, datum: Datum) -> LossRecord:
    """The sampled tokens are column 0, because the report gives their logprobs."""
    tokens = torch.tensor(datum.tokens)
    ids = tokens[datum.start :, None]
    if datum.targets:
        ids = torch.cat([ids, torch.tensor(datum.targets)], dim=1)
    return LossRecord(
        loss,
        config,
        inputs=tokens[:-1],
        ids=ids,
        learns_from=0,
        inputs_of_loss=LossInputs.of(datum),
        loss_column=1 if loss.by_candidate and datum.targets else 0,
        images=datum.images,
    )


Config = Mapping[str, float]
_LOW: Final = "clip_low_threshold"
_HIGH: Final = "clip_high_threshold"
"""Absolute bounds on a ratio."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The arrays of one datum as tensors; an array that the datum lacks is None."""

    behaviour: Tensor | None
    """(M,) q."""
    advantages: Tensor | None
    """(M,) A."""
    weights: Tensor | None
    """(M, K) signed weights for cross_entropy."""

    @classmethod
    def of(cls, datum: Datum) -> LossInputs:
        def tensor(rows: object) -> Tensor | None:
            return torch.tensor(rows, dtype=torch.float32) if rows else None

        return cls(tensor(datum.logprobs), tensor(datum.advantages), tensor(datum.weights))

    def to(self, device: torch.device) -> LossInputs:
        rows = (self.behaviour, self.advantages, self.weights)
        return LossInputs(*(None if row is None else row.to(device) for row in rows))


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss together with what it needs, so that a mistake is named before any forward pass."""

    name: str
    compute: Callable[[Tensor, LossInputs, Config], Tensor]
    """(M,) logprobs, or (M, K) at the targets for cross_entropy -> scalar sum."""
    arrays: tuple[str, ...]
    """Datum arrays that must be there."""
    defaults: Config = field(default_factory=dict[str, float])
    """Keys that the config may have, with their values unless it has others."""

    @property
    def by_candidate(self) -> bool:
        """Return whether it has a weight for each candidate, not one for each token."""
        return "weights" in self.arrays

    def config(self, settings: Config) -> Config:
        """Return a config with the defaults of what it lacks.

        Raises:
            StepError: naming an unknown key, or bounds that cross.
        """
        if unknown := sorted(set(settings) - set(self.defaults)):
            keys = ", ".join(sorted(self.defaults)) or "no settings"
            raise StepError(
                f"loss {self.name}: unknown config key {unknown[0]!r}; it takes {keys}."
            )
        config = {**self.defaults, **settings}
        if _LOW in config and not 0.0 <= config[_LOW] <= config[_HIGH]:
            raise StepError(
                f"{_LOW} {config[_LOW]:g} and {_HIGH} {config[_HIGH]:g} are absolute ratios, "
                "low at most high."
            )
        return config

    def check(self, datum: Datum) -> None:
        """Raise StepError naming a missing array."""
        if missing := [a for a in self.arrays if not getattr(datum, a, ())]:
            raise StepError(f"loss {self.name}: the datum has no {missing[0]}.")
        if self.by_candidate:
            widths = {len(row) for row in datum.weights}
            wanted = {len(row) for row in datum.targets} or {1}
            if widths != wanted or len(widths) != 1:
                raise AlignmentError(
                    f"loss {self.name}: weights {widths} and targets {wanted} wide"
                )


def ppo(logprobs: Tensor, inputs: LossInputs, config: Config) -> Tensor:
    """-sum_t min(rho_t A_t, clamp(rho_t, low, high) A_t).

    No gradient where the clamp binds and makes the objective smaller: A > 0 and rho > high, or
    A < 0 and rho < low. Unbounded for A < 0 and large rho.
    """
    behaviour, advantages = _rl(inputs)
    ratio = (logprobs - behaviour).exp()
    clipped = ratio.clamp(config[_LOW], config[_HIGH])
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def importance_sampling(logprobs: Tensor, inputs: LossInputs, config: Config) -> Tensor:
    """-sum_t rho_t A_t."""
    behaviour, advantages = _rl(inputs)
    return -((logprobs - behaviour).exp() * advantages).sum()


def cross_entropy(logprobs: Tensor, inputs: LossInputs, config: Config) -> Tensor:
    """-sum_{t,v} w_tv z_tv over (M, K) targets; weights are signed and need not sum to one."""
    assert inputs.weights is not None
    return -(logprobs * inputs.weights).sum()


def _rl(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Both arrays of a reinforcement loss, which were checked to be there."""
    assert inputs.behaviour is not None
    assert inputs.advantages is not None
    return inputs.behaviour, inputs.advantages


_RL_ARRAYS: Final = ("logprobs", "advantages")

LOSSES: Final[Mapping[str, Loss]] = MappingProxyType(
    {
        loss.name: loss
        for loss in (
            Loss("ppo", ppo, _RL_ARRAYS, {_LOW: 0.8, _HIGH: 1.28}),
            Loss("importance_sampling", importance_sampling, _RL_ARRAYS),
            Loss("cross_entropy", cross_entropy, ("weights",)),
        )
    }
)
"""Of a row whose weights or advantage are zero none adds loss or gradient."""
