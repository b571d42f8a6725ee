"""Figures of one step, above all the difference of sampler and trainer on the same tokens.

The same weights sample a reply and train on it, in two programs: perhaps another engine, precision,
kernel or machine. With q the sampler's logprob of a sampled token and z the trainer's, before the
step, d = z - q would be 0. If both compute in float32 it is rounding (1e-5 nats); with bfloat16 its
standard deviation is about 0.05, and one ratio in thirteen is outside 0.9 to 1.1 (as published for
vLLM and for a trainer against itself in other chunks). An adapter that was not applied, another
alpha, a prefix cache of older weights, another temperature, a cut distribution: each shows in d,
and makes every importance ratio of the batch wrong.

Rule: only fresh tokens are compared, those of the version that is trained on. An older version's q
differs from z by what was learned since, as it should. (Its scores under the current sampler could
be compared, too, but with local training the trainer computes them itself, so they say nothing
about the engine that answers.) A batch without fresh tokens is not compared.

Not detected: weights that differ too little to matter, and a sampler that draws at one temperature
and reports logprobs of another, the trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

from tinker_claw.errors import DisagreementError
from tinker_claw.learner.health import Health
from tinker_claw.methods.passes import Prepared
from tinker_claw.telemetry import log
from tinker_claw.types import StepReport

FAR_RATIOS = (0.9, 1.1)
"""Ratios outside this range count as far."""
FEWEST_TOKENS = 20
"""Fewest fresh tokens for a comparison."""
MOST_K3 = 0.01
"""Largest `k3`, in nats. bfloat16 made 0.0004 on one model and 0.0033 on another, whose logits are
doubled (`benchmarks.agreement`); no adapter, where that had moved the policy by 0.1 nats a token,
made 0.04."""
LEAST_RATIO = 0.98
"""Smallest mean ratio. It is 1 whatever the weights, if q is the whole distribution sampled from;
under top_p or top_k it is the mass kept."""
ERRORS = 3.0
"""Standard errors by which a figure must exceed its bound: few tokens prove little."""
_BOUND = 1.0
"""Most nats that one token counts for in an alarm: a few outliers can neither raise it nor, by the
spread they add, hide it."""
_LARGEST = 50.0
"""Most nats before exp: the figures stay finite, whatever a broken sampler reports."""


_CAUSES = (
    "Does the sampler apply this version's adapter, with its alpha? Is its prefix cache that of "
    "older weights? Does it sample at another temperature, top_p or top_k than was asked for, or "
    "is it quantised?"
)
USUAL_STEPS = 8
"""Compared steps, the first of a run, whose largest `k3` is what is usual in it."""
TIMES_USUAL = 8.0
"""Times that by which a step is above what is usual."""
LEAST_WARNED = 1e-5
"""Largest `k3` that is never warned of, in nats: a standard deviation of 0.0045."""
WARNED_TOKENS = 200
"""Fewest fresh tokens for a warning: rounding has tails, and a few of them are many times it."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Figures of d = z - q over the fresh tokens of a batch, in nats."""

    tokens: int
    """Fresh tokens compared, at least 1."""
    mean: float
    sd: float
    """Standard deviation of d."""
    max: float
    """Largest |d|."""
    outside: float
    """Share of ratios exp(d) outside `FAR_RATIOS`."""
    k3: float
    """Mean of exp(d) - 1 - d, never below 0: estimates KL(sampler || trainer), as the tokens were
    drawn by the sampler (J. Schulman, Approximating KL divergence, 2020)."""
    ratio: float
    """Mean of exp(d): the trainer's probability of a sampled token over the sampler's."""
    agrees: bool | None
    """Whether sampler and trainer agree; None: too few tokens to tell."""

    def further_apart(self, usual: float) -> str:
        """Describe that they are further apart than in the run's first steps."""
        return (
            f"Sampler and trainer are further apart than in the run's first {USUAL_STEPS} steps "
            f"(k3 {self.k3:.2g}, {usual:.2g} at most there; learning stops where it is surely "
            f"above {MOST_K3}). {_CAUSES}"
        )

    def describe(self) -> str:
        """Describe a disagreement and its possible causes."""
        low, high = FAR_RATIOS
        return (
            f"On {self.tokens} fresh tokens the sampler's logprobs are not the trainer's (standard "
            f"deviation {self.sd:.3g} nats, {self.outside:.0%} of ratios outside {low}-{high}, k3 "
            f"{self.k3:.3g}, mean ratio {self.ratio:.3g}). {_CAUSES}"
        )


def agreement(prepared: Prepared, report: StepReport, version: int) -> Agreement | None:
    """Compare the logprobs of `version` when it sampled with its trainer's.

    None: no token of that version has a gradient, so there is nothing to compare.
    """
    gaps = list(_gaps(prepared, report, version))
    return compare(gaps) if gaps else None


def compare(gaps: Sequence[float]) -> Agreement:
    """Compute the figures from (tokens,) values of d, at least one."""
    gaps = [_finite(d) for d in gaps]
    low, high = FAR_RATIOS
    ratios = [math.exp(d) for d in gaps]
    return Agreement(
        tokens=len(gaps),
        mean=fmean(gaps),
        sd=_sd(gaps),
        max=max(map(abs, gaps)),
        outside=fmean(not low <= ratio <= high for ratio in ratios),
        k3=fmean(map(_k3, gaps)),
        ratio=fmean(ratios),
        agrees=_agrees(gaps),
    )


def figures(found: Agreement | None) -> dict[str, Any]:
    """Return the figures for a step's metrics. None: there was nothing to compare."""
    named = {one.name: getattr(found, one.name, None) for one in fields(Agreement)}
    told = {"fresh_tokens": named.pop("tokens") or 0, "agrees": named.pop("agrees")}
    return told | {f"agreement_{name}": value for name, value in named.items()}


def _agrees(gaps: Sequence[float]) -> bool | None:
    if len(gaps) < FEWEST_TOKENS:
        return None
    bounded = [max(-_BOUND, min(_BOUND, d)) for d in gaps]
    apart, apart_error = _estimate([_k3(d) for d in bounded])
    ratio, ratio_error = _estimate([math.exp(d) for d in bounded])
    too_far = apart - ERRORS * apart_error > MOST_K3
    cut = ratio + ERRORS * ratio_error < LEAST_RATIO
    return not (too_far or cut)


def _estimate(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return fmean(values), _sd(values) / math.sqrt(len(values))


def _sd(values: Sequence[float]) -> float:
    """Return the standard deviation. (`statistics.pstdev` takes three times as long.)"""
    mean = fmean(values)
    return math.sqrt(fmean((value - mean) ** 2 for value in values))


def _k3(d: float) -> float:
    return math.expm1(d) - d


def _finite(d: float) -> float:
    return -_LARGEST if math.isnan(d) else max(-_LARGEST, min(_LARGEST, d))


def _gaps(prepared: Prepared, report: StepReport, version: int) -> Iterator[float]:
    """Yield d of each fresh token, once however many passes it goes through."""
    scored = {
        (datum.tokens, datum.start): row
        for one_pass, rows in zip(prepared.passes, report.logprobs, strict=True)
        for datum, row in zip(one_pass.datums, rows, strict=True)
    }
    for key, logprobs in _fresh(prepared, version):
        if row := scored.get(key):  # else it carries no gradient and was not trained
            for z, q in zip(row, logprobs, strict=True):
                yield z - q


def _fresh(
    prepared: Prepared, version: int
) -> Iterator[tuple[tuple[tuple[int, ...], int], Sequence[float]]]:
    """Yield the replies that `version` sampled: tokens and start as in their datum, and their
    logprobs."""
    for item in prepared.items:
        prompt, done = item.sample.prompt, item.sample.completion
        if item.sample.policy_version == version:
            yield (prompt + done.tokens, len(prompt)), done.logprobs


def step_metrics(
    prepared: Prepared, report: StepReport, current_step: int, agreed: Agreement | None
) -> dict[str, Any]:
    """Return the metrics of a step for its event and the metrics file.

    `clip_share` is the share of the ppo tokens whose gradient the ratio's bounds cut off; None
    without such tokens. `agreed`: trainer against sampler, over tokens of fresh samples.
    """
    samples = [item.sample for item in prepared.items]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    staleness = [current_step - sample.policy_step for sample in samples]
    return {
        "samples": len(samples),
        "hinted": sum(sample.teacher is not None for sample in samples),
        "reward_mean": fmean(rewards) if rewards else None,
        "staleness_mean": fmean(staleness),
        "losses": list(report.losses),
        "grad_norm": report.grad_norm,
        "tokens": report.tokens,
        "clip_share": _clip_share(prepared, report),
        **figures(agreed),
    }


def _clip_share(prepared: Prepared, report: StepReport) -> float | None:
    cut = list[bool]()
    for one_pass, rows in zip(prepared.passes, report.logprobs, strict=True):
        for datum, row in zip(one_pass.datums, rows, strict=True):
            # A datum of another loss has no advantages.
            for a, now, then in zip(datum.advantages, row, datum.logprobs, strict=False):
                ratio = math.exp(_finite(now - then))
                if a:
                    low, high = one_pass.config.values()
                    cut.append(ratio > high if a > 0 else ratio < low)
    return fmean(cut) if cut else None


class Alarm:
    """Alarm for a sampler and trainer that disagree.

    A batch beyond the bounds above is not committed: its step is void, and learning ends until a
    restart, while the gateway goes on answering. Ratios against wrong logprobs train the wrong
    thing, and a sampler cannot be repaired from here. What the run's first steps measured may only
    tighten that, as a warning: beyond it a step is kept.

    A batch with too few fresh tokens to tell changes nothing.
    """

    def __init__(self, health: Health, first: Callable[[int], Sequence[float]]) -> None:
        """Set up. `first`: gives `k3` of so many steps, the first of the run that were compared."""
        self._health = health
        self._first = first

    def admit(self, found: Agreement | None) -> None:
        """Allow the step over this batch to be committed.

        Raises:
            DisagreementError: sampler and trainer do not agree on it.
        """
        if found is not None and found.agrees is False:
            self._health.agreement_is("alarm", found.describe())
            raise DisagreementError(
                "Sampler and trainer do not agree: the step is not kept, and what this version "
                "sampled is set aside. Fix the sampler (`agreement` says what to check), then "
                "restart."
            )

    def committed(self, found: Agreement | None, step_id: int) -> None:
        """Record that the step over this batch was committed."""
        if found is None or found.agrees is None:
            return
        first, before = self._first(USUAL_STEPS), self._health.agreement.state
        usual = max(LEAST_WARNED, TIMES_USUAL * max(first, default=math.inf))
        if len(first) == USUAL_STEPS and found.tokens >= WARNED_TOKENS and found.k3 > usual:
            told = found.further_apart(max(first))
            self._health.agreement_is("warning", told)
            log.warning("agreement.warning", step_id=step_id, reason=told)
        elif before == "warning":
            self._health.agreement_is("ok")
            log.info("agreement.back", step_id=step_id)
