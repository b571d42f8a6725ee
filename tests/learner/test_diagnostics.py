"""Diagnostics that a step records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.ledger import COMPLETION
from tinker_claw.learner.diagnostics import step_metrics
from tinker_claw.methods.passes import BatchItem, Prepared
from tinker_claw.types import Datum, LossPass, Sample, StepReport

SAMPLE = Sample(
    1,
    1,
    1,
    0,
    0,
    prompt=(1, 2),
    completion=COMPLETION,
    reward=1,
    teacher=None,
)
TOKENS = (1, 2, 3, 4, 5)
PPO = LossPass(
    "ppo",
    (Datum(TOKENS, 1, logprobs=(-1.0,) * 4, advantages=(1.0, -1.0, 1.0, 0.0)),),
    {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
)
HINTED = LossPass("cross_entropy", (Datum(TOKENS, 1, weights=((1.0,),) * 4),))


def share(*passes: LossPass) -> float | None:
    # Ratios exp(0.3) = 1.35, exp(-0.3) = 0.74, exp(-0.3), exp(0.3).
    now = (-0.7, -1.3, -1.3, -0.7)
    report = StepReport((0.0,), tuple((now,) for _ in passes), None, 8)
    prepared = Prepared([BatchItem(SAMPLE)], [], passes, None)
    return step_metrics(prepared, report, 0, None)["clip_share"]


def test_clip_share_counts_tokens_that_the_bounds_left_without_a_gradient() -> None:
    # Above the upper bound with A > 0, below the lower with A < 0; not the third, and A = 0 counts
    # for nothing.
    assert share(PPO) == pytest.approx(2 / 3)
    assert share(PPO, HINTED) == pytest.approx(2 / 3)
    assert share(HINTED) is None
    impossible = replace(PPO.datums[0], logprobs=(-9999.0,) * 4)
    assert share(replace(PPO, datums=(impossible,))) == pytest.approx(2 / 3), "it breaks no step"
