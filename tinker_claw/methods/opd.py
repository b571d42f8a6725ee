"""OPD: on-policy distillation from the model that was told, in hindsight, what the user wanted."""

from __future__ import annotations

from collections.abc import Sequence

from tinker_claw.config import Training
from tinker_claw.methods.passes import BatchItem, Weights, build_passes
from tinker_claw.types import LossPass, MethodName, Verdict


class Opd:
    """Hints only. A verdict alone teaches nothing here, and its reward is not used."""

    name: MethodName = "opd"
    wants_hints = True

    def refuses(self, verdict: Verdict, hints: Sequence[str]) -> str | None:
        return None if hints else "no hint"

    def weights(self, cfg: Training) -> Weights:
        return Weights(reward=0.0, distill=1.0)

    def passes(self, items: Sequence[BatchItem], cfg: Training) -> list[LossPass]:
        return build_passes(items, self.weights(cfg), cfg)
