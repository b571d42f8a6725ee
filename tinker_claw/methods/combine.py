"""Combine: rewards and hints in one step, each with its own clip."""

from __future__ import annotations

from collections.abc import Sequence

from tinker_claw.config import Training
from tinker_claw.methods.base import no_reward, reward_of
from tinker_claw.methods.passes import BatchItem, Weights, build_passes
from tinker_claw.types import LossPass, MethodName, Verdict


class Combine:
    """A sample may carry a reward, a hint, or both; what it lacks adds no gradient."""

    name: MethodName = "combine"
    wants_hints = True

    def refuses(self, verdict: Verdict, hints: Sequence[str]) -> str | None:
        return None if hints or reward_of(verdict) else f"{no_reward(verdict)}, no hint"

    def weights(self, cfg: Training) -> Weights:
        return Weights(reward=cfg.w_rl, distill=cfg.w_opd)

    def passes(self, items: Sequence[BatchItem], cfg: Training) -> list[LossPass]:
        return build_passes(items, self.weights(cfg), cfg)
