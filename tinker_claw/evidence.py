"""Anytime-valid tests and intervals: they hold however often one looks.

An e-value is the capital of somebody who started with 1 and bet against "no difference" at fair
odds. If there is none, the capital ever reaches 20 with a probability of at most 1/20, however
often one looks and whenever one stops (Ville 1939; Ramdas, Grünwald, Vovk and Shafer 2023, Stat.
Sci. 38:576-601), and 1/e is a p-value at any time. So a claim needs `CLAIM`, and no sample size has
to be fixed. Outcomes lie between 0 and 1; given those before, each has the same mean.

Rule: the fields of a test are all its state, a few numbers; a new object starts from nothing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

CLAIM = 20.0
"""Smallest e-value at which a difference is claimed: 1 / 0.05."""
_MOST = 600.0
"""Largest logarithm of an e-value; exp of more overflows a float."""
_NONE = 1e-300
"""Stand-in for 0 inside a logarithm."""


@dataclass(slots=True)
class Rate:
    """Share of good outcomes."""

    good: float = 0.0
    of: int = 0

    def add(self, outcome: float) -> None:
        self.good, self.of = self.good + outcome, self.of + 1

    @property
    def value(self) -> float:
        return self.good / max(self.of, 1)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence sequence: all rates against which a mixture of Bernoulli likelihood
        ratios by Beta(1/2, 1/2) has not reached `CLAIM` (Robbins 1970, Ann. Math. Stat. 41:1397).
        Outcomes between 0 and 1 make it wider, never too narrow: a ** x is convex in x."""
        return _interval(self.good, self.of)


def record(rate: Rate) -> dict[str, Any]:
    """Return the counts of a rate, its value as `share`, and the ends of its interval."""
    low, high = rate.interval
    return {**asdict(rate), "low": low, "high": high, "share": rate.value}


in_words = "{share:.0%} ({low:.0%} to {high:.0%}) of {of}".format_map
"""Describe the record of a rate."""


@dataclass(slots=True)
class TwoRates:
    """Test of whether two rates differ, for outcomes that arrive in any order and any
    proportion."""

    a: Rate
    b: Rate

    @property
    def e_value(self) -> float:
        """A Bayes mixture over both rates, divided by the largest likelihood of one common rate:
        universal inference (Wasserman, Ramdas and Balakrishnan 2020, PNAS 117:16880-16890, sec. 8).
        The prior density 6 (a - b) ** 2 looks for large differences first. (The e-variables of
        Turner, Ly and Grünwald 2024, J. Stat. Plan. Inference 230:106116, need blocks of fixed
        composition; in pairs they took as many sessions.)"""
        a, b = self.a, self.b
        common = Rate(a.good + b.good, a.of + b.of)
        mixed = _mixed(a, 1) + _mixed(b, 1) - _log_likelihood(common, common.value)
        (mean_a, square_a), (mean_b, square_b) = map(_moments, (a, b))
        apart = 6 * (square_a - 2 * mean_a * mean_b + square_b)
        return math.exp(min(mixed + math.log(apart), _MOST))


def odds(e_value: float) -> str:
    """Describe an e-value in words."""
    if e_value < 1.5:
        return "no evidence yet"
    return f"evidence {min(e_value, 1e6):,.0f} to 1"


@lru_cache(4096)
def _interval(good: float, of: int) -> tuple[float, float]:
    """Return the ends of an interval; cached, as versions by the hundred have the same counts."""
    rate = Rate(good, of)
    least = _mixed(rate, 0.5) - math.log(math.pi * CLAIM)
    return _edge(rate, least, 0.0), _edge(rate, least, 1.0)


def _mixed(rate: Rate, prior: float) -> float:
    """Return the log likelihood of the outcomes, integrated over Beta(prior, prior) times its
    norm."""
    good, bad = rate.good + prior, rate.of - rate.good + prior
    return math.lgamma(good) + math.lgamma(bad) - math.lgamma(good + bad)


def _moments(rate: Rate) -> tuple[float, float]:
    """Return the means of the rate and of its square under Beta(1, 1) and the outcomes."""
    mean = (rate.good + 1) / (rate.of + 2)
    return mean, mean * (rate.good + 2) / (rate.of + 3)


def _log_likelihood(rate: Rate, at: float) -> float:
    counts = ((rate.good, at), (rate.of - rate.good, 1 - at))
    return sum(n * math.log(max(p, _NONE)) for n, p in counts)


def _edge(rate: Rate, least: float, end: float) -> float:
    """Return the rate, from the observed one towards `end`, at which the log likelihood falls to
    `least`."""
    inside = rate.value
    for _ in range(40):
        middle = (inside + end) / 2
        if _log_likelihood(rate, middle) > least:
            inside = middle
        else:
            end = middle
    return end
