"""The advantages with which a step trained a sample, told again from what the step recorded.

Rule: computed by the functions that the methods use, so this cannot say anything else than they
did. What hangs on the weights of that time (the correction of a stale sample, the pull towards the
base) is not known any more, and is left out. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinker_claw.config import Training
from tinker_claw.ledger.history import SampleHistory
from tinker_claw.methods import Method
from tinker_claw.methods.advantages import reward_advantages, token_advantages, topk_advantages
from tinker_claw.types import Completion, HintScores


@dataclass(frozen=True, slots=True)
class Advantages:
    """Of one sample, before normalisation by its length; weights of the method included."""

    reward: float | None
    """Of every token; None: the sample has no reward, or the method takes none."""
    distill: float | None
    """Mean over tokens of |A|, summed over candidates; None: no teacher was asked."""
    bounded: float | None
    """Share of the differences between teacher and student that --opd-clip cut to its bound."""


def advantages(
    sample: SampleHistory, done: Completion, method: Method, cfg: Training
) -> Advantages:
    """Those of a sample that a step has trained.

    Args:
        sample: with the rewards of its step.
        cfg: the rule that the step recorded.
    """
    weights = method.weights(cfg)
    reward = distill = bounded = None
    if weights.reward and sample.reward is not None:
        # Samples of one batch with equal rewards have equal advantages.
        at = sample.rewards.index(sample.reward)
        reward = weights.reward * reward_advantages(sample.rewards, cfg.baseline)[at]
    if weights.distill and sample.teacher is not None:
        rows = _rows(sample.teacher, done, cfg, cfg.opd_clip)
        free = _rows(sample.teacher, done, cfg, 0.0)
        distill = weights.distill * sum(abs(a) for row in rows for a in row) / len(rows)
        cut = [a != b for x, y in zip(rows, free, strict=True) for a, b in zip(x, y, strict=True)]
        bounded = sum(cut) / len(cut)
    return Advantages(reward, distill, bounded)


def _rows(
    teacher: HintScores, done: Completion, cfg: Training, clip: float
) -> list[Sequence[float]]:
    """One row of advantages per sampled token. `clip`: 0 for none."""
    if cfg.opd_mode == "token":
        return [[a] for a in token_advantages(teacher.logprobs, done.logprobs, clip)]
    return [
        topk_advantages(scored, own, clip)
        for scored, own in zip(teacher.targets, done.topk_logprobs, strict=True)
    ]
