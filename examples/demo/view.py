"""Live view of a run: a panel on a terminal, plain lines anywhere else.

Rule: it only reads `Progress`. On a terminal it redraws four times a second; elsewhere it writes
one line for every new version and every new score.
"""

from __future__ import annotations

import asyncio

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
    return "  ".join(
        (
            f"{progress.seconds:5.0f} s",
            f"steps {progress.version}/{progress.options.steps}",
            f"sessions {_of(progress.sessions, progress.options.sessions)}",
            f"next step {_waiting(progress)}",
            f"verdicts {_verdicts(progress)}",
            f"hints {progress.figures.hints}",
            _last_score(progress),
        )
    )


def panel(progress: Progress) -> RenderableType:
    """The state as a panel."""
    options, health = progress.options, progress.health
    waiting = health.samples_waiting if health else 0
    batch = health.batch_size if health else 1
    bars = Table.grid(padding=(0, 2))
    bars.add_column(min_width=14)
    bars.add_column(width=32)
    bars.add_column(justify="right")
    for name, done, total in (
        ("next step", waiting, batch),
        ("steps", progress.version, options.steps),
        ("sessions", progress.sessions, options.sessions),
    ):
        bar = ProgressBar(total=total, completed=min(done, total))
        bars.add_row(name, bar, _of(done, total))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(min_width=14)
    facts.add_column()
    facts.add_row("policy", f"version {progress.version} answers")
    facts.add_row("verdicts", _verdicts(progress))
    facts.add_row("hints", str(progress.figures.hints))
    facts.add_row("turns", _turns(progress))
    facts.add_row("score", _last_score(progress))
    doing = "scoring the last versions" if progress.last is not None else "the user is talking"
    return Panel(
        Group(bars, Text(), facts),
        title=f"tinker-claw demo: {options.method}",
        subtitle=f"{doing}, {progress.seconds:.0f} s",
        width=72,
    )


def _waiting(progress: Progress) -> str:
    health = progress.health
    return _of(health.samples_waiting, health.batch_size) if health else "-"


def _of(done: int, total: int) -> str:
    """A count and its end; past the end, which is a least number, the count alone."""
    return f"{done}/{total}" if done <= total else str(done)


def _verdicts(progress: Progress) -> str:
    return "  ".join(f"{value}: {count}" for value, count in progress.figures.verdicts.items())


def _turns(progress: Progress) -> str:
    recent = progress.outcomes[-RECENT:]
    if not recent:
        return "-"
    mean = sum(outcome.turns for outcome in recent) / len(recent)
    return f"{mean:.1f} per session, mean of the last {len(recent)}"


def _last_score(progress: Progress) -> str:
    """Newest score. Scores come in the order in which versions were added, not by version."""
    if not progress.scores:
        return "no score yet"
    version = max(progress.scores)
    return f"{progress.scores[version].accepted:.0%} of first replies accepted at step {version}"
