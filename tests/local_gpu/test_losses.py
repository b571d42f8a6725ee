"""Every loss by hand: value, gradient and refusals."""

from __future__ import annotations

import pytest

from local_gpu.learn.losses import LOSSES, check_loss, records_of
from tinker_claw.errors import AlignmentError, StepError
from tinker_claw.types import Datum, LossName, LossPass


def test_an_unknown_loss_or_setting_is_named() -> None:
    with pytest.raises(StepError, match=r"'cispo'.*cross_entropy"):
        check_loss("cispo")
    with pytest.raises(StepError, match=r"'clip_range'.*clip_high_threshold"):
        LOSSES["ppo"].config("ppo", {"clip_range": 0.2})
    with pytest.raises(StepError, match="'clip_low_threshold'"):
        LOSSES["importance_sampling"].config("importance_sampling", {"clip_low_threshold": 0.8})


RL = Datum((1, 2, 3), 1, logprobs=(-1.0, -1.0), advantages=(1.0, 1.0))


@pytest.mark.parametrize("low", [0.2, 1.3])
def test_bounds_that_cross_are_refused_before_anything_is_computed(low: float) -> None:
    """Between a forward and a backward pass, ranks that share layers would wait for one another."""
    bounds = {"clip_low_threshold": low, **({"clip_high_threshold": 0.1} if low < 1 else {})}
    with pytest.raises(StepError, match="absolute ratios"):
        records_of([LossPass("ppo", (RL,), bounds)], vocabulary=9, context_tokens=9)


@pytest.mark.parametrize(
    ("name", "datum", "missing"),
    [
        ("ppo", Datum((1, 2), 1, logprobs=(-1.0,)), "advantages"),
        ("importance_sampling", Datum((1, 2), 1, advantages=(1.0,)), "logprobs"),
        ("cross_entropy", Datum((1, 2), 1), "weights"),
    ],
)
def test_a_missing_array_is_named(name: LossName, datum: Datum, missing: str) -> None:
    with pytest.raises(StepError, match=missing):
        LOSSES[name].check(name, datum)


@pytest.mark.parametrize(
    "datum",
    [
        Datum((1, 2, 3), 1, weights=((1.0, 2.0), (1.0, 2.0))),
        Datum((1, 2, 3), 1, targets=((1, 2), (1, 2)), weights=((1.0,), (1.0,))),
        Datum((1, 2, 3), 1, targets=((1, 2), (1, 2)), weights=((1.0, 0.0), (1.0,))),
    ],
)
def test_weights_are_as_wide_as_targets(datum: Datum) -> None:
    with pytest.raises(AlignmentError, match="wide"):
        LOSSES["cross_entropy"].check("cross_entropy", datum)
