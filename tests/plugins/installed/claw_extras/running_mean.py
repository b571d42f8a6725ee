"""Rewards measured from the running mean of their user's earlier ones, which every step saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker_claw.config.settings import Training
from tinker_claw.methods import Method, Signal
from tinker_claw.types import Sample

KEPT = 0.9
"""Share of the old mean that is kept when a reward comes in."""


class RunningMean(Method):
    """A = r - m, then m = 0.9 m + 0.1 r, reply by reply; m is 0 before a user's first."""

    def reply_advantages(
        self, samples: Sequence[Sample], cfg: Training, state: Any
    ) -> tuple[list[float], Any]:
        means, found = dict[str, float](state or {}), list[float]()
        for sample in samples:
            if sample.reward is None:
                found.append(0.0)
                continue
            mean = means.get(sample.user, 0.0)
            found.append(sample.reward - mean)
            means[sample.user] = KEPT * mean + (1 - KEPT) * sample.reward
        return found, means


RUNNING_MEAN = RunningMean(
    "running-mean",
    learns_from="verdicts, against the user's running mean",
    needs=frozenset({Signal.REWARD}),
    reward_weight=1.0,
)
