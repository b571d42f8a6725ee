"""Figures of one step, and by which rule its samples got their advantages. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tinker_claw.config import Training
from tinker_claw.learner.agreement import Agreement, figures
from tinker_claw.methods import BatchItem
from tinker_claw.types import LossPass, StepReport

_RULE = {
    *("w_rl", "w_opd", "opd_mode", "opd_topk", "opd_clip"),
    *("baseline", "norm", "clip_low", "clip_high", "kl_beta"),
}


def step_rule(method: str, cfg: Training) -> dict[str, Any]:
    """Settings that later runs may change, and without which advantages cannot be told again."""
    return {"method": method, **cfg.model_dump(include=_RULE)}


def step_metrics(
    items: Sequence[BatchItem],
    passes: Sequence[LossPass],
    report: StepReport,
    current_step: int,
    agreed: Agreement | None,
) -> dict[str, Any]:
    """What a reader of the log wants to know of a step.

    `clip_share` is the share of the ppo tokens whose gradient the ratio's bounds cut off; None
    without such tokens. `agreed`: trainer against sampler, over tokens of fresh samples.
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
        "clip_share": _clip_share(passes, report),
        **figures(agreed),
    }


def _clip_share(passes: Sequence[LossPass], report: StepReport) -> float | None:
    cut = list(_cut(passes, report))
    return sum(cut) / len(cut) if cut else None


def _cut(passes: Sequence[LossPass], report: StepReport) -> Iterator[bool]:
    """Of each ppo token whether the clipped objective has no gradient there."""
    for one_pass, rows in zip(passes, report.logprobs, strict=True):
        if one_pass.loss != "ppo":
            continue
        low = one_pass.config["clip_low_threshold"]
        high = one_pass.config["clip_high_threshold"]
        for datum, row in zip(one_pass.datums, rows, strict=True):
            for advantage, now, then in zip(datum.advantages, row, datum.logprobs, strict=True):
                if advantage:
                    ratio = math.exp(now - then)
                    yield ratio > high if advantage > 0 else ratio < low
