"""One sequence with its loss, in the form that the optimizer computes.

The gateway's `Datum` and Tinker's wire datum both become this record, so that both roads give the
same numbers.

Rule: a record is checked before any forward pass; nothing in it is padded or cut.

Shapes: N = tokens that go through the body, R = rows that are scored (the last R of N), K = ids
per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from local_gpu.learning.losses import LOSSES, LossInputs
from tinker_claw.errors import StepError
from tinker_claw.types import Datum, LossPass


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
    """What one record gave."""

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
    )
