"""Usefulness of hints: gains by hand, claims, and the weight that follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from random import Random
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_claw.evidence import Mean
from tinker_claw.methods.teachability import FADE, Teachability, reply_gain, teachability

GAINS = st.lists(st.integers(-512, 512).map(lambda n: n / 256), min_size=3, max_size=12)


def test_a_gain_is_per_token_and_bounded_as_distillation_is() -> None:
    told, untold = (-1.0, -2.0, -0.5), (-1.5, -2.0, -3.0)
    assert reply_gain(told, untold, 1.0) == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert reply_gain(told, untold, 0.0) == pytest.approx((0.5 + 0.0 + 2.5) / 3)
    assert reply_gain(told * 2, untold * 2, 1.0) == pytest.approx(0.5), "however long it is"


def compared(accepted: Sequence[float], rejected: Sequence[float]) -> Teachability:
    """An accepted reply, a rejected one, and so on; the rest behind them."""
    both = zip_longest(accepted, rejected)
    said = [one for pair in both for one in zip((True, False), pair, strict=True)]
    return teachability([(good, gain) for good, gain in said if gain is not None])


def test_the_difference_is_the_median_over_the_pairs() -> None:
    found = compared((0.3, 0.1, 0.2), (-0.1, -0.5, -0.2))  # .4, .6 and .4
    assert found.difference == pytest.approx(0.4)


def test_a_reply_is_compared_with_the_newest_of_the_other_kind_that_has_no_partner() -> None:
    gains = [(True, 9.0), (True, 0.2), (False, -0.1), (True, 0.3), (True, 0.0), (False, 0.3)]
    wins = Mean(fade=FADE)
    for outcome in (1.0, 0.0):  # .2 with -.1, and 0 with .3; 9 and the first .3 are alone
        wins.add(outcome)
    found = teachability(gains)
    assert (found.helps, found.harms) == (wins.e_above, wins.e_below)
    assert (found.accepted, found.rejected, found.difference) == (4, 2, pytest.approx(0.0))
    assert teachability([*gains, (True, 1.0)]).evidence == found.evidence


def test_a_damaged_reply_hides_no_hint_that_pulls_away() -> None:
    accepted = (-0.03, -0.02, -0.025, -0.035, -0.022, -0.04, -0.018, -0.03) * 2
    rejected = (0.005, 0.0, 0.01, 0.002, -0.01, 0.004, -0.002, -0.9) * 2
    assert fmean(accepted) > fmean(rejected), "by the means it would teach"
    assert compared(accepted, rejected).weight(rewards=True) < 0.05


def watched(seed: int, effect: float) -> Iterator[bool | None]:
    """Claims on a user after each of 150 measured replies, of which they accept a share of their
    own; three in a hundred are damaged."""
    rng, gains = Random(seed), list[tuple[bool, float]]()
    share = rng.uniform(0.3, 0.7)
    for _ in range(150):
        good = rng.random() < share
        gain = rng.gauss(effect * good, 0.04) - 0.9 * (rng.random() < 0.03)
        gains.append((good, gain))
        yield teachability(gains).teaches


def test_of_hints_that_do_nothing_hardly_anything_is_claimed_however_often_one_looks() -> None:
    """At most 5 % of users are ever told that their hints help, or that they do not."""
    assert sum(any(said is not None for said in watched(seed, 0.0)) for seed in range(60)) <= 3


@pytest.mark.parametrize("effect", [0.07, -0.07])
def test_hints_that_do_something_are_found_to_within_so_many_replies(effect: float) -> None:
    said = [list(watched(seed, effect)) for seed in range(20)]
    assert median(one.index(effect > 0) if (effect > 0) in one else 150 for one in said) <= 60
    assert not any((effect < 0) in one for one in said)


@pytest.mark.parametrize(
    ("accepted", "rejected", "teaches", "weight"),
    [
        ((0.3,) * 10, (-0.1,) * 10, True, 1.0),
        ((-0.1,) * 10, (0.3,) * 10, False, 0.0),
        ((0.3, 0.1), (0.1, 0.3), None, pytest.approx(0.189, abs=1e-3)),
        ((0.0,) * 30, (0.0,) * 30, None, 0.25),
        ((9.0,), (-9.0,) * 40, None, pytest.approx(0.38, abs=1e-2)),
        ((9.0,) * 3, (-9.0,) * 3, None, pytest.approx(0.60, abs=1e-2)),
        ((), (), None, 0.25),
    ],
    ids=["helps", "harms", "one of each", "says nothing", "one pair", "three pairs", "none"],
)
def test_the_weight_follows_the_evidence(
    accepted: tuple[float, ...], rejected: tuple[float, ...], teaches: bool | None, weight: float
) -> None:
    found = compared(accepted, rejected)
    assert found.teaches is teaches
    assert found.weight(rewards=True) == weight


@pytest.mark.parametrize(("accepted", "alone"), [(-0.1, 0.0), (0.1, 0.38)])
def test_alone_what_rather_pulls_away_counts_for_nothing(accepted: float, alone: float) -> None:
    found = compared((accepted,), (0.0, 0.01, 0.0))
    assert found.teaches is None
    assert 0 < found.weight(rewards=True) < 1, "rewards keep it small"
    assert found.weight(rewards=False) == pytest.approx(alone, abs=0.01)


@given(accepted=GAINS, rejected=GAINS, shift=st.integers(-5, 5))
def test_what_every_reply_gains_alike_says_nothing(
    accepted: list[float], rejected: list[float], shift: int
) -> None:
    """How a text disturbs a prompt, and what the base thinks of it, is in both."""
    found = compared(accepted, rejected)
    moved = compared([g + shift for g in accepted], [g + shift for g in rejected])
    assert moved.difference == found.difference
    assert moved.evidence == found.evidence
    turned = compared(rejected, accepted)
    assert (turned.helps, turned.harms) == pytest.approx((found.harms, found.helps))


def test_what_helped_with_one_wish_counts_for_less_and_less_when_it_does_no_more() -> None:
    helped = [(True, 0.3), (False, -0.1)] * 60
    assert teachability(helped).teaches
    for pairs, most in ((4, 1.0), (16, 0.5), (32, 0.35)):
        nothing = [(True, 0.0), (False, 0.1), (True, 0.1), (False, 0.0)] * (pairs // 2)
        assert teachability(helped + nothing).weight(rewards=True) <= most
    harmed = [(True, -0.1), (False, 0.3)] * 16
    assert teachability(helped + harmed).teaches is False


def test_it_is_told_in_words() -> None:
    assert str(compared((), (0.1,) * 9)) == (
        "whether they help is not known yet (0 accepted, 9 rejected; no evidence yet)"
    )
    assert str(compared((-0.1,) * 10, (0.1,) * 10)) == (
        "they do not help: with them accepted replies gain -0.200 nats a token on rejected ones "
        "(10 accepted, 10 rejected; evidence 24 to 1)"
    )
