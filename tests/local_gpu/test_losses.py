"""Every loss by hand: its value, its gradient and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from local_gpu.learn.losses import LOSSES, LossInputs
from tinker_claw.errors import AlignmentError, StepError
from tinker_claw.types import Datum, LossName


def value_and_gradient(
    name: LossName, logprobs: torch.Tensor, inputs: LossInputs, **config: float
) -> tuple[float, torch.Tensor]:
    leaf = logprobs.clone().requires_grad_(True)
    loss = LOSSES[name].compute(leaf, inputs, config)
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


@pytest.mark.parametrize(("ratio", "advantage"), [(0.3, 1.0), (1.0, -2.0), (3.0, 0.5)])
def test_importance_sampling(ratio: float, advantage: float) -> None:
    loss, gradient = value_and_gradient("importance_sampling", *at_ratio(ratio, advantage))
    assert loss == pytest.approx(-ratio * advantage)
    assert gradient.tolist() == pytest.approx([-ratio * advantage])


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"), [(2.0, 1.0, 1.28), (0.5, -1.0, 0.8), (1.1, 2.0, 1.1)]
)
def test_cispo_clips_the_weight_and_keeps_every_gradient(
    ratio: float, advantage: float, weight: float
) -> None:
    logprobs, inputs = at_ratio(ratio, advantage)
    loss, gradient = value_and_gradient("cispo", logprobs, inputs)
    assert loss == pytest.approx(-weight * advantage * logprobs.item(), abs=1e-6)
    assert gradient.tolist() == pytest.approx([-weight * advantage], abs=1e-6)


def test_cross_entropy_of_signed_weights() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]])
    weights = torch.tensor([[0.5, -1.0], [0.0, 2.0]])
    loss, gradient = value_and_gradient("cross_entropy", logprobs, LossInputs(None, None, weights))
    assert loss == pytest.approx(-(-0.5 + 2.0 + 0.0 - 1.0))
    assert torch.equal(gradient, -weights)


def test_losses_are_sums_over_tokens() -> None:
    logprobs = torch.tensor([-1.0, -0.5, -2.0])
    inputs = LossInputs(torch.tensor([-1.2, -0.4, -2.5]), torch.tensor([1.0, -1.0, 0.5]), None)
    for name in ("ppo", "importance_sampling", "cispo"):
        whole = value_and_gradient(name, logprobs, inputs)
        assert inputs.behaviour is not None
        assert inputs.advantages is not None
        parts = [
            value_and_gradient(name, logprobs[i : i + 1], LossInputs(q, a, None))
            for i, (q, a) in enumerate(
                zip(inputs.behaviour.split(1), inputs.advantages.split(1), strict=True)
            )
        ]
        assert whole[0] == pytest.approx(sum(loss for loss, _ in parts), abs=1e-6)
        assert torch.allclose(whole[1], torch.cat([gradient for _, gradient in parts]))


RL = Datum((1, 2, 3), 1, logprobs=(-1.0, -1.0), advantages=(1.0, 1.0))


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(StepError, match=r"ppo.*'clip_range'.*clip_high_threshold"):
        LOSSES["ppo"].check("ppo", RL, {"clip_range": 0.2})
    with pytest.raises(StepError, match=r"importance_sampling.*'clip_low_threshold'"):
        LOSSES["importance_sampling"].check("importance_sampling", RL, {"clip_low_threshold": 0.8})


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises(StepError, match="absolute ratios"):
        value_and_gradient(
            "ppo", *at_ratio(1.0, 1.0), clip_low_threshold=0.2, clip_high_threshold=0.1
        )


@pytest.mark.parametrize(
    ("name", "datum", "missing"),
    [
        ("ppo", Datum((1, 2), 1, logprobs=(-1.0,)), "advantages"),
        ("cispo", Datum((1, 2), 1, advantages=(1.0,)), "logprobs"),
        ("cross_entropy", Datum((1, 2), 1), "weights"),
    ],
)
def test_a_missing_array_is_named(name: LossName, datum: Datum, missing: str) -> None:
    with pytest.raises(StepError, match=missing):
        LOSSES[name].check(name, datum, {})


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
        LOSSES["cross_entropy"].check("cross_entropy", datum, {})
