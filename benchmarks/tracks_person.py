"""`python -m benchmarks.tracks --person`: how a reply feels to a person beside 128 episodes.

One gateway, as `run.py` starts it for the shipped beginner, which samples and learns in its own
process. A person talks to it alone, then while the tool-call track is played by its own runner,
then alone again; each has the same pause between a reply and the next words.

Rule: what is compared was measured in one run, a round after the other.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.gateway_client import Measured, share

GOAL = 3.0
_PAUSE_S = 0.2
_SETTLES_S = 3.0
"""Seconds from an episode's first question until all episodes ask."""
_MODEL = "demo-tracks"
_TURNS = 'tinker_claw_slot_wait_seconds_count{of="episode"}'
_ROOT = Path(__file__).parent.parent
_TRACK = _ROOT / "configs" / "tracks" / "tool-call.toml"

Serving = Callable[[Path, Sequence[str]], AbstractContextManager[Measured]]
"""Starts a gateway by its command, with its log in a folder."""


@dataclass
class Felt:
    """Reply times of a person, in seconds from the request."""

    first: list[float] = field(default_factory=list[float])
    """Times to the first words."""
    whole: list[float] = field(default_factory=list[float])


@dataclass
class Round:
    """Reply times alone and beside episodes, in one gateway."""

    alone: Felt
    beside: Felt
    turns_per_minute: float
    """Episodes' turns per minute meanwhile."""
    load: float

    def ratio(self, what: str, part: float) -> float:
        """Ratio of the times beside episodes to those alone."""
        beside, alone = (getattr(felt, what) for felt in (self.beside, self.alone))
        return share(beside, part) / share(alone, part)


def command(folder: Path) -> list[str]:
    """Command that starts the gateway, as a user would."""
    config = _ROOT / "configs" / "tracks" / "gateway" / "demo-tracks.toml"
    flags = ["--port", "0", "--api-key", "none", "--data-dir", str(folder / "run")]
    flags += ["--config", str(config)]
    return [sys.executable, str(_ROOT / "run.py"), *flags]


async def measure(
    folder: Path, serving: Serving, *, concurrency: int, seconds: float, repeat: int
) -> list[Round]:
    """Run this many rounds, each in a gateway of its own."""
    rounds = list[Round]()
    for number in range(repeat):
        place = folder / str(number)
        with serving(place, command(place)) as at:
            rounds.append(await _round(place, at.url, concurrency, seconds))
    return rounds


async def _round(folder: Path, url: str, concurrency: int, seconds: float) -> Round:
    alone, beside = Felt(), Felt()
    command = [sys.executable, "-m", "examples.tracks", "run", str(_TRACK)]
    command += ["--concurrency", str(concurrency), "--exam-tasks", "0", "--steps", "100000"]
    async with httpx.AsyncClient(timeout=600, verify=False) as http:
        await _talk(http, url, Felt(), seconds / 4)  # what is loaded at first use
        await _talk(http, url, alone, seconds / 2)
        with (folder / "runner.log").open("w") as log:
            runner = await asyncio.create_subprocess_exec(
                *command, "--url", url, "--out", str(folder / "track"), stdout=log, stderr=log
            )
        try:
            while not await _turns(http, url) and runner.returncode is None:  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE_S)
            await asyncio.sleep(_SETTLES_S)
            before = await _turns(http, url)
            await _talk(http, url, beside, seconds)
            played = await _turns(http, url) - before
            if runner.returncode is not None:
                raise RuntimeError(f"the track stopped: {folder / 'runner.log'} says why")
        finally:
            with suppress(ProcessLookupError):
                runner.kill()
            await runner.wait()
        await asyncio.sleep(_SETTLES_S)
        await _talk(http, url, alone, seconds / 2)
    return Round(alone, beside, 60 * played / seconds, os.getloadavg()[0])


async def _talk(http: httpx.AsyncClient, url: str, felt: Felt, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        words = f"And how are you now, {len(felt.whole)}?"
        body = {"model": _MODEL, "messages": [{"role": "user", "content": words}], "stream": True}
        began, first = time.perf_counter(), None
        async with http.stream("POST", f"{url}/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if first is None and '"content":"' in line and '"content":""' not in line:
                    first = time.perf_counter() - began
        felt.whole.append(time.perf_counter() - began)
        felt.first.append(felt.whole[-1] if first is None else first)
        await asyncio.sleep(_PAUSE_S)


async def _turns(http: httpx.AsyncClient, url: str) -> float:
    """Number of episodes' turns so far."""
    said = (await http.get(url.removesuffix("v1") + "metrics")).text
    return sum(float(s.split()[1]) for s in said.splitlines() if s.startswith(_TURNS))


def show(console: Console, rounds: Sequence[Round], concurrency: int) -> None:
    """Print a row per round, and the medians beside the goal."""
    table = Table("round", "person", "replies", "first words ms p50", "p95", "whole ms p50", "p95")
    for number, one in enumerate(rounds, 1):
        for name, felt in (("alone", one.alone), ("beside episodes", one.beside)):
            times = [share(v, p) for v in (felt.first, felt.whole) for p in (0.5, 0.95)]
            table.add_row(
                str(number), name, str(len(felt.whole)), *(f"{1000 * t:.0f}" for t in times)
            )
    console.print(table)
    for what, called in (("first", "first words"), ("whole", "whole reply")):
        ratios = [one.ratio(what, 0.95) for one in rounds]
        console.print(
            f"{called} p95 beside {concurrency} episodes: {statistics.median(ratios):.1f} times "
            f"alone ({', '.join(f'{r:.1f}' for r in ratios)}). Goal: {GOAL:g}."
        )
    for one in rounds:
        console.print(
            f"{one.turns_per_minute:,.0f} turns of episodes a minute, load {one.load:.0f}"
        )
