"""Figures of one step, above all the difference of sampler and trainer on the same tokens.

The same weights sample a reply and train on it, in two programs: perhaps another engine, precision,
kernel or machine. With q the sampler's logprob of a sampled token and z the trainer's, before the
step, d = z - q would be 0. If both compute in float32 it is rounding (1e-5 nats). With bfloat16 its
standard deviation is about 0.05, and one ratio in thirteen is outside 0.9 to 1.1. Such figures are
published for vLLM, and for a trainer against itself in other chunks. An adapter that was not
applied, another alpha, a prefix cache of older weights, another temperature, a cut distribution:
each shows in d, and makes every importance ratio of the batch wrong.

Rule: only fresh tokens are compared, those of the version that is trained on. An older version's q
differs from z by what was learned since, as it should. Its scores under the current sampler could
be compared, too. But with local training the trainer computes them itself, so they say nothing
about the engine that answers. A batch without fresh tokens is not compared.

Not detected: weights that differ too little to matter, and a sampler that draws at one temperature
and reports logprobs of another, the trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tinker_claw.learner.health import Health
from tinker_claw.ledger.steps import Void, VoidStepError
from tinker_claw.methods.passes import Prepared
from tinker_claw.types import StepReport

FEWEST_TOKENS = 20
"""Fewest fresh tokens for a comparison."""
MOST_K3 = 0.01
"""Largest `k3`, in nats. bfloat16 made 0.0004 on one model and 0.0033 on another, whose logits are
doubled (`benchmarks.agreement`); no adapter, where that had moved the policy by 0.1 nats a token,
made 0.04."""
ERRORS = 3.0
"""Standard errors by which it must exceed that: few tokens prove little."""
_MOST_TOKEN = 1.0
"""Most nats of d that one token counts for: a few outliers can neither raise an alarm nor, by the
spread they add, hide one. NaN counts for as much."""
_LARGEST = 50.0
"""Most nats before exp: figures stay finite, whatever a broken sampler reports."""
_CAUSES = (
    "Does the sampler apply this version's adapter, with its alpha? Is its prefix cache that of "
    "older weights? Does it sample at another temperature, top_p or top_k than was asked for, or "
    "is it quantised?"
)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Difference of sampler and trainer on the fresh tokens of a batch."""

    tokens: int
    """Fresh tokens compared, at least 1."""
    k3: float
    """Mean of exp(d) - 1 - d in nats, never below 0: estimates KL(sampler || trainer), as the
    tokens were drawn by the sampler (J. Schulman, Approximating KL divergence, 2020)."""
    agrees: bool | None
    """Whether sampler and trainer agree; None: too few tokens to tell."""


def agreement(prepared: Prepared, report: StepReport, version: int) -> Agreement | None:
    """Compare the logprobs of `version` when it sampled with its trainer's.

    None: no token of that version has a gradient, so there is nothing to compare.
    """
    gaps = list(_gaps(prepared, report, version))
    return compare(gaps) if gaps else None


def compare(gaps: Sequence[float]) -> Agreement:
    """Compute the figures from (tokens,) values of d, at least one."""
    bounded = [max(-_MOST_TOKEN, min(_MOST_TOKEN, d)) for d in gaps]
    each = [math.expm1(d) - d for d in bounded]
    k3 = fmean(each)
    error = math.sqrt(fmean((value - k3) ** 2 for value in each) / len(each))
    agrees = k3 - ERRORS * error <= MOST_K3 if len(each) >= FEWEST_TOKENS else None
    return Agreement(len(each), k3, agrees)


def require_agreement(figures: Agreement | None, health: Health) -> None:
    """Allow the step over this batch to be committed.

    Ratios against wrong logprobs train the wrong thing, and a sampler cannot be repaired from here:
    the step is void, and learning ends until a restart, while the gateway goes on answering.

    Raises:
        VoidStepError: sampler and trainer do not agree on it.
    """
    if figures is not None and figures.agrees is False:
        health.disagree(
            f"On {figures.tokens} fresh tokens the sampler's logprobs are not the trainer's (k3 "
            f"{figures.k3:.3g} nats, at most {MOST_K3}). {_CAUSES}"
        )
        raise VoidStepError(
            Void.DISAGREES,
            "Sampler and trainer do not agree: the step is not kept, and what this version "
            "sampled is set aside. Fix the sampler (`agreement` says what to check), then "
            "restart.",
        )


def _gaps(prepared: Prepared, report: StepReport, version: int) -> Iterator[float]:
    """Yield d of each fresh token, once however many passes it goes through."""
    scored = {
        (datum.tokens, datum.start): row
        for one_pass, rows in zip(prepared.passes, report.logprobs, strict=True)
        for datum, row in zip(one_pass.datums, rows, strict=True)
    }
    for item in prepared.items:
        prompt, done = item.sample.prompt, item.sample.completion
        row = scored.get((prompt + done.tokens, len(prompt)))
        if row and item.sample.policy_version == version:  # else it was not trained, or is older
            for z, q in zip(row, done.logprobs, strict=True):
                yield z - q


def step_metrics(
    prepared: Prepared, report: StepReport, current_step: int, agreed: Agreement | None
) -> dict[str, Any]:
    """Return the metrics of a step for its event and the metrics file.

    `clip_share` is the share of the ppo tokens whose gradient the ratio's bounds cut off; None
    without such tokens. `agreed`: trainer against sampler, over tokens of fresh samples.
    """
    samples = [item.sample for item in prepared.items]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return {
        "samples": len(samples),
        "hinted": sum(item.sample.teacher is not None for item in prepared.items),
        "reward_mean": fmean(rewards) if rewards else None,
        "staleness_mean": fmean(current_step - sample.policy_step for sample in samples),
        "losses": list(report.losses),
        "grad_norm": report.grad_norm,
        "tokens": report.tokens,
        "clip_share": _clip_share(prepared, report),
        "fresh_tokens": agreed.tokens if agreed else 0,
        "agrees": agreed and agreed.agrees,
        "agreement_k3": agreed and agreed.k3,
    }


def _clip_share(prepared: Prepared, report: StepReport) -> float | None:
    cut = list[bool]()
    for one_pass, rows in zip(prepared.passes, report.logprobs, strict=True):
        for datum, row in zip(one_pass.datums, rows, strict=True):
            # A datum of another loss has no advantages.
            for a, now, then in zip(datum.advantages, row, datum.logprobs, strict=False):
                ratio = math.exp(min(_LARGEST, now - then))
                if a:
                    low = one_pass.config["clip_low_threshold"]
                    high = one_pass.config["clip_high_threshold"]
                    cut.append(ratio > high if a > 0 else ratio < low)
    return fmean(cut) if cut else None
