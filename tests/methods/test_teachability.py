"""Whether hints teach: gains and intervals by hand, and what follows for the weight."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_claw.methods.teachability import (
    NEWEST,
    UNKNOWN_WEIGHT,
    Teachability,
    reply_gain,
    teachability,
)

GAINS = st.lists(st.floats(-2, 2), min_size=3, max_size=12)


def test_a_gain_is_per_token_and_bounded_as_distillation_is() -> None:
    told, untold = (-1.0, -2.0, -0.5), (-1.5, -2.0, -3.0)
    assert reply_gain(told, untold, 1.0) == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert reply_gain(told, untold, 0.0) == pytest.approx((0.5 + 0.0 + 2.5) / 3)
    assert reply_gain(told * 2, untold * 2, 1.0) == pytest.approx(0.5), "however long it is"


def test_the_difference_is_the_median_of_all_and_the_interval_goes_by_ranks() -> None:
    # .2 .3 .3 .4 .4 .4 .5 .5 .6: of three and three replies the outermost are 90 %.
    found = teachability((0.3, 0.1, 0.2), (-0.1, -0.3, -0.2))
    assert found.difference == pytest.approx(0.4)
    assert found.interval == pytest.approx((0.2, 0.6))
    # Of 5 and 5 (Wilcoxon's table: 5 of 25 at each end) the fifth from both ends.
    tens = (0.0, 10.0, 20.0, 30.0, 40.0)
    differences = sorted(a - b for a in tens for b in (0.0, 1.0, 2.0, 3.0, 4.0))
    found = teachability(tens, (0.0, 1.0, 2.0, 3.0, 4.0))
    assert (found.difference, found.interval) == (
        differences[12],
        (differences[4], differences[20]),
    )


@pytest.mark.parametrize(
    ("n", "m", "rank"),
    [
        (3, 3, 1),
        (4, 4, 2),
        (3, 6, 3),
        (5, 5, 5),
        (8, 8, 16),
        (2, 5, 1),
        (2, 4, 0),
        (1, 19, 1),
        (1, 18, 0),
    ],
)
def test_ranks_are_those_of_the_table(n: int, m: int, rank: int) -> None:
    """Wilcoxon's, 5 % at each end; of 3 and 3 one of 20 orders, which is 5 % to the digit."""
    for a, b in ((n, m), (m, n)):
        grid = [float(1000 * i) for i in range(a)], [float(i) for i in range(b)]
        found, of = teachability(*grid), sorted(x - y for x in grid[0] for y in grid[1])
        assert found.interval == ((of[rank - 1], of[-rank]) if rank else None)


def test_a_damaged_reply_hides_no_hint_that_pulls_away() -> None:
    accepted = (-0.03, -0.02, -0.025, -0.035, -0.022, -0.04, -0.018, -0.03)
    rejected = (0.005, 0.0, 0.01, 0.002, -0.01, 0.004, -0.002, -0.9)
    assert fmean(accepted) > fmean(rejected), "by the means it would teach"
    assert teachability(accepted, rejected).teaches is False


@pytest.mark.parametrize(
    ("accepted", "rejected", "teaches", "weight"),
    [
        ((0.3, 0.1, 0.2), (-0.1, -0.3, -0.2), True, 1.0),
        ((-0.1, -0.3, -0.2), (0.3, 0.1, 0.2), False, 0.0),
        ((0.3, 0.1, 0.2), (0.3, 0.1, 0.1), None, UNKNOWN_WEIGHT),
        ((0.0,) * 3, (0.0,) * 3, None, UNKNOWN_WEIGHT),
        ((9.0,) * 2, (-9.0,) * 4, None, UNKNOWN_WEIGHT),
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
    assert found.difference is not None
    assert moved.difference == pytest.approx(found.difference, abs=1e-6)
    assert moved.interval == pytest.approx(found.interval, abs=1e-6)
    turned = teachability(rejected, accepted)
    assert turned.difference == pytest.approx(-found.difference)


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
        "they teach nothing: -0.400 nats per token (-0.600 to -0.200), of 3 accepted and 3 "
        "rejected replies"
    )
