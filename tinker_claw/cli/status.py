"""`tinker-claw status`: show the state of the running gateway and the progress of its run.

Rule: the first line says whether it helps. Then follows what is wrong, since when, and what that
means to the user. Figures come last.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from tinker_claw.app import orders
from tinker_claw.cli.common import (
    Column,
    Command,
    field_lines,
    note,
    span,
    table,
    url_of,
    wrapped,
    write,
    write_json,
)
from tinker_claw.cli.log import COLUMNS
from tinker_claw.config.settings import Settings
from tinker_claw.errors import ClawError, ConfigError, LedgerError
from tinker_claw.ledger.figures import read_overview
from tinker_claw.ledger.turn_view import Record
from tinker_claw.privacy.marker import NEAR_MISS
from tinker_claw.words import moment, plural, printable, run_fields

EXIT_WELL = 0
EXIT_WRONG = 1
EXIT_UNREACHABLE = 2
EVERY_S = 2.0
"""Refresh interval of the live view; a refresh takes a fraction of it, also with a long ledger."""


class Status(Command):
    """Show the state of the running gateway (what is wrong, since when, what it means), the
    progress of its run, and whether learning helps."""

    MORE: ClassVar[str] = (
        "Asks the gateway that runs on the data directory that --data-dir names, or else these "
        "flags. Exit status: 0 all is well, 1 something is wrong, 2 no gateway runs there (its "
        "ledger is shown)."
    )

    as_json: bool = Field(
        False,
        alias="json",
        description="print the content of /healthz and the ledger's figures as JSON",
    )
    live: bool = Field(False, description="refresh the view until Ctrl-C")

    def run(self) -> int:
        if self.live:
            if self.as_json:
                raise ConfigError("give one of --live and --json: a view is drawn, JSON is printed")
            if not sys.stdout.isatty():
                raise ConfigError("--live draws on a terminal, and here is none: leave it out")
            _watch(lambda: _look(self.settings))
            return EXIT_WELL
        look = _look(self.settings)
        if self.as_json:
            health = look.health or {"status": "unreachable", "error": " ".join(look.notes)}
            write_json([{**health, "ledger": look.overview}])
            return look.exit_status
        for message in look.notes:
            note(message)
        write([*look.summary, *([""] if look.summary and look.figures else []), *look.figures])
        return look.exit_status


@dataclass(frozen=True, slots=True)
class _Look:
    """State of the gateway and the ledger at one moment."""

    health: Mapping[str, Any] | None
    """Body of /healthz; None: no gateway answers."""
    overview: Record | None
    """Figures of the ledger; None: no ledger was found."""
    notes: Sequence[str]
    summary: Sequence[str]
    """Whether it helps, in a line, and lines about the gateway."""
    figures: Sequence[str]
    """Lines about the ledger."""

    @property
    def exit_status(self) -> int:
        if self.health is None:
            return EXIT_UNREACHABLE
        return EXIT_WELL if self.health["status"] == "ok" else EXIT_WRONG


def _look(settings: Settings) -> _Look:
    health, overview, notes, directory = None, None, list[str](), settings.run.directory
    try:
        health = orders.health(directory)
        if health is None:
            notes.append(
                f"No gateway runs on {directory}. Start one with `tinker-claw`, or give the "
                "--data-dir of the one that runs (the lines of its start name it as `records`)."
            )
            if not directory.exists():
                notes.append(
                    f"{directory} does not exist. If it was deleted under a running gateway, stop "
                    "that one, put the folder back from a backup, and start it again."
                )
    except ClawError as error:
        notes.append(f"No gateway answers: {error}.")
    try:
        batch_size = (health or {}).get("batch_size", settings.training.batch_size)
        overview = read_overview(directory, batch_size)
    except LedgerError as error:
        notes.append(f"No figures of the ledger: {error}.")
    headlines = overview["headlines"] if overview else []
    summary = [line for headline in headlines for line in wrapped(printable(headline["said"]))]
    summary += [] if health is None else describe(health, url_of(settings), time.time())
    return _Look(health, overview, notes, summary, board(overview) if overview else [])


def _watch(look: Callable[[], _Look]) -> None:
    """Refresh the view until Ctrl-C."""
    from rich.console import Group
    from rich.live import Live
    from rich.panel import Panel
    from rich.text import Text

    with suppress(KeyboardInterrupt), Live(auto_refresh=False) as live:
        while True:
            seen = look()
            style = "green" if seen.exit_status == EXIT_WELL else "bold red"
            head = Text("\n".join([*seen.summary, *seen.notes]), style=style)
            figures = Text.from_ansi("\n".join(seen.figures))
            live.update(Group(Panel(head, title="tinker-claw"), figures), refresh=True)
            time.sleep(EVERY_S)


# What /healthz says


def describe(health: Mapping[str, Any], url: str, now: float) -> list[str]:
    """The lines for a terminal. `now`: seconds since 1970."""
    head = f"tinker-claw at {url}: {health['status']}"
    lines = [head, *_wrong(health, now), health["meaning"]]
    if spent := health.get("spent_usd"):
        budget, month = health.get("budget_usd"), health.get("month_usd")
        of = "" if budget is None else f" of the budget of ${budget:g}"
        of = of if month is None else f", ${month:.4f} this month{of} a month"
        lines.append(f"${spent:.4f} spent{of}")
    if near := health.get("spending_near"):
        lines.append(near)
    return lines


def _wrong(health: Mapping[str, Any], now: float) -> Iterator[str]:
    def since(part: str) -> str:
        at = health[f"{part}_since"]
        return f"since {moment(at, now)} ({span(max(0, now - at))} ago)"

    for part in health.get("wrong", ()):
        state = health[part]
        if state == "paused":  # which has a line of its own
            continue
        line = f"  {part}: {state} {since(part)}"
        wait_s = health.get(f"{part}_next_try_s")
        if part == "learner" and state == "stalled":
            line += f", after {plural(health['learner_attempts'], 'attempt')}"
        yield line if wait_s is None else f"{line}; next try in {wait_s:.0f} s"
        error = health.get(f"{part}_error")
        # Parts that wait for the backend do not repeat the error of its outage.
        if error and (part == "backend" or state != "stalled"):
            yield f"    {error}"
    if near_misses := health.get("private_near_misses"):
        yield f"  private: near misses, {plural(near_misses, 'time')} since the start"
        yield f"    {NEAR_MISS}"
    for sentence in health.get("left_out", ()):
        yield f"  left out of requests: {printable(sentence)}"
    for sentence in health.get("unfit", ()):
        yield f"  not trained: {printable(sentence)}"
    if paused := health.get("spending_paused"):
        yield f"  spending: paused {since('learner')}"
        yield f"    {paused}"


# The run, from its ledger

BAR = 24
_LEFT_OUT = ("id", "from", "samples", "lesson", "hinted", "cost")
_STEPS = (
    Column("step", "id"),
    *(column for column in COLUMNS["steps"] if column.name not in _LEFT_OUT),
)


def board(seen: Record) -> list[str]:
    """Return the lines of the run's fields, and the table of its last steps, if any."""
    bars = {"next step": f"[{_bar(seen['samples_waiting'], seen['batch_size'])}] "}
    lines = [
        line
        for name, value in run_fields(seen)
        for line in field_lines(name, f"{bars.get(name, '')}{value}")
    ]
    return [*lines, *(["", *table(_STEPS, seen["steps"])] if seen["steps"] else [])]


def _bar(part: float, whole: float) -> str:
    """Draw a bar that is filled to part / whole."""
    filled = min(BAR, round(BAR * part / whole)) if whole else 0
    return "#" * filled + "." * (BAR - filled)
