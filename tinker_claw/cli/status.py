"""`tinker-claw status`: show the state of the running gateway and the progress of its run.

Rule: the first line says whether it helps. Then follows what is wrong, since when, and what that
means to the user. Figures come last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import click

from tinker_claw.app import orders
from tinker_claw.cli.common import (
    Invocation,
    command,
    field_lines,
    note,
    table,
    url_of,
    wrapped,
    write,
    write_json,
)
from tinker_claw.cli.log import STEPS
from tinker_claw.errors import ClawError, LedgerError
from tinker_claw.ledger.figures import read_overview
from tinker_claw.ledger.turn_view import Record
from tinker_claw.privacy.marker import NEAR_MISS
from tinker_claw.words import bar, moment, plural, printable, run_fields

EXIT_WELL = 0
EXIT_WRONG = 1
EXIT_UNREACHABLE = 2


@command(
    "status",
    "Asks the gateway that runs on the data directory that --data-dir names, or else these flags. "
    "Exit status: 0 all is well, 1 something is wrong, 2 no gateway runs there (its ledger is "
    "shown).",
)
@click.option("--json", "as_json", is_flag=True, help="print /healthz and the ledger's figures")
def status(invoked: Invocation, as_json: bool) -> int:
    """Show the state of the running gateway (what is wrong, since when, what it means), the
    progress of its run, and whether learning helps."""
    settings, health, overview = invoked.settings, None, None
    directory, problems = settings.run.directory, list[str]()
    try:
        health = orders.health(directory)
        if health is None:
            problems.append(_NO_GATEWAY.format(directory))
    except ClawError as error:
        problems.append(f"No gateway answers: {error}.")
    try:
        batch_size = (health or {}).get("batch_size", settings.training.batch_size)
        overview = read_overview(directory, batch_size)
    except LedgerError as error:
        problems.append(f"No figures of the ledger: {error}.")
    if as_json:
        answer = health or {"status": "unreachable", "error": " ".join(problems)}
        write_json([{**answer, "ledger": overview}])
    else:
        for problem in problems:
            note(problem)
        for headline in overview["headlines"] if overview else ():
            write(wrapped(headline["said"]))
        write(describe(health, url_of(settings), time.time()) if health else ())
        write(board(overview) if overview else ())
    if health is None:
        return EXIT_UNREACHABLE
    return EXIT_WELL if health["status"] == "ok" else EXIT_WRONG


_NO_GATEWAY = (
    "No gateway runs on {0}. Start one with `tinker-claw`, or give the --data-dir of the one that "
    "runs (the lines of its start name it as `records`). If its folder was deleted, stop it, put "
    "the folder back from a backup, and start it again."
)


# What /healthz says


def describe(health: Mapping[str, Any], url: str, now: float) -> list[str]:
    """The lines for a terminal. `now`: seconds since 1970."""
    head = f"tinker-claw at {url}: {health['status']}"
    lines = [head, *_wrong(health, now), health["meaning"]]
    if budget := health.get("budget_usd"):
        month = health.get("month_usd")
        spent, each = (health["spent_usd"], "") if month is None else (month, " a month")
        lines.append(f"${spent or 0:.4f} spent of the budget of ${budget:g}{each}")
    if near := health.get("spending_near"):
        lines.append(near)
    return lines


def _wrong(health: Mapping[str, Any], now: float) -> Iterator[str]:
    def since(part: str) -> str:
        return f"since {moment(health[f'{part}_since'], now)}"

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


def board(seen: Record) -> list[str]:
    """Return the lines of the run's fields, and the table of its last steps, if any."""
    bars = {"next step": f"{bar(seen['samples_waiting'], seen['batch_size'], BAR)} "}
    lines = [""]
    for name, value in run_fields(seen):
        lines += field_lines(name, bars.get(name, "") + value)
    return [*lines, *(["", *table(STEPS, seen["steps"])] if seen["steps"] else [])]
