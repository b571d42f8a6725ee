"""Sequences with their losses, and Tinker's loss functions.

A `LossRecord` is one sequence with its loss, in the form that the optimizer computes.

The gateway's `Datum` and Tinker's wire datum are both converted to it, so both give the same
numbers.

Rule: a record is checked before any forward pass; nothing in it is padded or cut.

Shapes: N = tokens that go through the body, R = rows that are scored (the last R of N), K = ids
per row.

The loss functions are Tinker's: sums over tokens. Rule: pure functions of the trainer's logprobs.
Normalisation is already in the advantages and weights, so a result does not depend on how a batch
was split. Source: Tinker's documentation (tinker-docs.thinkingmachines.ai, "Loss functions" and its
page on GSPO). Its page on StableReinforce says what a client sends and not what is minimised, so
that one is refused.

Notation: z = trainer logprobs (they carry the gradient), q = behaviour logprobs, A = advantages,
rho = exp(z - q); all of shape (M,), float32, nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from tinker_claw.errors import AlignmentError, StepError
from tinker_claw.types import Datum, Images, LossPass


@dataclass(frozen=True, slots=True)
class LossRecord:
    """Tokens in, ids to score after each of the last R of them, and what the loss needs."""

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
class RecordPass:
    """Records of one loss. Gradients of all passes of a step add up."""

    loss: str
    """A key of `LOSSES`."""
    records: tuple[LossRecord, ...]
    config: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Scored:
    """Loss and logprobs of one record."""

    loss: float
    logprobs: Tensor
    """(R, K) float32, nats, on the CPU, before the step."""


def records_of(
    passes: Sequence[LossPass], *, vocabulary: int, context_tokens: int
) -> list[RecordPass]:
    """Check the passes of a step and convert them.

    Raises:
        StepError, AlignmentError: naming what is wrong.
    """
    if not any(loss_pass.datums for loss_pass in passes):
        raise StepError("The step has no datums.")
    for loss_pass in passes:
        check_loss(loss_pass.loss)
        for datum in loss_pass.datums:
            LOSSES[loss_pass.loss].check(loss_pass.loss, datum, loss_pass.config)
            _check_ids(datum, vocabulary, context_tokens)
    return [
        RecordPass(p.loss, tuple(_record(p.loss, datum) for datum in p.datums), p.config)
        for p in passes
    ]


def check_loss(name: str) -> None:
    """Raise StepError for a loss that is not computed here."""
    if name == "stable_reinforce":
        raise StepError(
            "stable_reinforce is not computed here: what Tinker's service minimises under that "
            "name, from what it records while sampling, is not published. Take loss_fn=gspo, ppo, "
            "cispo or importance_sampling."
        )
    if name not in LOSSES:
        raise StepError(f"Unknown loss {name!r}; there are {', '.join(sorted(LOSSES))}.")


def _check_ids(datum: Datum, vocabulary: int, context_tokens: int) -> None:
    named = (*datum.tokens, *(i for row in datum.targets for i in row))
    if min(named) < 0 or max(named) >= vocabulary:
        raise StepError(f"A datum has an id outside 0..{vocabulary - 1}.")
    if len(datum.tokens) > context_tokens:
        raise StepError(
            f"A datum has {len(datum.tokens)} tokens; the context has {context_tokens}."
        )


def _record(loss: str, datum: Datum) -> LossRecord:
    """The sampled tokens are column 0, because the report gives their logprobs."""
    tokens = torch.tensor(datum.tokens)
    ids = tokens[datum.start :, None]
    if datum.targets:
        ids = torch.cat([ids, torch.tensor(datum.targets)], dim=1)
    return LossRecord(
        inputs=tokens[:-1],
        ids=ids,
        learns_from=0,
        inputs_of_loss=LossInputs.of(datum),
        loss_column=1 if loss == "cross_entropy" and datum.targets else 0,
        images=datum.images,
    )


CLIP_LOW: Final = 0.8
CLIP_HIGH: Final = 1.28
"""Absolute bounds on the ratio."""

GSPO_LOW: Final = 1 - 3e-4
GSPO_HIGH: Final = 1 + 4e-4
"""Bounds on a sequence's ratio: those of the paper (arXiv 2507.18071, section 5.1)."""

DRO_BETA: Final = 0.05

Config = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The arrays of one datum as tensors; an array that the datum lacks is None."""

    behaviour: Tensor | None
    """(M,) q."""
    advantages: Tensor | None
    """(M,) A."""
    weights: Tensor | None
    """(M, K) signed weights for cross_entropy."""
    ratio_mask: Tensor | None = None
    """(M,) not 0 where a token belongs to gspo's sequence ratio."""

    @classmethod
    def of(cls, datum: Datum) -> LossInputs:
        def tensor(rows: object) -> Tensor | None:
            return torch.tensor(rows, dtype=torch.float32) if rows else None

        return cls(tensor(datum.logprobs), tensor(datum.advantages), tensor(datum.weights))

    def to(self, device: torch.device) -> LossInputs:
        rows = (self.behaviour, self.advantages, self.weights, self.ratio_mask)
        return LossInputs(*(None if row is None else row.to(device) for row in rows))


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss together with what it needs, so that a mistake is named before any forward pass."""

    compute: Callable[[Tensor, LossInputs, Config], Tensor]
    """(M,) logprobs, or (M, K) at the targets for cross_entropy -> scalar sum."""
    arrays: tuple[str, ...]
    """Datum arrays that must be there."""
    keys: frozenset[str] = frozenset()
    """Keys that the config may have."""
    silent_at_zero: bool = True
    """A row whose weights or advantage are zero adds neither loss nor gradient."""

    def check_config(self, name: str, config: Config) -> None:
        if unknown := sorted(set(config) - self.keys):
            known = ", ".join(sorted(self.keys)) or "no settings"
            raise StepError(f"loss {name}: unknown config key {unknown[0]!r}; it takes {known}.")

    def check(self, name: str, datum: Datum, config: Config) -> None:
        """Raise StepError naming a missing array or an unknown key."""
        self.check_config(name, config)
        if missing := [a for a in self.arrays if not getattr(datum, a, ())]:
            raise StepError(f"loss {name}: the datum has no {missing[0]}.")
        if "weights" in self.arrays:
            widths = {len(row) for row in datum.weights}
            wanted = {len(row) for row in datum.targets} or {1}
            if widths != wanted or len(widths) != 1:
                raise AlignmentError(f"loss {name}: weights {widths} and targets {wanted} wide")


def ppo(logprobs: Tensor, inputs: LossInputs, config: Config) -> Tensor:
    """-sum_t min(rho_t A_t, clamp(rho_t, low, high) A_t).

    No gradient where the clamp binds and makes the objective smaller: A > 0 and rho > high, or
    A < 0 and rho < low. Unbounded for A < 0 and large rho.
    """
    behaviour, advantages = _rl(inputs)
    ratio = (logprobs - behaviour).exp()
    clipped = ratio.clamp(*_bounds(config))
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def importance_sampling(logprobs: Tensor, inputs: LossInputs, config: Config) -> Tensor:
    """-sum_t rho_t A_t."""
    behaviour, advantages = _rl(inputs)
    return -((logprobs - behaviour).exp() * advantages).sum()


def cispo(logprobs: Tensor, inputs: LossInputs, config: Config) -> Tensor:
    """-sum_t stop_gradient(clamp(rho_t, low, high)) A_t z_t: every token keeps a gradient."""
    behaviour, advantages = _rl(inputs)
    ratio = (logprobs - behaviour).exp().clamp(*_bounds(config))
    return -(ratio.detach() * advantages * logprobs).sum()


def gspo(logprobs: Tensor, inputs: LossInputs, config: Config) -> Tensor:
    """-sum_t min(s_t A_t, clamp(s_t, low, high) A_t), s_t = s exp(z_t - stop_gradient(z_t)).

    s = exp(mean of z_t - q_t over the tokens that the mask marks), without gradient: one ratio for
    the sequence, a gradient for each token. The bounds are absolute and 1 - 3e-4, 1 + 4e-4 unless
    set. Source: Tinker's page on GSPO; GSPO-token of arXiv 2507.18071, equations 13 and 14. The
    bounds unless set are the paper's, because what of that page could be read gives none.
    """
    behaviour, advantages = _rl(inputs)
    if inputs.ratio_mask is None:
        raise StepError("loss gspo: the datum has no sequence_ratio_mask.")
    marked = inputs.ratio_mask != 0
    drift = torch.where(marked, logprobs.detach() - behaviour, 0.0).sum() / marked.sum().clamp(1)
    ratio = (drift + logprobs - logprobs.detach()).exp()
    clipped = ratio.clamp(*_bounds(config, GSPO_LOW, GSPO_HIGH))
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def cross_entropy(logprobs: Tensor, inputs: LossInputs, config: Config) -> Tensor:
    """-sum_{t,v} w_tv z_tv over (M, K) targets; weights are signed and need not sum to one."""
    if inputs.weights is None:
        raise StepError("loss cross_entropy: the datum has no weights.")
    return -(logprobs * inputs.weights).sum()


def dro(logprobs: Tensor, inputs: LossInputs, config: Config) -> Tensor:
    """-sum_t (z_t A_t - beta/2 (z_t - q_t)^2): the quadratic term acts at A = 0 too."""
    behaviour, advantages = _rl(inputs)
    beta = float(config.get("beta", DRO_BETA))
    return -(logprobs * advantages - 0.5 * beta * (logprobs - behaviour).square()).sum()


def _rl(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    if inputs.behaviour is None or inputs.advantages is None:
        raise StepError("a reinforcement loss needs the datum's logprobs and advantages.")
    return inputs.behaviour, inputs.advantages


def _bounds(config: Config, low: float = CLIP_LOW, high: float = CLIP_HIGH) -> tuple[float, float]:
    """Clip thresholds (low, high) of the config, or else the given defaults."""
    low = float(config.get("clip_low_threshold", low))
    high = float(config.get("clip_high_threshold", high))
    if not 0.0 <= low <= high:
        raise StepError(
            f"clip_low_threshold {low:g} and clip_high_threshold {high:g} are absolute ratios, "
            "low at most high."
        )
    return low, high


_CLIP_KEYS: Final = frozenset({"clip_low_threshold", "clip_high_threshold"})
_RL_ARRAYS: Final = ("logprobs", "advantages")

LOSSES: Final[Mapping[str, Loss]] = MappingProxyType(
    {
        "ppo": Loss(ppo, _RL_ARRAYS, _CLIP_KEYS),
        "importance_sampling": Loss(importance_sampling, _RL_ARRAYS),
        "cispo": Loss(cispo, _RL_ARRAYS, _CLIP_KEYS),
        "gspo": Loss(gspo, (*_RL_ARRAYS, "sequence_ratio_mask"), _CLIP_KEYS),
        "cross_entropy": Loss(cross_entropy, ("weights",)),
        "dro": Loss(dro, _RL_ARRAYS, frozenset({"beta"}), silent_at_zero=False),
    }
)
