"""The overview as a view that keeps itself up to date, until interrupted."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tinker_claw.story.board import DEFINED, STEPS, facts, reasons, share_told, step_record
from tinker_claw.story.overview import Overview

EVERY_S = 2.0
"""A glance takes a fraction of this, also with a long ledger."""
_WELL = "green"
_WRONG = "bold red"

Glance = Callable[[], tuple[bool, Sequence[str], Overview | None]]
"""Whether all is well, what the gateway says, and the ledger's overview where there is one."""


def watch(glance: Glance) -> None:
    """Show what `glance` sees, again and again.

    Raises:
        KeyboardInterrupt: the reader has seen enough.
    """
    left = False

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal left
        left = True  # whoever swallows the exception does not keep the view alive
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, leave)
    try:
        with Live(console=Console(), auto_refresh=False) as live:
            while not left:
                live.update(view(*glance()), refresh=True)
                time.sleep(EVERY_S)
    finally:
        signal.signal(signal.SIGINT, before)


def view(well: bool, said: Sequence[str], overview: Overview | None) -> RenderableType:
    """One picture."""
    head = Text("\n".join(said), style=_WELL if well else _WRONG)
    if overview is None:
        return Panel(head, title="tinker-claw")
    parts: list[RenderableType] = [
        Panel(head, title="tinker-claw"),
        Group(
            Text("towards the next step"),
            ProgressBar(total=overview.batch_size, completed=overview.queued, width=60),
        ),
        Text("\n".join(["", *facts(overview), ""])),
        _steps(overview),
        _shares(overview),
        Panel(Text("\n".join(reasons(overview))), title="not trained, or not yet"),
    ]
    return Group(*parts)


def _steps(overview: Overview) -> Table:
    table = Table(title="last steps", title_justify="left", expand=True)
    for column in STEPS:
        table.add_column(column.name, justify="right" if column.right else "left")
    for step in overview.figures.steps:
        table.add_row(*(Text(column.show(step_record(step))) for column in STEPS))
    return table


def _shares(overview: Overview) -> Table:
    table = Table(title="does it help?", title_justify="left", expand=True, caption=DEFINED)
    for name in ("of", "by", "share, and its 95 % interval"):
        table.add_column(name)
    for measure in overview.measures:
        table.add_row(Text(measure.name), "", Text(measure.meaning))
        for share in measure.shares:
            table.add_row("", share.versions, Text(share_told(share)))
    return table
