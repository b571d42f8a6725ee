"""Binary: reinforce what the user accepted, discourage what he rejected."""

from __future__ import annotations

from collections.abc import Sequence

from tinker_claw.config import Training
from tinker_claw.methods.base import no_reward, reward_of
from tinker_claw.methods.passes import BatchItem, Weights, build_passes
from tinker_claw.types import LossPass, MethodName, Verdict


class Binary:
    """Reward only. With baseline = none this is REINFORCE with a clipped ratio."""

    name: MethodName = "binary"
    wants_hints = False

    def refuses(self, verdict: Verdict, hints: Sequence[str]) -> str | None:
        return None if reward_of(verdict) else no_reward(verdict)

    def weights(self, cfg: Training) -> Weights:
        return Weights(reward=1.0, distill=0.0)

    def passes(self, items: Sequence[BatchItem], cfg: Training) -> list[LossPass]:
        return build_passes(items, self.weights(cfg), cfg)
