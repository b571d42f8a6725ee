"""Limit how far one step moves the policy, and hold learning that does harm over many steps.

How far a step moved the policy (`moved`) is measured on the tokens of the batch before the
candidate serves; a step that goes too far is taken again at half the rate. A bound on advantages
would not help: Adam divides scale out.

Each user's first replies are compared (`compared`) with the earliest ones since learning began or
was rolled back. Retries are left out, since their verdicts are not comparable. A change counts by
its evidence, a test that stays valid however often one looks (`evidence.Rise`). Users and judge may
also contradict each other (`contradicted`). Learning is held while the evidence is there, and goes
on when it is gone.

Rule: the functions from figures to findings are pure; `Guard` reads the figures from the ledger, so
that they survive a restart. Nothing here stops serving.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import attrgetter
from statistics import fmean
from typing import Any

from tinker_claw.errors import TooFarError
from tinker_claw.evidence import CLAIM, Rate, Rise, TwoRates, odds
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.scoring import score_all
from tinker_claw.ledger.judgements import FirstReply, JudgedReply
from tinker_claw.ledger.versions import TOO_FAR
from tinker_claw.methods.base import HINT
from tinker_claw.methods.passes import BatchItem
from tinker_claw.policy import Sampler
from tinker_claw.telemetry import log
from tinker_claw.types import Sample


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to tell the user."""

    alarm: str
    """Name of the alarm, for metrics."""
    told: str
    """Reason as a sentence without its full stop."""
    holds: bool = False
    """Whether it stops further steps while it lasts."""
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


# How replies change

LIMIT = 200.0
"""Evidence at which learning is held, in odds to 1; from `CLAIM` on it is reported."""
BASELINE = 16
"""First replies of a user with which later ones are compared; a batch has about half as many."""
NEWEST = 256
"""Newest first replies that are compared, and as many of all replies."""
_LONG = 2.0
"""Multiple of the baseline's mean length from which on a reply is long."""
_AGAINST = 0.25
"""Share of verdicts that a user or an auditor may contradict by mistake or by taste."""
FEW = 64
"""Newest replies that show whether a wish is being learned; four batches."""
_UNLEARNED = 0.2
"""Share of them that are good below which it is not."""


FIGURES: Mapping[str, tuple[str, Callable[[FirstReply, float], bool]]] = {
    # A user who gives a hint may have changed their mind, and an outcome says what was wanted.
    "acceptance": (
        "are rejected without a word on what is wanted",
        lambda reply, long: reply.verdict < 0 and not (reply.hinted or reply.episode),
    ),
    "length": (
        f"are not good, and more than {_LONG:.0f} times as long as the first",
        lambda reply, long: reply.verdict <= 0 and reply.tokens > long,
    ),
    "stop": ("are cut by their limit", lambda reply, long: reply.cut),
}
"""Figures of first replies, by alarm: a description, and whether it applies to a reply, given the
number of tokens above which a reply is long."""


def compared(replies: Sequence[FirstReply]) -> Iterator[tuple[str, float, Rate, Rate]]:
    """Compare first replies with the earliest ones of the same user.

    Args:
        replies: oldest first; those of episodes, and those that were told lessons, count as
            other users'.

    Yields:
        Alarm, evidence that its figure has risen above the baseline's, baseline, and later ones.
    """
    whose = attrgetter("user", "episode", "told")
    for _, each in groupby(sorted(replies, key=whose), whose):  # stable: still oldest first
        known = list(each)
        long = _LONG * fmean(reply.tokens for reply in known[:BASELINE])
        for alarm, (_, holds) in FIGURES.items():
            first, newer = (
                [holds(reply, long) for reply in some]
                for some in (known[:BASELINE], known[BASELINE:])
            )
            if newer:
                base, later = (Rate(sum(some), len(some)) for some in (first, newer))
                rise = Rise(base.interval[1])
                for outcome in newer:
                    rise.add(outcome)
                yield alarm, rise.e_value, base, later


def unlearned(verdicts: Sequence[float]) -> Finding | None:
    """Find whether a wish is not being learned: hardly any of the newest replies is good.

    Args:
        verdicts: of replies that were told no lessons, newest first.
    """
    good = Rate(sum(verdict > 0 for verdict in verdicts[:FEW]), len(verdicts[:FEW]))
    if good.of < FEW or good.interval[1] >= _UNLEARNED:
        return None
    told = f"{good.value:.0%} of the newest {FEW} replies were good: this is not being "
    return Finding("unlearned", told + "learned; it needs another model, a lesson or an example")


def praised(replies: Iterable[JudgedReply]) -> Iterable[TwoRates]:
    """Return the shares of good and of other replies that repeat a reply to something else, for
    each user, told lessons or not. A user who praises one sentence may get it for everything.

    Args:
        replies: oldest first.
    """
    found = defaultdict[Any, TwoRates](lambda: TwoRates(Rate(), Rate()))
    openings = dict[Any, str]()
    for one in replies:
        who = one.user, one.told
        alike = openings.setdefault((who, one.text), one.opening) != one.opening
        (found[who].a if one.verdict > 0 else found[who].b).add(alike)
    return found.values()


def contradicted(opinions: Sequence[tuple[float, float]]) -> tuple[float, Rate]:
    """Return the evidence that more of the judge's verdicts are contradicted than mistakes explain,
    and the share that is. `opinions`: newest first, the judge's and another's, each from -1 to 1.
    """
    rise, share = Rise(_AGAINST), Rate()
    for own, other in reversed(opinions):
        if own * other:
            rise.add(own * other < 0)
            share.add(own * other < 0)
    return rise.e_value, share


# In a run

_FAR_IN_VAIN = 2 * len(RATES)
"""Steps in a row that were void for going too far: two batches, at every rate."""
AGAIN_S = 3600.0
"""Seconds after which a batch is tried again, where earlier ones were refused."""


class Guard:
    """Watches the steps and replies of one run."""

    def __init__(self, parts: LoopParts, *, every: int = 1) -> None:
        """Set up the guard of a run.

        Args:
            every: measure every n-th step; a service bills the scoring of the candidate.
        """
        self._parts = parts
        self._most = parts.training.max_step_kl
        self._every = every
        self._told = frozenset[tuple[str, bool]]()
        """Findings already logged."""

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

    def look(self, also: Sequence[Finding] = ()) -> list[Finding]:
        """Return the findings, and report them to health and log.

        Args:
            also: findings of the gate.
        """
        found = [*self._findings(), *also]
        self._parts.health.guard_is([one.told for one in found])
        now = frozenset((one.alarm, one.holds) for one in found)
        for one in found:
            if (one.alarm, one.holds) not in self._told:
                log.warning("guard.alarm", alarm=one.alarm, holds=one.holds, told=one.told)
        self._told = now
        return found

    @property
    def alarms(self) -> dict[str, bool]:
        """Alarms of the last `look`, for the metrics of a step; True: it holds learning."""
        return dict(sorted(self._told))

    def _findings(self) -> Iterator[Finding]:
        ledger = self._parts.ledger
        after = ledger.hold.guarded_from
        lately = ledger.judgements.replies(NEWEST, after)
        # The gravest claim of each alarm, over all users.
        gravest = {one[1]: one for one in sorted(self._claims(lately, after))}
        for evidence, alarm, told in gravest.values():
            if evidence >= CLAIM:
                told = f"{told} ({odds(evidence)}; learning is held at {LIMIT:.0f})"
                yield Finding(alarm, told, evidence >= LIMIT)
        if found := unlearned([one.verdict for one in lately if not one.told]):
            yield found
        far = ledger.steps.void_lately(TOO_FAR)
        if len(far) >= _FAR_IN_VAIN and is_recent(far[-1][1]):
            told = "two batches in a row moved the policy too far, even at a quarter of the rate"
            yield Finding("change", told, holds=True, until=far[-1][1] + AGAIN_S)

    def _claims(
        self, lately: Sequence[JudgedReply], after: int
    ) -> Iterator[tuple[float, str, str]]:
        """Yield evidence, alarm and sentence of each figure that may have risen."""
        judgements = self._parts.ledger.judgements
        replies = judgements.first_replies(BASELINE, NEWEST, after)
        if self._parts.method.teaching not in (None, HINT):  # any text after a reply teaches
            replies = [replace(reply, hinted=True) for reply in replies]
        for alarm, evidence, base, later in compared(replies):
            told = f"{later.value:.0%} of the newest {later.of} first replies {FIGURES[alarm][0]}, "
            yield evidence, alarm, told + f"{base.value:.0%} of the first {base.of}"
        evidence, share = contradicted(judgements.opinions(NEWEST, after))
        told = f"{share.good:.0f} of {share.of} verdicts are contradicted by the auditor or the "
        yield evidence, "verdicts", told + "user"
        for one in praised(reversed(lately)):
            if one.a.value > one.b.value:
                told = f"{one.a.value:.0%} of the good replies repeat a reply to something "
                yield one.e_value, "praise", told + f"else, {one.b.value:.0%} of the others"


def is_recent(at: float) -> bool:
    """Return whether a step that was void at this time, in seconds since 1970, still counts."""
    return time.time() - at < AGAIN_S
