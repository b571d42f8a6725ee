"""Limit how far one step moves the policy.

How far a step moved the policy (`moved`) is measured on the tokens of the batch before the
candidate serves; a step that goes too far is taken again at half the rate. A bound on advantages
would not help: Adam divides scale out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from tinker_claw.errors import TooFarError
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.scoring import score_all
from tinker_claw.ledger.versions import TOO_FAR
from tinker_claw.methods.passes import BatchItem
from tinker_claw.policy import Sampler
from tinker_claw.types import Sample


@dataclass(frozen=True, slots=True)
class Held:
    """Why learning is held."""

    because: str
    """Sentences without the last full stop."""
    until: float | None = None
    """When it ends by itself, in seconds since 1970; None: not before new replies end it."""


# How far a step moves the policy

RATES = (1.0, 0.5, 0.25)
"""Shares of the learning rate at which a step is tried, in order."""
_UNTAUGHT = 0.25
"""Share of the rate for a batch whose verdicts agree, and that has no hint."""
AFTER_REFUSAL = 0.25
"""Share of the rate for a step whose optimizer starts anew: Adam's first step is its largest."""
_IMPOSSIBLE = -50.0
"""Lowest logprob, in nats; replaces lower ones, so that every figure is finite."""
_CERTAIN = 1e-9
"""Least probability left for all other tokens."""


def moved(before_T: Sequence[float], after_T: Sequence[float]) -> float:
    """Return how far a policy has moved on some tokens, in nats per token, never below 0.

    With p and q the probability of a token before and after: the mean of
    p log(p / q) + (1 - p) log((1 - p) / (1 - q)), which is KL(before || after) between that token
    and all others together, and never more than the whole KL at that place. It needs no more than
    the logprobs of the tokens, however they were drawn. Over 53 steps of the demo it was 0.7 of the
    KL between the 20 likeliest tokens and the rest. The k3 estimator, exp(d) - 1 - d, has no bias,
    and was up to 35 times that, by single tokens that had become likely.

    Args:
        before_T: (T,) logprobs under the version that serves.
        after_T: (T,) of the same tokens under the candidate.
    """
    return fmean(_apart(b, a) for b, a in zip(before_T, after_T, strict=True))


def _apart(before: float, after: float) -> float:
    before, after = max(before, _IMPOSSIBLE), max(after, _IMPOSSIBLE)
    rest, rest_after = (max(-math.expm1(min(x, 0.0)), _CERTAIN) for x in (before, after))
    return max(0.0, math.exp(before) * (before - after) + rest * math.log(rest / rest_after))


def trust(batch: Sequence[Sample]) -> float:
    """Return the share of the rate that a batch is worth: all of it where its verdicts differ, or
    reject a reply that was cut.

    Where they agree, only hints say what would be better. As a weight the share would do nothing:
    Adam divides scale out.
    """
    if len({s.reward for s in batch} - {None}) > 1:
        return 1.0
    if any(s.bucket is not None or (s.cut and (s.reward or 0) < 0) for s in batch):
        return 1.0
    return 1.0 if any(s.teacher for s in batch) else _UNTAUGHT


# In a run

_FAR_IN_VAIN = 2 * len(RATES)
"""Steps in a row that were void for going too far: two batches, at every rate."""
AGAIN_S = 3600.0
"""Seconds after which a batch is tried again, where earlier ones were refused."""
LATER = "The next batch is tried an hour later; after `tinker-claw rollback vN` at once"
"""How a hold ends that has a time."""


class Guard:
    """Watches the steps of one run."""

    def __init__(self, parts: LoopParts, *, every: int = 1) -> None:
        """Set up the guard of a run.

        Args:
            every: measure every n-th step; a service bills the scoring of the candidate.
        """
        self._parts = parts
        self._most = parts.training.max_step_kl
        self._every = every

    def measures(self, step: int) -> bool:
        """Return whether step number `step` of the lineage is measured."""
        return self._most > 0 and (step - 1) % self._every == 0

    async def admit(self, items: Sequence[BatchItem], candidate: Sampler) -> float:
        """Check the candidate; return how far it has moved on the batch, in nats per token.

        Raises:
            TooFarError: it has moved further than one step may.
        """
        scores = await score_all([item.sample for item in items], candidate)
        before = [(item.current or item.sample.completion).logprobs for item in items]
        after = [score.logprobs for score in scores]
        if (found := moved([*chain(*before)], [*chain(*after)])) > self._most:
            told = f"{found:.3g} nats per token on its batch, and --max-step-kl is {self._most:g}"
            raise TooFarError(f"{TOO_FAR}: {told}")
        return found

    def held(self) -> Held | None:
        """Return why no further step is taken; None: one may be."""
        far = self._parts.ledger.steps.void_lately(TOO_FAR)
        if len(far) < _FAR_IN_VAIN or not is_recent(far[-1][1]):
            return None
        told = "Two batches in a row moved the policy too far, even at a quarter of the rate"
        return Held(f"{told}. {LATER}", far[-1][1] + AGAIN_S)


def is_recent(at: float) -> bool:
    """Return whether a step that was void at this time, in seconds since 1970, still counts."""
    return time.time() - at < AGAIN_S
