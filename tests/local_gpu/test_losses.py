"""Every loss by hand: value, gradient and refusals."""

from __future__ import annotations

import math

import pytest
import torch

from local_gpu.learn.losses import LOSSES, LossInputs, loss_named, records_of
from tinker_claw.errors import AlignmentError, StepError
from tinker_claw.types import Datum, LossName, LossPass


def value_and_gradient(
    name: LossName, logprobs: torch.Tensor, inputs: LossInputs, **config: float
) -> tuple[float, torch.Tensor]:
    leaf = logprobs.clone().requires_grad_(True)
    loss = LOSSES[name].compute(leaf, inputs, LOSSES[name].config(config))
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad


def at_ratio(ratio: float, advantage: float) -> tuple[torch.Tensor, LossInputs]:
    """One token whose behaviour logprob is -2 and whose ratio is `ratio`."""
    inputs = LossInputs(torch.tensor([-2.0]), torch.tensor([advantage]), None)
    return torch.tensor([-2.0 + math.log(ratio)]), inputs


# d rho / d z = rho, so an unclipped term has the gradient -rho A.
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 1.0, -1.0, -1.0),
        (1.2, 1.0, -1.2, -1.2),
        (2.0, 1.0, -1.28, 0.0),
        (0.5, 1.0, -0.5, -0.5),
        (2.0, -1.0, 2.0, 2.0),
        (0.5, -1.0, 0.8, 0.0),
        (0.9, -3.0, 2.7, 2.7),
    ],
)
def test_ppo(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    got = value_and_gradient("ppo", *at_ratio(ratio, advantage))
    assert got[0] == pytest.approx(loss, abs=1e-6)
    assert got[1].tolist() == pytest.approx([gradient], abs=1e-6)


def test_ppo_takes_its_bounds_as_absolute_ratios() -> None:
    bounds = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2}
    assert value_and_gradient("ppo", *at_ratio(1.25, 1.0), **bounds)[0] == pytest.approx(-1.2)
    assert value_and_gradient("ppo", *at_ratio(0.85, -1.0), **bounds)[0] == pytest.approx(0.9)


def test_an_unknown_loss_or_setting_is_named() -> None:
    with pytest.raises(StepError, match=r"'cispo'.*cross_entropy"):
        loss_named("cispo")
    with pytest.raises(StepError, match=r"'clip_range'.*clip_high_threshold"):
        LOSSES["ppo"].config({"clip_range": 0.2})
    with pytest.raises(StepError, match="'clip_low_threshold'"):
        LOSSES["importance_sampling"].config({"clip_low_threshold": 0.8})


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
        LOSSES[name].check(datum)


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
        LOSSES["cross_entropy"].check(datum)
