"""Whether learning helps on this user's own traffic, as far as his turns can tell. Pure.

Rule: a share never stands without its interval, and where intervals overlap nothing is claimed.
What he asks changes over time, too: this is a record of use, no experiment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tinker_claw.ledger.figures import VersionFigures

FEWEST = 30
"""Verdicts below which versions are taken together with their neighbours."""
MOST_GROUPS = 5
"""Groups of versions with learning; more say less."""
_Z = 1.959964
"""Of the normal distribution: 95 % lie within."""


@dataclass(frozen=True, slots=True)
class Share:
    """Of the replies of some successive versions."""

    first: int
    last: int
    good: int
    of: int
    low: float
    """The 95 % interval."""
    high: float

    @property
    def value(self) -> float:
        return self.good / self.of

    @property
    def versions(self) -> str:
        return f"v{self.first}" if self.first == self.last else f"v{self.first} to v{self.last}"


@dataclass(frozen=True, slots=True)
class Measure:
    """One question to the record, its answer by groups of versions, and what that means."""

    name: str
    shares: tuple[Share, ...]
    meaning: str


def measures(
    versions: Sequence[VersionFigures], untrained: AbstractSet[int]
) -> tuple[Measure, ...]:
    """Good verdicts, and accepted first replies.

    Args:
        versions: by id.
        untrained: ids of versions that no step has made.
    """
    good = groups(versions, untrained, lambda v: (v.good, v.voted))
    first = groups(versions, untrained, lambda v: (v.accepted, v.firsts))
    return (
        Measure("good verdicts", good, meaning(good)),
        Measure("accepted first replies", first, meaning(first)),
    )


def groups(
    versions: Sequence[VersionFigures],
    untrained: AbstractSet[int],
    count: Callable[[VersionFigures], tuple[int, int]],
) -> tuple[Share, ...]:
    """Successive versions together, so that each group has enough verdicts to say something.

    Versions before any step stay apart from later ones if they have enough; later ones make at
    most `MOST_GROUPS` groups. A small rest at the end belongs to the last group.
    """
    counted = [(v.version, *count(v)) for v in versions if count(v)[1]]
    before = [entry for entry in counted if entry[0] in untrained]
    if sum(of for _, _, of in before) < FEWEST:
        before = []
    after = [entry for entry in counted if entry not in before]
    least = max(FEWEST, math.ceil(sum(of for _, _, of in after) / MOST_GROUPS))
    gathered = [before] if before else []
    gathered += _gather(after, least)
    return tuple(_share(group) for group in gathered)


_Counted = tuple[int, int, int]
"""Version, good, of how many."""


def _gather(counted: Sequence[_Counted], least: int) -> list[list[_Counted]]:
    found = list[list[_Counted]]()
    room = 0
    for entry in counted:
        if room <= 0:
            found.append([])
            room = least
        found[-1].append(entry)
        room -= entry[2]
    if len(found) > 1 and least - room < max(FEWEST, least / 2):
        rest = found.pop()
        found[-1] += rest
    return found


def _share(group: Sequence[_Counted]) -> Share:
    good, of = sum(entry[1] for entry in group), sum(entry[2] for entry in group)
    low, high = wilson(good, of)
    return Share(group[0][0], group[-1][0], good, of, low, high)


def wilson(good: int, of: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927, J. Am. Stat. Assoc. 22:209-212)."""
    p, z2 = good / of, _Z * _Z / of
    middle = (p + z2 / 2) / (1 + z2)
    half = _Z / (1 + z2) * math.sqrt(p * (1 - p) / of + z2 / (4 * of))
    return max(0.0, middle - half), min(1.0, middle + half)


def meaning(shares: Sequence[Share]) -> str:
    """What the first and the last group say together."""
    if not shares:
        return "no verdicts yet"
    if len(shares) == 1:
        return f"nothing to compare yet: {shares[0].of} verdicts, all in one group"
    first, last = shares[0], shares[-1]
    told = f"{_told(last)}, {_told(first)}"
    if last.low > first.high:
        return f"better than at first: {told}"
    if last.high < first.low:
        return f"worse than at first: {told}"
    return f"not enough turns to tell: {told}, and the intervals overlap"


def _told(share: Share) -> str:
    return f"{share.value:.0%} ({share.low:.0%} to {share.high:.0%}) by {share.versions}"
