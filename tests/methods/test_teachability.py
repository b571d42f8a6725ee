"""Whether hints teach: gains and intervals by hand, and what follows for the weight."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_claw.methods.teachability import (
    FEWEST,
    NEWEST,
    UNKNOWN_WEIGHT,
    Teachability,
    reply_gain,
    teachability,
)

GAINS = st.lists(st.floats(-2, 2), min_size=FEWEST, max_size=12)


def test_a_gain_is_per_token_and_bounded_as_distillation_is() -> None:
    told, untold = (-1.0, -2.0, -0.5), (-1.5, -2.0, -3.0)
    assert reply_gain(told, untold, 1.0) == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert reply_gain(told, untold, 0.0) == pytest.approx((0.5 + 0.0 + 2.5) / 3)
    assert reply_gain(told * 2, untold * 2, 1.0) == pytest.approx(0.5), "however long it is"


def test_the_interval_is_that_of_welch() -> None:
    # Each variance .01, so the error is sqrt(.02 / 3), with 4 degrees of freedom: t = 2.132.
    found = teachability((0.3, 0.1, 0.2), (-0.1, -0.3, -0.2))
    assert found.mean == pytest.approx(0.4)
    half = 2.132 * math.sqrt(0.02 / 3)
    assert found.interval == pytest.approx((0.4 - half, 0.4 + half))
    # Variances .01 of 3 and .04 of 4: error sqrt(.01333), freedom 4.65, so t of 4.
    found = teachability((0.3, 0.1, 0.2), (0.0, 0.0, 0.3464101615, 0.3464101615))
    half = 2.132 * math.sqrt(0.01 / 3 + 0.04 / 4)
    assert found.interval == pytest.approx((0.2 - 0.1732050808 - half, 0.2 - 0.1732050808 + half))


@pytest.mark.parametrize(
    ("accepted", "rejected", "teaches", "weight"),
    [
        ((0.3, 0.1, 0.2), (-0.1, -0.3, -0.2), True, 1.0),
        ((-0.1, -0.3, -0.2), (0.3, 0.1, 0.2), False, 0.0),
        ((0.3, 0.1, 0.2), (0.3, 0.1, 0.1), None, UNKNOWN_WEIGHT),
        ((0.0,) * 3, (0.0,) * 3, None, UNKNOWN_WEIGHT),
        ((9.0,) * (FEWEST - 1), (-9.0,) * 30, None, UNKNOWN_WEIGHT),
        ((), (), None, UNKNOWN_WEIGHT),
    ],
    ids=["teaches", "pulls away", "undecided", "says nothing", "too few accepted", "none"],
)
def test_the_weight_follows_the_interval(
    accepted: tuple[float, ...], rejected: tuple[float, ...], teaches: bool | None, weight: float
) -> None:
    found = teachability(accepted, rejected)
    assert found.teaches is teaches
    assert found.weight == weight


@given(accepted=GAINS, rejected=GAINS, shift=st.floats(-5, 5))
def test_what_every_reply_gains_alike_says_nothing(
    accepted: list[float], rejected: list[float], shift: float
) -> None:
    """How a text disturbs a prompt, and what the base thinks of it, is in both."""
    found = teachability(accepted, rejected)
    moved = teachability([g + shift for g in accepted], [g + shift for g in rejected])
    assert found.mean is not None
    assert moved.mean == pytest.approx(found.mean, abs=1e-6)
    turned = teachability(rejected, accepted)
    assert turned.mean == pytest.approx(-found.mean)


def test_what_is_old_does_not_count() -> None:
    good, bad = (0.2, 0.3, 0.25), (-0.2, -0.3, -0.25)
    found = teachability((*good * NEWEST, -99.0), (*bad * NEWEST, 99.0))
    assert (found.accepted, found.rejected) == (NEWEST, NEWEST)
    assert found.teaches


def test_measuring_goes_on_until_it_would_hardly_change_anything() -> None:
    assert not teachability((), ()).settled
    assert teachability((0.3, 0.1, 0.2), (-0.1, -0.3, -0.2)).settled
    even = (0.1, -0.1) * NEWEST
    assert not teachability(even[:8], even[:8]).settled
    assert teachability(even, even).settled


def test_it_is_told_in_words() -> None:
    assert str(Teachability(1, 9, None, None)) == (
        "not known yet, of 1 accepted and 9 rejected replies"
    )
    assert str(teachability((-0.1, -0.3, -0.2), (0.3, 0.1, 0.2))) == (
        "they teach nothing: -0.400 nats per token (-0.574 to -0.226), of 3 accepted and 3 "
        "rejected replies"
    )
