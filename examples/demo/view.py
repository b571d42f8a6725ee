"""Live view of a run: a panel on a terminal, plain lines anywhere else.

Rule: it only reads `Progress`. On a terminal it redraws four times a second; elsewhere it writes
one line for every new version and every new score.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from examples.demo.progress import Progress

REDRAW_S = 0.25
RECENT = 12
"""Sessions over which the turns are averaged."""


async def show(progress: Progress, console: Console) -> None:
    """Show the run until cancelled."""
    await (_show_live if console.is_terminal else _show_lines)(progress, console)


async def _show_live(progress: Progress, console: Console) -> None:
    with Live(panel(progress), console=console, auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(REDRAW_S)
            live.update(panel(progress), refresh=True)


async def _show_lines(progress: Progress, console: Console) -> None:
    printed: tuple[int, int] | None = None
    while True:
        now = (progress.version, len(progress.scores))
        if now != printed and progress.health:
            console.print(line(progress), soft_wrap=True, highlight=False)
            printed = now
        await asyncio.sleep(REDRAW_S)


def line(progress: Progress) -> str:
    """The state in one line."""
    counts = (f"{name} {_of(done, total)}" for name, done, total in _counts(progress))
    facts = (f"{name} {text}" for name, text in _facts(progress))
    return "  ".join((f"{progress.seconds:5.0f} s", *counts, *facts))


def panel(progress: Progress) -> RenderableType:
    """The state as a panel."""
    bars, facts = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    for grid in (bars, facts):
        grid.add_column(min_width=14)
    bars.add_column(width=32)
    for name, done, total in _counts(progress):
        bar = ProgressBar(total=total, completed=min(done, total))
        bars.add_row(name, bar, _of(done, total))
    for name, text in _facts(progress):
        facts.add_row(name, text)
    doing = "scoring the last versions" if progress.last is not None else "the user is talking"
    return Panel(
        Group(bars, Text(), facts),
        title=f"tinker-claw demo: {progress.options.method}",
        subtitle=f"{doing}, {progress.seconds:.0f} s",
        width=72,
    )


def _counts(progress: Progress) -> Iterator[tuple[str, int, int]]:
    """Yield what is counted, with its end."""
    options, health = progress.options, progress.health
    yield "steps", progress.version, options.steps
    yield "sessions", progress.sessions, options.sessions
    if health is not None:
        yield "next step", health.samples_waiting, health.batch_size


def _of(done: int, total: int) -> str:
    """A count and its end; past the end, which is a least number, the count alone."""
    return f"{done}/{total}" if done <= total else str(done)


def _facts(progress: Progress) -> Iterator[tuple[str, str]]:
    """Yield what else is known. Scores come in the order in which versions were added."""
    verdicts = progress.figures.verdicts.items()
    yield "verdicts", "  ".join(f"{value}: {count}" for value, count in verdicts)
    yield "hints", str(progress.figures.hints)
    if recent := progress.outcomes[-RECENT:]:
        yield "turns per session", f"{fmean(outcome.turns for outcome in recent):.1f}"
    if scores := progress.scores:
        step = max(scores)
        yield "accepted", f"{scores[step].accepted:.0%} of first replies at step {step}"
