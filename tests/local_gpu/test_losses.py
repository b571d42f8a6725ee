"""Every loss by hand: value, gradient and refusals."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from local_gpu.learn.losses import LOSSES, LossInputs, check_loss, records_of
from tinker_claw.errors import AlignmentError, StepError
from tinker_claw.types import Datum, LossName, LossPass


def value_and_gradient(
    name: LossName | Literal["gspo"], logprobs: torch.Tensor, inputs: LossInputs, **config: float
) -> tuple[float, torch.Tensor]:
    leaf = logprobs.clone().requires_grad_(True)
    loss = LOSSES[name].compute(leaf, inputs, LOSSES[name].config(name, config))
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


MARKED = torch.tensor([0.0, 1.0, 1.0, 0.0])


def of_sequence(ratio: float, advantages: list[float]) -> tuple[torch.Tensor, LossInputs]:
    """Four tokens; the two that are MARKED have `ratio` as their geometric mean."""
    ratios = torch.tensor([9.0, ratio * 1.25, ratio / 1.25, 5.0])
    behaviour = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    inputs = LossInputs(behaviour, torch.tensor(advantages), None, MARKED)
    return behaviour + ratios.log(), inputs


# Every token's ratio is s, with d s_t / d z_t = s and no other derivative.
@pytest.mark.parametrize(
    ("ratio", "advantages", "loss", "gradient"),
    [
        (1.0, [0.0, 1.0, 1.0, 0.0], -2.0, [0.0, -1.0, -1.0, 0.0]),
        # A token's own ratio, 1.25 times s, is not clipped: s is what counts.
        (1.0003, [0.0, 1.0, -2.0, 0.0], 1.0003, [0.0, -1.0003, 2.0006, 0.0]),
        (1.1, [0.0, 1.0, 2.0, 0.0], -3 * 1.0004, [0.0, 0.0, 0.0, 0.0]),
        (1.1, [0.0, 1.0, -2.0, 0.0], -1.0004 + 2.2, [0.0, 0.0, 2.2, 0.0]),
        (0.9, [0.0, 1.0, -2.0, 0.0], -0.9 + 2 * 0.9997, [0.0, -0.9, 0.0, 0.0]),
        # An advantage on a token that the ratio leaves out has the sequence's ratio all the same.
        (1.0, [0.0, 0.0, 0.0, 3.0], -3.0, [0.0, 0.0, 0.0, -3.0]),
    ],
)
def test_gspo(ratio: float, advantages: list[float], loss: float, gradient: list[float]) -> None:
    got = value_and_gradient("gspo", *of_sequence(ratio, advantages))
    assert got[0] == pytest.approx(loss, abs=1e-5)
    assert got[1].tolist() == pytest.approx(gradient, abs=1e-5)


def test_gspo_takes_its_bounds_as_absolute_ratios() -> None:
    bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.05}
    given = of_sequence(1.1, [0.0, 1.0, 1.0, 0.0])
    assert value_and_gradient("gspo", *given, **bounds)[0] == pytest.approx(-2.1)
    given = of_sequence(1.04, [0.0, 1.0, 1.0, 0.0])
    assert value_and_gradient("gspo", *given, **bounds)[0] == pytest.approx(-2.08)


def test_gspo_with_equal_advantages_is_the_papers_sequence_loss() -> None:
    """Equation 5, spelled out: |y| times min(s A, clamp(s) A), s with its own gradient."""
    behaviour = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    z = torch.tensor([-1.1, -1.8, -0.55], dtype=torch.float64, requires_grad=True)
    sequence = (z - behaviour).mean().exp()
    wide = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    whole = -3 * 0.7 * sequence
    whole.backward()
    inputs = LossInputs(behaviour, torch.full((3,), 0.7).double(), None, torch.ones(3))
    loss, gradient = value_and_gradient("gspo", z.detach(), inputs, **wide)
    assert loss == pytest.approx(whole.item())
    assert z.grad is not None
    torch.testing.assert_close(gradient, z.grad)


def test_what_is_not_published_is_not_guessed() -> None:
    with pytest.raises(StepError, match=r"stable_reinforce.*not published.*gspo"):
        check_loss("stable_reinforce")


RL = Datum((1, 2, 3), 1, logprobs=(-1.0, -1.0), advantages=(1.0, 1.0))


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(StepError, match=r"ppo.*'clip_range'.*clip_high_threshold"):
        LOSSES["ppo"].config("ppo", {"clip_range": 0.2})
    with pytest.raises(StepError, match=r"importance_sampling.*'clip_low_threshold'"):
        LOSSES["importance_sampling"].config("importance_sampling", {"clip_low_threshold": 0.8})


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.1}),
        ("cispo", {"clip_low_threshold": 1.3}),
    ],
)
def test_bounds_that_cross_are_refused_before_anything_is_computed(
    name: LossName, bounds: dict[str, float]
) -> None:
    """Between a forward and a backward pass, ranks that share layers would wait for one another."""
    with pytest.raises(StepError, match="absolute ratios"):
        records_of([LossPass(name, (RL,), bounds)], vocabulary=9, context_tokens=9)


@pytest.mark.parametrize(
    ("name", "datum", "missing"),
    [
        ("ppo", Datum((1, 2), 1, logprobs=(-1.0,)), "advantages"),
        ("cispo", Datum((1, 2), 1, advantages=(1.0,)), "logprobs"),
        ("cross_entropy", Datum((1, 2), 1), "weights"),
        ("gspo", RL, "sequence_ratio_mask"),
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
