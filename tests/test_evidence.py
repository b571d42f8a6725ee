"""Sequential claims: how often they are wrong, and how soon a difference is seen."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from random import Random
from statistics import median

import pytest

from tinker_claw.evidence import CLAIM, Rate, TwoRates, odds

LOOKS, RUNS = 400, 200
"""Outcomes per run, with a look after each, and number of runs."""
Draw = Callable[[Random], float]


def chance(rate: float) -> Draw:
    return lambda rng: float(rng.random() < rate)


def halves(rng: Random) -> float:
    return rng.choice((0.0, 0.5, 0.5, 1.0))


def seen(a: Draw, b: Draw, *, first: int = 0, looks: int = LOOKS) -> list[float]:
    """Number of outcomes, on both sides together, after which a difference was claimed; inf: never.

    Args:
        first: outcomes of a that come before all others; the others come as they are drawn.
    """
    found = list[float]()
    for seed in range(RUNS):
        rng, test = Random(seed), TwoRates(Rate(), Rate())
        for look in range(1, looks + 1):
            before = look <= first or (not first and rng.random() < 0.5)
            (test.a if before else test.b).add((a if before else b)(rng))
            if test.e_value >= CLAIM:
                found.append(look)
                break
        else:
            found.append(math.inf)
    return found


def wrong(found: list[float]) -> float:
    return sum(math.isfinite(one) for one in found) / len(found)


@pytest.mark.parametrize(("rate", "first"), [(0.1, 0), (0.5, 0), (0.8, 0), (0.5, 40)])
def test_two_equal_rates_are_rarely_told_apart_however_often_one_looks(
    rate: float, first: int
) -> None:
    assert wrong(seen(chance(rate), chance(rate), first=first)) <= 0.05


def test_neither_are_two_equal_means_of_points() -> None:
    """Outcomes of episodes: half a point is possible, too."""
    assert wrong(seen(chance(0.5), halves)) <= 0.05


@pytest.mark.parametrize(("a", "b", "within"), [(0.34, 0.88, 30), (0.4, 0.8, 70), (0.85, 0.5, 85)])
def test_two_rates_that_differ_are_told_apart_within_so_many_sessions(
    a: float, b: float, within: int
) -> None:
    assert median(seen(chance(a), chance(b))) <= within


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.5, 0.97])
def test_capital_of_a_fair_bet_does_not_grow(rate: float) -> None:
    """Exactly: the mean of the e-value over all results of 8 and 5 outcomes is at most 1."""

    def likely(k: int, n: int) -> float:
        return math.comb(n, k) * rate**k * (1 - rate) ** (n - k)

    held = sum(
        likely(i, 8) * likely(j, 5) * TwoRates(Rate(i, 8), Rate(j, 5)).e_value
        for i in range(9)
        for j in range(6)
    )
    assert 0 < held <= 1


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_interval_holds_the_rate_at_every_look(rate: float) -> None:
    left = 0
    for seed in range(RUNS // 2):
        rng, found = Random(seed), Rate()
        for _ in range(LOOKS // 4):
            found.add(rng.random() < rate)
            low, high = found.interval
            if not low <= rate <= high:
                left += 1
                break
    assert left <= 0.05 * RUNS / 2


def test_interval_ends_where_the_mixture_is_twenty_times_as_likely() -> None:
    """B(7.5, 43.5) / B(1/2, 1/2) against p^7 (1 - p)^43, by an independent integral."""
    steps = 20_000
    mixed = 0.0
    for n in range(steps):  # over the angle whose sine squared is the rate
        rate = math.sin((n + 0.5) / steps * math.pi / 2) ** 2
        mixed += rate**7 * (1 - rate) ** 43 / steps
    for bound in Rate(7, 50).interval:
        assert mixed / (bound**7 * (1 - bound) ** 43) == pytest.approx(CLAIM, rel=1e-4)
    assert Rate().interval == (0.0, 1.0)
    assert Rate(0, 9).interval[0] == 0.0
    assert Rate(9, 9).interval[1] == 1.0


def test_state_is_a_few_numbers_and_nothing_overflows() -> None:
    rates = TwoRates(Rate(0, 9), Rate(9, 9))
    stored = json.loads(json.dumps(asdict(rates)))
    assert TwoRates(*(Rate(**stored[name]) for name in "ab")) == rates
    assert TwoRates(Rate(), Rate()).e_value == pytest.approx(1.0)
    assert TwoRates(Rate(0, 10**6), Rate(10**6, 10**6)).e_value < math.inf
    assert [odds(e) for e in (0.4, 31.4)] == ["no evidence yet", "evidence 31 to 1"]
