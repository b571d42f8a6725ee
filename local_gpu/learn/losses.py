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
from dataclasses import dataclass, field
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
    """Checked and complete, by `Loss.config`."""


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
    found: list[RecordPass] = []
    for name, datums, given in ((p.loss, p.datums, p.config) for p in passes):
        check_loss(name)
        config = LOSSES[name].config(name, given)
        for datum in datums:
            LOSSES[name].check(name, datum)
            _check_ids(datum, vocabulary, context_tokens)
        found.append(RecordPass(name, tuple(_record(name, datum) for datum in datums), config))
    return found


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
    defaults: Config = field(default_factory=dict[str, float])
    """Keys that the config may have, with their values unless it has others."""
    silent_at_zero: bool = True
    """A row whose weights or advantage are zero adds neither loss nor gradient."""

    def config(self, name: str, given: Config) -> Config:
        """Return a config with the defaults of what it lacks.

        Raises:
            StepError: naming an unknown key, or bounds that cross.
        """
        if unknown := sorted(set(given) - set(self.defaults)):
            known = ", ".join(sorted(self.defaults)) or "no settings"
            raise StepError(f"loss {name}: unknown config key {unknown[0]!r}; it takes {known}.")
        config = {**self.defaults, **given}
        if _LOW in config and not 0.0 <= config[_LOW] <= config[_HIGH]:
            raise StepError(
                f"{_LOW} {config[_LOW]:g} and {_HIGH} {config[_HIGH]:g} are absolute ratios, "
                "low at most high."
            )
        return config

    def check(self, name: str, datum: Datum) -> None:
        """Raise StepError naming a missing array."""
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
    clipped = ratio.clamp(config[_LOW], config[_HIGH])
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def importance_sampling(logprobs: Tensor, inputs: LossInputs, config: Config) -> Tensor:
    """-sum_t rho_t A_t."""
    behaviour, advantages = _rl(inputs)
    return -((logprobs - behaviour).exp() * advantages).sum()


def cispo(logprobs: Tensor, inputs: LossInputs, config: Config) -> Tensor:
    """-sum_t stop_gradient(clamp(rho_t, low, high)) A_t z_t: every token keeps a gradient."""
    behaviour, advantages = _rl(inputs)
    ratio = (logprobs - behaviour).exp().clamp(config[_LOW], config[_HIGH])
    return -(ratio.detach() * advantages * logprobs).sum()


def gspo(logprobs: Tensor, inputs: LossInputs, config: Config) -> Tensor:
    """-sum_t min(s_t A_t, clamp(s_t, low, high) A_t), s_t = s exp(z_t - stop_gradient(z_t)).

    s = exp(mean of z_t - q_t over the tokens that the mask marks), without gradient: one ratio for
    the sequence, a gradient for each token. The bounds are absolute and 1 - 3e-4, 1 + 4e-4 unless
    set. Source: Tinker's page on GSPO; GSPO-token of arXiv 2507.18071, equations 13 and 14. The
    bounds unless set are the paper's (section 5.1), because what of that page could be read gives
    none.
    """
    behaviour, advantages = _rl(inputs)
    assert inputs.ratio_mask is not None
    marked = inputs.ratio_mask != 0
    drift = torch.where(marked, logprobs.detach() - behaviour, 0.0).sum() / marked.sum().clamp(1)
    ratio = (drift + logprobs - logprobs.detach()).exp()
    clipped = ratio.clamp(config[_LOW], config[_HIGH])
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def cross_entropy(logprobs: Tensor, inputs: LossInputs, config: Config) -> Tensor:
    """-sum_{t,v} w_tv z_tv over (M, K) targets; weights are signed and need not sum to one."""
    assert inputs.weights is not None
    return -(logprobs * inputs.weights).sum()


def dro(logprobs: Tensor, inputs: LossInputs, config: Config) -> Tensor:
    """-sum_t (z_t A_t - beta/2 (z_t - q_t)^2): the quadratic term acts at A = 0 too."""
    behaviour, advantages = _rl(inputs)
    drift = (logprobs - behaviour).square()
    return -(logprobs * advantages - 0.5 * config["beta"] * drift).sum()


def _rl(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Both arrays of a reinforcement loss, which were checked to be there."""
    assert inputs.behaviour is not None
    assert inputs.advantages is not None
    return inputs.behaviour, inputs.advantages


_CLIPPED: Final = {_LOW: 0.8, _HIGH: 1.28}
_RL_ARRAYS: Final = ("logprobs", "advantages")

LOSSES: Final[Mapping[str, Loss]] = MappingProxyType(
    {
        "ppo": Loss(ppo, _RL_ARRAYS, _CLIPPED),
        "importance_sampling": Loss(importance_sampling, _RL_ARRAYS),
        "cispo": Loss(cispo, _RL_ARRAYS, _CLIPPED),
        "gspo": Loss(gspo, (*_RL_ARRAYS, "sequence_ratio_mask"), {_LOW: 1 - 3e-4, _HIGH: 1 + 4e-4}),
        "cross_entropy": Loss(cross_entropy, ("weights",)),
        "dro": Loss(dro, _RL_ARRAYS, {"beta": 0.05}, silent_at_zero=False),
    }
)
