"""Whether it helps: the interval, the groups, and what is claimed of them."""

from __future__ import annotations

import math

import pytest

from tinker_claw.ledger.figures import (
    FEWEST,
    Measure,
    Share,
    VersionFigures,
    groups,
    measures,
)


def version(number: int, good: int, of: int, accepted: int = 0, firsts: int = 0) -> VersionFigures:
    return VersionFigures(number, of, of, good, of - good, firsts, accepted)


def grouped(*versions: VersionFigures, untrained: frozenset[int] = frozenset({0})) -> list[str]:
    found = groups(versions, untrained, lambda v: (v.good, v.voted))
    return [f"{share.versions}: {share.good}/{share.of}" for share in found]


@pytest.mark.parametrize(
    ("good", "of", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17:857-872, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_interval_is_that_of_the_literature(good: int, of: int, low: float, high: float) -> None:
    found = Share(0, 0, good, of).interval
    assert [round(bound, 4) for bound in found] == [low, high]


def test_interval_solves_its_own_equation() -> None:
    """Both ends are where the share is 1.96 standard errors away."""
    for bound in Share(0, 0, 7, 50).interval:
        error = math.sqrt(bound * (1 - bound) / 50)
        assert abs(7 / 50 - bound) / error == pytest.approx(1.959964)


def test_versions_with_few_verdicts_are_taken_together() -> None:
    assert grouped(version(0, 5, 10), version(1, 6, 10), version(2, 9, 10)) == ["v0 to v2: 20/30"]
    assert grouped(version(0, 10, 40), version(1, 6, 20), version(2, 9, 20)) == [
        "v0: 10/40",
        "v1 to v2: 15/40",
    ]
    assert grouped(version(0, 1, 5)) == ["v0: 1/5"]
    assert grouped(version(3, 0, 0)) == []


def test_base_stays_apart_and_many_versions_make_few_groups() -> None:
    many = [version(n, n % 20, 20) for n in range(2, 202)]
    found = groups([version(0, 9, 30), *many], frozenset({0}), lambda v: (v.good, v.voted))
    assert (found[0].versions, found[0].of) == ("v0", 30)
    assert len(found) <= 6
    assert sum(share.of for share in found) == 30 + 200 * 20
    assert all(share.of >= FEWEST for share in found)


def test_a_small_rest_at_the_end_belongs_to_the_last_group() -> None:
    assert grouped(version(0, 10, 40), version(1, 20, 40), version(2, 1, 2)) == [
        "v0: 10/40",
        "v1 to v2: 21/42",
    ]


def meaning(*shares: Share) -> str:
    return Measure("good verdicts", shares).meaning


def share(first: int, good: int, of: int) -> Share:
    return Share(first, first, good, of)


def test_nothing_is_claimed_where_intervals_overlap() -> None:
    assert meaning(share(0, 20, 50), share(1, 25, 50)) == (
        "not enough turns to tell: 50% (37% to 63%) by v1, 40% (28% to 54%) by v0, and the "
        "intervals overlap"
    )
    assert meaning(share(0, 200, 500), share(1, 250, 500)).startswith("better than at first: 50%")
    assert meaning(share(0, 45, 50), share(4, 10, 50)) == (
        "worse than at first: 20% (11% to 33%) by v4, 90% (79% to 96%) by v0"
    )
    assert meaning(share(0, 45, 50)) == "nothing to compare yet: 50 verdicts, all in one group"
    assert meaning() == "no verdicts yet"


def test_both_measures_are_of_their_own_counts() -> None:
    versions = [version(0, 10, 100, accepted=30, firsts=40), version(1, 90, 100, 35, 40)]
    good, first = measures(versions, frozenset({0}))
    assert [(s.good, s.of) for s in good.shares] == [(10, 100), (90, 100)]
    assert [(s.good, s.of) for s in first.shares] == [(30, 40), (35, 40)]
    assert good.meaning.startswith("better")
    assert first.meaning.startswith("not enough turns to tell")
