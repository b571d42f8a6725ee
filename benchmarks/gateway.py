"""`python -m benchmarks.gateway`: what the gateway costs per request of an agent.

The sampler answers at once; everything else is real: HTTP over loopback, a vocabulary of Qwen3's
size, the ledger in SQLite. The server has one core, the client another. Requests have OpenClaw's
shape and size. Beside it: a FastAPI route that only reads the JSON. Afterwards the prompt of every
request is compared with a full render.

Rule: every server is measured in the same run, by the same client, with the same requests;
multiples of the bare route's times were measured in turn with it. The log is written as in the
product.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import vocabulary
from benchmarks.agent_requests import unseen
from benchmarks.gateway_check import Check, check
from benchmarks.gateway_client import Cores, server
from benchmarks.gateway_rows import (
    FIRST,
    FULL,
    FURTHER,
    QUICK,
    Beside,
    Memory,
    Row,
    Size,
    Wire,
    beside,
    crowd,
    long_sessions,
    memory,
    never_seen,
    opening,
    openings,
    relaying,
)

Say = Callable[[str], None]
BUSY = 0.9
"""Least share of its core that a busy server should get."""
SILENCE_MS = 50.0
"""Longest silence in milliseconds that users do not notice, even if the bare route's is shorter."""
FLAT = 1.1
"""Largest accepted growth of memory, as a factor."""


MOST = {FIRST: 5.0, FURTHER: 3.2}
"""Largest accepted multiples of the bare route's times."""


@dataclass
class Figures:
    """All figures of one run."""

    vocabulary: int
    beside: Beside
    bare: list[Row]
    """Rows of the bare route: a first turn, a further one, and relayed tokens."""
    ours: list[Row]
    memory: list[Memory]
    check: Check
    memory_every: int
    failures: list[str]
    """Failed requests to the gateway."""

    def multiple(self, row: Row) -> float | None:
        """Processor time of the server as a multiple of the bare route's; None: not counted."""
        same = {bare.what: bare for bare in self.bare}
        bare = same.get(row.what, self.bare[0])
        return row.cpu_ms / bare.cpu_ms if row.cpu_ms and bare.cpu_ms else None


async def measure(folder: Path, size: Size, say: Say, *, ids: int = vocabulary.FULL) -> Figures:
    """Run the benchmark once. `ids`: size of the vocabulary."""
    cores, everywhere = Cores.take(), os.sched_getaffinity(0)
    tokenizer = vocabulary.load(ids, say)
    os.sched_setaffinity(0, {cores.client})
    try:
        directory = folder / "ledger"
        with (
            server("bare_server", cores.server) as plain,
            server("gateway_server", cores.server, str(directory), str(tokenizer)) as at,
        ):
            bare, wire = Wire(plain, cores.client), Wire(at, cores.client)
            say("a bare route and the gateway in turn: first and further turns")
            compared = await beside(bare, wire, size)
            relayed = await relaying(bare, size)
            ours = [*compared.ours, *await _gateway(wire, size, say)]
            say(f"memory: twice {size.memory:,} requests")
            grown = await memory(wire, size, say)
        say(f"comparing {len(wire.sent):,} prompts with a full render")
    finally:
        os.sched_setaffinity(0, everywhere)
    checked = check(directory, tokenizer, wire.sent, len(everywhere))
    return Figures(
        vocabulary=ids + len(vocabulary.ADDED),
        beside=compared,
        bare=[*compared.bare, *relayed],
        ours=ours,
        memory=grown,
        check=checked,
        memory_every=size.memory_every,
        failures=wire.failures,
    )


async def _gateway(wire: Wire, size: Size, say: Say) -> list[Row]:
    say(f"the gateway: sessions of {size.long} turns")
    rows = [await never_seen(wire, size), *await long_sessions(wire, size)]
    say("the gateway: tokens one by one")
    rows += await relaying(wire, size)
    say(f"the gateway: {size.crowd} in flight")
    seen = openings(wire, max(size.crowd, size.together), "crowd")
    strange = [opening(wire, s, f"unseen-{n}") for n, s in enumerate(unseen(size.crowd))]
    for what, talks in (("seen", seen), ("unseen", strange)):
        rows.append(await crowd(wire, size, f"prompts {what}", talks))
    return rows


def show(console: Console, figures: Figures) -> None:
    """Print the tables, and how to read them."""
    checked = figures.check
    console.print(
        f"Requests of {checked.smallest // 1000} to {checked.largest // 1000} kB, "
        f"{checked.median_tokens:,} tokens at the median, {checked.bytes_per_token:.1f} bytes a "
        f"token (OpenClaw's with Qwen3: 4.3); a vocabulary of {figures.vocabulary:,} ids, trained "
        "on this machine's Python files in Qwen3's manner (its ids are not Qwen3's). "
        f"One core for the server; {FULL} in flight for requests/s and CPU. The bare route is "
        "FastAPI and reads the JSON."
    )
    table = Table("what", "median", "p95", "CPU", "x bare", "req/s", "errors", "/healthz")
    for row in figures.bare:
        _add(table, f"bare route: {row.what}", row)
    for row in figures.ours:
        _add(table, f"ours: {row.what}", row, figures.multiple(row))
    console.print(table)
    for goal, met in verdicts(figures).items():
        console.print(f"{goal}: {'met' if met else 'not met'}", style="" if met else "bold")
    early, late = (row for row in figures.ours if row.what.startswith("turn "))
    console.print(f"{late.what} / turn 4, median: {late.median_ms / early.median_ms:.2f}")
    table = Table("memory of the gateway", "requests", "RSS", "grown by")
    start = figures.memory[0].rss_mb
    for point in figures.memory:
        grown = f"{point.rss_mb - start:+z.1f} MB"
        table.add_row(point.what, f"{point.requests:,}", f"{point.rss_mb:,.0f} MB", grown)
    console.print(table)
    console.print(
        f"ids equal to a full render by the plain package: verified {checked.equal:,} of "
        f"{checked.requests:,} (all requests, but of those for memory one in "
        f"{figures.memory_every})"
    )
    for failure in figures.failures[:3]:
        console.print(f"failed: {failure}")
    shares = [row.core for row in figures.ours if row.core is not None]
    if min(shares) < BUSY:
        console.print(
            f"The server got {min(shares):.0%} of its core at the least: other processes wanted it,"
            " too; trust CPU before the clock."
        )


def _add(table: Table, name: str, row: Row, multiple: float | None = None) -> None:
    table.add_row(
        name,
        _shown(row.median_ms),
        _shown(row.p95_ms),
        _shown(row.cpu_ms) if row.cpu_ms else "",
        "" if multiple is None else f"{multiple:.1f}",
        "" if row.per_s is None else f"{row.per_s:,.0f}",
        str(row.errors),
        "" if row.health_ms is None else f"{row.health_ms:.0f} ms",
    )


def verdicts(figures: Figures) -> dict[str, bool]:
    """Return whether each goal that spans several rows was met."""
    met = dict[str, bool]()
    for multiples in figures.beside.multiples:
        most = MOST[multiples.what]
        for how, multiple in (("median", multiples.clock), ("CPU", multiples.cpu)):
            met[f"{multiples.what}, {how}: {multiple:.2f} times bare, at most {most}"] = (
                multiple <= most
            )
    quiet, bare = figures.beside.silence_ms, figures.beside.bare_silence_ms
    met[
        f"longest silence: {quiet:.0f} ms, the bare route's {bare:.0f} ms, at most that or "
        f"{SILENCE_MS:.0f} ms"
    ] = quiet <= max(bare, SILENCE_MS)
    grown = figures.memory[-1].rss_mb / figures.memory[0].rss_mb
    met[f"memory: {grown:.2f} times that after warming up, at most {FLAT}"] = grown <= FLAT
    ids = figures.check
    met[f"ids equal to a full render: {ids.equal:,} of {ids.requests:,}, all"] = (
        ids.equal == ids.requests
    )
    return met


def _shown(ms: float) -> str:
    return f"{ms:.2f} ms" if ms >= 1 else f"{1000 * ms:.0f} µs"


def parser() -> argparse.ArgumentParser:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--memory", type=int, help="turns and sessions for memory (10,000)")
    return parser


def main() -> None:
    """Read flags, measure, and print tables."""
    arguments = parser().parse_args()
    size = QUICK if arguments.quick else Size()
    if arguments.memory is not None:
        size = replace(size, memory=arguments.memory)
    console, started = Console(width=120), time.monotonic()

    def say(line: str) -> None:
        console.print(f"{time.monotonic() - started:4.0f} s  {line}", style="dim")

    with tempfile.TemporaryDirectory() as name:
        figures = asyncio.run(measure(Path(name), size, say))
    show(console, figures)
    console.print(f"{time.monotonic() - started:.0f} s", style="dim")


if __name__ == "__main__":
    sys.exit(main())
