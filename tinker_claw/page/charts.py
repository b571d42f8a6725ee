"""Curves as SVG, drawn here, so that they need no script and no style of their own.

Rule: numbers alone go in, so nothing that a user or a model wrote can be in what comes out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 360, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 8, 10, 22


@dataclass(frozen=True, slots=True)
class Point:
    """One figure, with the interval that it lies in."""

    at: float
    value: float
    low: float | None = None
    high: float | None = None


def curve(points: Sequence[Point], *, low: float | None = None, high: float | None = None) -> str:
    """An SVG element; a sentence's place is beside it. Points that are no number are left out.

    Args:
        points: by `at`.
        low, high: ends of the axis; by the points where None.
    """
    shown = [point for point in points if math.isfinite(point.value)]
    if not shown:
        return ""
    values = [v for p in shown for v in (p.value, p.low, p.high) if v is not None]
    bottom = min(values) if low is None else low
    top = max(values) if high is None else high
    if top - bottom < 1e-12:
        bottom, top = bottom - 0.5, top + 0.5
    first, last = shown[0].at, shown[-1].at

    def x(at: float) -> float:
        share = (at - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = (min(max(value, bottom), top) - bottom) / (top - bottom)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-hidden="true" class="curve">',
        *(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(v):.1f}" '
            f'y2="{y(v):.1f}"/><text x="{_LEFT - 4}" y="{y(v) + 4:.1f}" '
            f'text-anchor="end">{_number(v)}</text>'
            for v in (bottom, (bottom + top) / 2, top)
        ),
        *(
            f'<text x="{x(at):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{_number(at)}</text>'
            for at, anchor in ((first, "start"), (last, "end"))[: 1 + (last > first)]
        ),
    ]
    for point in shown:
        if point.low is not None and point.high is not None:
            parts.append(
                f'<line class="interval" x1="{x(point.at):.1f}" x2="{x(point.at):.1f}" '
                f'y1="{y(point.low):.1f}" y2="{y(point.high):.1f}"/>'
            )
    line = " ".join(f"{x(p.at):.1f},{y(p.value):.1f}" for p in shown)
    parts.append(f'<polyline class="line" points="{line}"/>')
    if len(shown) <= 60:
        parts += [
            f'<circle class="dot" cx="{x(p.at):.1f}" cy="{y(p.value):.1f}" r="2.5"/>' for p in shown
        ]
    return "".join([*parts, "</svg>"])


def _number(value: float) -> str:
    return f"{value:.2g}"
