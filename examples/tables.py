"""Tables in Markdown, and the interval of a share."""

from collections.abc import Iterable, Iterator, Sequence
from math import sqrt
from statistics import NormalDist

Z = NormalDist().inv_cdf(0.975)
"""Half of a 95 % interval, in standard errors."""


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table."""
    for cells in (heads, ("---",) * len(heads), *rows):
        yield f"| {' | '.join(map(str, cells))} |"


def wilson(good: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    mean = good / of
    middle = mean + Z * Z / (2 * of)
    half = Z * sqrt((mean * (1 - mean) + Z * Z / (4 * of)) / of)
    low, high = ((middle + side) / (1 + Z * Z / of) for side in (-half, half))
    return max(0.0, low), min(1.0, high)


def share(good: int, of: int) -> str:
    """Describe a share with its interval, in percent."""
    low, high = wilson(good, of)
    return f"{good} of {of}, {good / of:.1%} [{low:.1%}, {high:.1%}]"
