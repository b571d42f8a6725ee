"""Reports of a run of `benchmarks.training`: tables for people, a document for programs.

Rule: every figure of a table is in the document, and nothing is rounded there.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.training_run import Row

OURS = "ours"
"""Name of the row that the others are compared with."""
COLUMNS = ("tok/s", "ours is", "computed/s", "step s", "TFLOP", "ceiling", "GB", "grad error")
LEGEND = (
    "tok/s: of the samples as they came; ours is: so many times that; computed/s: tokens that the "
    "body computed; step s: the median; TFLOP: executed by a step; ceiling: the share of it that "
    "was reached; GB: {memory}; grad error: beside the reference"
)


@dataclass(frozen=True)
class Figures:
    """All figures of one run."""

    device: str
    device_kind: str
    dtype: str
    torch: str
    attention: str
    """Name of our attention kernel."""
    threads: int
    parameters: int
    ceiling: float
    """Operations per second of a large square matrix product."""
    cases: dict[str, list[Row]]


def tables(figures: Figures) -> list[Table]:
    """Make one table per case."""
    drawn: list[Table] = []
    for name, rows in figures.cases.items():
        table = Table(title=_title(name, rows), title_justify="left")
        table.add_column("side", no_wrap=True)
        for column in COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
        ours = next((row.useful_per_s for row in rows if row.side == OURS), None)
        for row in rows:
            table.add_row(*_cells(row, ours))
        drawn.append(table)
    return drawn


def _title(name: str, rows: list[Row]) -> str:
    return f"{name}: {rows[0].useful_tokens:,} useful tokens" if rows else name


def _cells(row: Row, ours: float | None) -> list[str]:
    error = "" if row.gradient_error is None else f"{row.gradient_error:.1e}"
    if row.failed is not None or row.median_s is None or row.flops is None:
        return [row.side, *[""] * (len(COLUMNS) - 1), error]
    useful, computed = row.useful_per_s or 0.0, row.computed_per_s or 0.0
    return [
        row.side,
        f"{useful:,.0f}",
        "" if ours is None else f"{ours / useful:.2f}x",
        f"{computed:,.0f}",
        f"{row.median_s:.2f}",
        f"{row.flops / 1e12:,.3g}" if row.flops < 1e15 else f"{row.flops / 1e12:,.0f}",
        f"{(row.share or 0.0):.0%}",
        "" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.1f}",
        error,
    ]


def document(figures: Figures) -> dict[str, Any]:
    """All figures as JSON: what was measured and what follows from it."""
    cases = {
        name: [
            asdict(row)
            | {
                "median_s": row.median_s,
                "useful_tokens_per_s": row.useful_per_s,
                "computed_tokens_per_s": row.computed_per_s,
            }
            for row in rows
        ]
        for name, rows in figures.cases.items()
    }
    return asdict(figures) | {"cases": cases}


def screen() -> Console:
    """Console wide enough for the tables, where the terminal does not say its width."""
    return Console(width=None if sys.stdout.isatty() else 112)


def show(figures: Figures, console: Console) -> None:
    """Print the tables, their conditions, and what their columns mean."""
    console.print(
        f"{figures.device}, {figures.dtype}, torch {figures.torch}, {figures.threads} threads; "
        f"{figures.parameters / 1e6:,.1f} M parameters; "
        f"attention by {figures.attention}; "
        f"ceiling {figures.ceiling / 1e12:.3g} TFLOP/s, of a large matrix product",
        highlight=False,
    )
    for rows, table in zip(figures.cases.values(), tables(figures), strict=True):
        console.print(table)
        for row in rows:
            if row.failed is not None:
                console.print(f"{row.side}: {row.failed}", highlight=False)
    cuda = figures.device_kind == "cuda"
    memory = "with weights and the side's own state" if cuda else "what a step adds"
    console.print(LEGEND.format(memory=memory), style="dim", highlight=False)
