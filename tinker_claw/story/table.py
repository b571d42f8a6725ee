"""Records as an aligned table, and single values as people write them. Pure.

Rule: a cell holds one line, without what would steer a terminal: clients choose parts of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, and what it shows of a record."""

    name: str
    show: Callable[[Mapping[str, Any]], str]
    right: bool = False
    least: int = 0
    """Least width, so that lines that come later fit."""


def table(columns: Sequence[Column], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The heading, and one line a record."""
    rows = [[column.name for column in columns], *cells(columns, records)]
    widths = [max(column.least, *(len(row[i]) for row in rows)) for i, column in enumerate(columns)]
    return [_line(columns, row, widths) for row in rows]


def cells(columns: Sequence[Column], records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """What stands in the columns for each record."""
    return [[printable(column.show(record)) for column in columns] for record in records]


def _line(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int]) -> str:
    fitted = [
        cell.rjust(width) if column.right else cell.ljust(width)
        for column, cell, width in zip(columns, row, widths, strict=True)
    ]
    return GAP.join(fitted).rstrip()


def printable(text: str) -> str:
    """On one line, and without control characters."""
    return "".join(c if c.isprintable() else " " for c in text)


def short(text: str, length: int) -> str:
    """At most so many characters."""
    return text if len(text) <= length else text[: length - 1] + "…"


def moment(at: float, now: float | None = None) -> str:
    """Local time, with the day where it is another one than today."""
    then = datetime.fromtimestamp(at)
    today = datetime.fromtimestamp(time.time() if now is None else now).date()
    return then.strftime("%H:%M:%S" if then.date() == today else "%Y-%m-%d %H:%M:%S")


def vote(value: int | None) -> str:
    """+1, 0 or -1; `none` where no vote was valid."""
    return "none" if value is None else f"{value:+d}" if value else "0"


def number(value: float | None) -> str:
    """Three figures; `-` where it is not known."""
    return "-" if value is None else f"{value:.3g}"


def apart(metrics: Mapping[str, Any]) -> str:
    """Sampler and trainer, standard deviation in nats; marked where it is more than rounding."""
    return number(metrics.get("agreement_sd")) + "!" * (metrics.get("agrees") is False)
