"""One optimizer step at the service: its parameters, its failures, its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tinker import types as sdk

from tinker_claw.backends.tinker.datums import rows_of
from tinker_claw.backends.tinker.failures import Fault, fault_of, outage, reason
from tinker_claw.errors import AlignmentError, StepError
from tinker_claw.types import Adam, LossPass, StepReport

_NORM: Final = "unclipped_grad_l2:mean"
"""The gradient's norm before clipping, where a server reports it."""


def adam_params(adam: Adam) -> sdk.AdamParams:
    return sdk.AdamParams(
        learning_rate=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        grad_clip_norm=adam.grad_clip_norm,
    )


def raise_failures(results: Mapping[str, Any]) -> None:
    """Raise what failed, by name; an outage only where nothing speaks against the batch."""
    failed = {name: value for name, value in results.items() if isinstance(value, Exception)}
    if not failed:
        return
    told = "; ".join(f"{name}: {reason(error)}" for name, error in failed.items())
    first = next(iter(failed.values()))
    if any(fault_of(error) in (Fault.ASKED, Fault.BROKE) for error in failed.values()):
        raise StepError(f"The step is void: {told}.") from first
    raise outage("a step", told) from first


def report_of(
    passes: Sequence[LossPass],
    outputs: Sequence[sdk.ForwardBackwardOutput],
    stepped: sdk.OptimStepResponse,
    tokens: int,
) -> StepReport:
    metrics = stepped.metrics or {}
    try:
        return StepReport(
            losses=tuple(float(output.metrics["loss:sum"]) for output in outputs),
            logprobs=tuple(
                tuple(
                    rows_of(datum, found["logprobs"])
                    for datum, found in zip(one.datums, output.loss_fn_outputs, strict=True)
                )
                for one, output in zip(passes, outputs, strict=True)
            ),
            grad_norm=float(metrics[_NORM]) if _NORM in metrics else None,
            tokens=tokens,
        )
    except (KeyError, ValueError, AlignmentError) as error:
        raise StepError(f"Tinker's answer to a step is incomplete: {error}.") from error
