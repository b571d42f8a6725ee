"""What a method is: which signals it takes, and how a batch of samples becomes loss passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tinker_claw.config import Training
from tinker_claw.methods.passes import BatchItem, Weights
from tinker_claw.types import LossPass, MethodName, Verdict, Vote


class Method(Protocol):
    """One way to learn. Adding one: a file here, and a line in the registry."""

    name: MethodName
    wants_hints: bool

    def refuses(self, verdict: Verdict, hints: Sequence[str]) -> str | None:
        """Why a turn with this judgement carries no signal, or None when it is a sample."""
        ...

    def weights(self, cfg: Training) -> Weights:
        """How much verdicts and hints count."""
        ...

    def passes(self, items: Sequence[BatchItem], cfg: Training) -> list[LossPass]:
        """The loss passes of one optimizer step over the whole batch."""
        ...


def reward_of(verdict: Verdict) -> Vote | None:
    """+1 or -1; None for a neutral verdict and for no verdict at all."""
    return verdict.value or None


def no_reward(verdict: Verdict) -> str:
    """Why a verdict gives no reward, for the ledger."""
    return "no valid vote" if verdict.value is None else "neutral verdict"
