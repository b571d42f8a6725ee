"""Figures of one step, for the ledger, the metrics file and the event. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker_claw.methods import BatchItem
from tinker_claw.types import LossPass, StepReport


def step_metrics(
    items: Sequence[BatchItem],
    passes: Sequence[LossPass],
    report: StepReport,
    current_step: int,
) -> dict[str, Any]:
    """What a reader of the log wants to know of a step.

    `logprob_gap` is the largest |trainer - sampler| logprob, in nats, over tokens of fresh samples:
    the two must agree, since the same weights produced both.
    """
    rewards = [item.sample.reward for item in items if item.sample.reward is not None]
    staleness = [current_step - item.sample.policy_step for item in items]
    return {
        "samples": len(items),
        "hinted": sum(item.sample.teacher is not None for item in items),
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "staleness_mean": sum(staleness) / len(items),
        "losses": list(report.losses),
        "grad_norm": report.grad_norm,
        "tokens": report.tokens,
        "logprob_gap": _logprob_gap(items, passes, report),
    }


def _logprob_gap(
    items: Sequence[BatchItem], passes: Sequence[LossPass], report: StepReport
) -> float | None:
    fresh = {
        item.sample.prompt + item.sample.completion.tokens: item.sample.completion.logprobs
        for item in items
        if item.current is None
    }
    gaps = [
        abs(trainer - sampler)
        for one_pass, rows in zip(passes, report.logprobs, strict=True)
        for datum, row in zip(one_pass.datums, rows, strict=True)
        for trainer, sampler in zip(row, fresh.get(datum.tokens, row), strict=True)
    ]
    return max(gaps) if gaps else None
