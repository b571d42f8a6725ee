"""Geometry of curves: positions of lines, points and labels. The template `curve.html` draws them
as SVG, so that they need no script and no style of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 360, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 8, 24, 22


@dataclass(frozen=True, slots=True)
class Point:
    """A figure with its interval."""

    at: float
    value: float
    low: float | None = None
    high: float | None = None


def curve(points: Sequence[Point], across: str, unit: str) -> Mapping[str, Any]:
    """Return the drawing of a curve; empty where no point is a number. Other points are left out.

    `grid`: (y, label); `ends`: (x, label, text-anchor); `points`: (x, y, (y of low, y of high) or
    None).

    Args:
        points: ordered by `at`.
        across, unit: what the axes show; that of % goes from 0 to 1 and is labelled in percent.
    """
    finite = [point for point in points if math.isfinite(point.value)]
    if not finite:
        return {}
    values = [0.0, 1.0] if unit == "%" else [point.value for point in finite]
    bottom, top = min(values), max(values)
    if top - bottom < 1e-12:
        bottom, top = bottom - 0.5, top + 0.5
    first, last = finite[0].at, finite[-1].at

    def x(at: float) -> float:
        share = (at - first) / (last - first) if last > first else 0.5
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        share = (value - bottom) / (top - bottom)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM), 1)

    def interval(p: Point) -> tuple[float, float] | None:
        return None if p.low is None or p.high is None else (y(p.low), y(p.high))

    form = "{:.0%}" if unit == "%" else "{:.2g}"
    ends = [(x(first), f"{across} {first:.6g}", "start"), (x(last), f"{last:.6g}", "end")]
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": _LEFT,
        "right": WIDTH - _RIGHT,
        "unit": unit,
        "grid": [(y(v), form.format(v)) for v in (bottom, (bottom + top) / 2, top)],
        "ends": ends if last > first else ends[:1],
        "points": [(x(p.at), y(p.value), interval(p)) for p in finite],
    }
