"""`python -m benchmarks.tracks`: what a gateway costs the environments that train through it.

Many episodes of the tool-call track at a time, played by the track's own runner: against a model
server that takes a fixed time for every reply, and against a gateway whose sampler is that server.
Without the gateway the runner asks the stub for chat completions and gets them whole; with it, the
gateway asks the same process for token ids, as it asks vLLM, and gets them in events, one per token
unless told otherwise; both take equally long. Meanwhile persons talk to the gateway, the stub
judges, and the learner takes steps with a trainer that is elsewhere.

Rule: the sides take turns, and every figure stands with the processor time that it took: where a
core is full, it is the machine that is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks import tracks_person
from benchmarks.gateway_client import Cores, Measured, pinned, server, share
from benchmarks.tracks_stub import MODEL as STUB

Say = Callable[[str], None]
MODEL = Path(__file__).parent.parent / "examples" / "tracks" / "model"
"""Folder of the model whose tokenizer is used."""
_START_S = 180.0
_LOOK_S = 0.2
_GROUP = 8
_REPLIES = 2
"""Replies of an episode."""
_BESIDE = 2
"""Replies by which a run learns which version serves; a gateway knows that they belong to no
episode."""
_NO_END = 1_000_000
_PAUSE_S = 1.0
"""Seconds between a reply and a person's next words, and between two looks at /healthz."""


@dataclass(frozen=True)
class Size:
    """Size of a run."""

    concurrency: int = 128
    """Episodes at a time."""
    rounds: int = 4
    """Episodes of a run, as a multiple of `concurrency`; the first lot is not counted."""
    latency_s: float = 5.0
    tokens: int = 64
    """Tokens of a reply."""
    together: int = 1
    """Tokens per event from the stub to the gateway."""
    persons: int = 4
    slots: tuple[int, ...] = (160, 64)
    """Values of --max-concurrent of the gateways that are measured."""
    batch: int = 64
    step_s: float = 5.0
    repeat: int = 3


@dataclass(frozen=True)
class Side:
    """Figures of one run of the track."""

    what: str
    episodes: int
    per_minute: float
    """Episodes per minute, from the end of the first lot to the end."""
    again: int
    """Turns that were asked for again: those beyond the number that the episodes have."""
    load: float
    """Load of the machine, when the run ended."""
    cpu_ms: Mapping[str, float]
    """Processor time per turn, in milliseconds: of the environments, the stub and the gateway."""
    full: float
    """Share of its core that the busiest of them used."""
    waits_ms: Sequence[float] = ()
    """Waits of people's turns for a slot of the gateway, in milliseconds."""
    asked: int = 0
    """Number of people's turns."""
    learner_waits: float | None = None
    """Share of the time in which the learner waited for samples."""
    steps: int = 0
    health_ms: float | None = None
    """Longest wait for /healthz, in milliseconds."""


@dataclass
class Figures:
    """Figures of all sides, in the order in which they ran."""

    size: Size
    sides: list[Side] = field(default_factory=list[Side])

    def of(self, what: str) -> list[Side]:
        return [side for side in self.sides if side.what == what]

    def ratios(self, what: str) -> list[float]:
        """Episodes per minute, as a share of those without a gateway in the same repetition."""
        pairs = zip(self.of(what), self.of(ALONE), strict=False)
        return [side.per_minute / alone.per_minute for side, alone in pairs]


ALONE = "no gateway"


def through(slots: int) -> str:
    return f"gateway, --max-concurrent {slots}"


async def measure(folder: Path, size: Size, say: Say) -> Figures:
    """Run all sides in turn, as often as asked."""
    cores, everywhere, figures = Cores.take(), os.sched_getaffinity(0), Figures(size)
    os.sched_setaffinity(0, {cores.client})
    stub_flags = (str(MODEL), str(size.latency_s), str(size.tokens), str(size.together))
    try:
        with server("tracks_stub", cores.client, *stub_flags) as stub:
            for number in range(size.repeat):
                say(f"{number + 1} of {size.repeat}: {ALONE}")
                place = folder / f"{number}-alone"
                figures.sides.append(await _side(ALONE, place, size, stub, None, cores))
                for slots in size.slots:
                    say(f"{number + 1} of {size.repeat}: {through(slots)}")
                    place = folder / f"{number}-{slots}"
                    with gateway(place, stub, slots, size, cores) as at:
                        side = await _side(through(slots), place, size, stub, at, cores)
                    figures.sides.append(side)
    finally:
        os.sched_setaffinity(0, everywhere)
    return figures


@contextmanager
def gateway(
    place: Path, stub: Measured, slots: int, size: Size, cores: Cores
) -> Generator[Measured]:
    """Run the product on its own core; its log is `place`/log."""
    command = [sys.executable, "-m", "benchmarks.tracks_gateway", str(place / "run"), str(MODEL)]
    command += [stub.url, str(slots), str(size.batch), str(size.step_s)]
    with serving(place, pinned(cores.server, command)) as at:
        yield at


@contextmanager
def serving(place: Path, command: Sequence[str]) -> Generator[Measured]:
    """Run a gateway whose log is `place`/log; it is killed at the end."""
    place.mkdir(parents=True)
    with (
        (place / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            until = time.monotonic() + _START_S
            while not (serving := _events(place, "serving")):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"no gateway: {(place / 'log').read_text()[-2000:]}")
                time.sleep(0.1)
            yield Measured(process.pid, serving[0]["url"])
        finally:
            process.kill()
            process.wait()


async def _side(
    what: str, place: Path, size: Size, stub: Measured, at: Measured | None, cores: Cores
) -> Side:
    """Play the track once."""
    processes = {"stub": stub} | ({"gateway": at} if at else {})
    before = {name: process.cpu_s() for name, process in processes.items()}
    health, began = list[float](), time.monotonic()
    # verify=False: loading certificates would be measured, too.
    async with httpx.AsyncClient(timeout=600, verify=False) as http:
        people = list[asyncio.Task[None]]()
        if at is not None:
            people = [asyncio.create_task(_person(http, at)) for _ in range(size.persons)]
            people.append(asyncio.create_task(_look(http, at, health)))
        used = {"environments": await asyncio.to_thread(_play, place, size, at or stub, cores)}
        wall = time.monotonic() - began
        for person in people:
            person.cancel()
        await asyncio.gather(*people, return_exceptions=True)
        said = (await http.get(f"{stub.url}/told")).json()
    used |= {name: process.cpu_s() - before[name] for name, process in processes.items()}
    if at is None:
        ends, turns = said["ends"], said["replies"]
    else:
        ends = [_time(event) for event in _events(place, "feedback")]
        turns = len(_of_episodes(place))
    first = size.concurrency - 1
    side = Side(
        what=what,
        episodes=len(ends),
        again=turns - _REPLIES * len(ends) - (_BESIDE if at is None else 0),
        per_minute=60 * (len(ends) - 1 - first) / (ends[-1] - ends[first]),
        load=os.getloadavg()[0],
        cpu_ms={name: 1e3 * seconds / turns for name, seconds in used.items()},
        full=max(used.get("gateway", 0.0), used["stub"] + used["environments"]) / wall,
    )
    return side if at is None else _with_gateway(side, place, health)


def _play(place: Path, size: Size, at: Measured, cores: Cores) -> float:
    """Run the track as users do; return the processor time of its process in seconds."""
    place.mkdir(parents=True, exist_ok=True)
    track = {
        "environment": "tool-call",
        "model": STUB,
        "concurrency": size.concurrency,
        "group_size": _GROUP,
        "groups": size.concurrency * size.rounds // _GROUP,
        "steps": _NO_END,
        "waiting": _NO_END,
        "max_tokens": 4 * size.tokens,
        "exam_tasks": 0,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in track.items()]
    (place / "track.toml").write_text("\n".join([*lines, "[options]", "digits = 1"]))
    command = [sys.executable, "-m", "examples.tracks", "run", str(place / "track.toml")]
    command += ["--url", at.url, "--out", str(place / "out")]
    seconds = 0.0
    with (
        (place / "runner.log").open("w") as log,
        subprocess.Popen(pinned(cores.client, command), stdout=log, stderr=log) as process,
    ):
        runner = Measured(process.pid, at.url)
        while process.poll() is None:
            with suppress(OSError):
                seconds = runner.cpu_s()
            time.sleep(_LOOK_S)
    if process.returncode:
        raise RuntimeError(f"the track stopped: {(place / 'runner.log').read_text()[-2000:]}")
    return seconds


def _with_gateway(side: Side, place: Path, health: Sequence[float]) -> Side:
    """Add the figures that the gateway's log has."""
    turns = _of_episodes(place)
    persons = [e for e in _events(place, "turn.captured") if not e.get("episode")]
    wall = _time(turns[-1]) - _time(turns[0])
    steps = _events(place, "step")
    busy = sum(event["seconds"] for event in [*steps, *_events(place, "publish")])
    more: dict[str, Any] = {
        "waits_ms": [1e3 * event.get("waited_s", 0.0) for event in persons],
        "asked": len(persons),
        "learner_waits": max(0.0, 1 - busy / wall),
        "steps": len(steps),
        "health_ms": 1e3 * max(health, default=0.0),
    }
    return Side(**(asdict(side) | more))


async def _look(http: httpx.AsyncClient, at: Measured, waits: list[float]) -> None:
    """Ask for /healthz, rarely, so that it costs nothing."""
    while True:
        began = time.perf_counter()
        (await http.get(at.url.removesuffix("v1") + "healthz")).raise_for_status()
        waits.append(time.perf_counter() - began)
        await asyncio.sleep(_PAUSE_S)


async def _person(http: httpx.AsyncClient, at: Measured) -> None:
    """Play a person: ask, read the answer, wait, and ask something else, without end."""
    said = list[dict[str, str]]()
    while True:
        said = [*said[-4:], {"role": "user", "content": f"And how are you now, {len(said)}?"}]
        body = {"model": STUB, "messages": said, "stream": True}
        async with http.stream("POST", f"{at.url}/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_bytes():
                pass
        said = [*said, {"role": "assistant", "content": "I am well."}]
        await asyncio.sleep(_PAUSE_S)


def _events(place: Path, name: str) -> list[dict[str, Any]]:
    lines = (place / "log").read_text().splitlines()
    found = (json.loads(line) for line in lines if f'"event": "{name}"' in line and line[-1] == "}")
    return [event for event in found if event["event"] == name]


def _of_episodes(place: Path) -> list[dict[str, Any]]:
    return [event for event in _events(place, "turn.captured") if event.get("episode")]


def _time(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def show(console: Console, figures: Figures) -> None:
    """Print the tables, and how to read them."""
    size = figures.size
    console.print(
        f"{size.concurrency} episodes of the tool-call track at a time, {size.latency_s:g} s and "
        f"{size.tokens} tokens a reply, {size.together} an event, two replies an episode; "
        f"{size.persons} persons at the gateway; batches of {size.batch}, {size.step_s:g} s a "
        "step. One core for the gateway, another for environments and stub."
    )
    table = Table("side", "episodes/min", "of no gateway", "asked again", "fullest core", "load")
    for side in figures.sides:
        at = figures.of(side.what).index(side)
        ratio = "" if side.what == ALONE else f"{figures.ratios(side.what)[at]:.3f}"
        table.add_row(
            side.what,
            f"{side.per_minute:,.0f}",
            ratio,
            str(side.again),
            f"{side.full:.0%}",
            f"{side.load:.0f}",
        )
    console.print(table)
    table = Table(
        "side", "CPU a turn: gateway", "environments", "stub", "learner waits", "/healthz"
    )
    for what in dict.fromkeys(side.what for side in figures.sides):
        sides = figures.of(what)
        cpu = [
            f"{statistics.median(s.cpu_ms[name] for s in sides):.1f} ms"
            if name in sides[0].cpu_ms
            else ""
            for name in ("gateway", "environments", "stub")
        ]
        waits = [side.learner_waits for side in sides if side.learner_waits is not None]
        health = [side.health_ms for side in sides if side.health_ms is not None]
        table.add_row(
            what,
            *cpu,
            f"{statistics.median(waits):.0%}" if waits else "",
            f"{max(health):.0f} ms at most" if health else "",
        )
    console.print(table)
    for slots in size.slots:
        sides = figures.of(through(slots))
        waits = [wait for side in sides for wait in side.waits_ms]
        if waits:
            console.print(
                f"{through(slots)}: {len(waits)} turns of persons waited for a slot for "
                f"{share(waits, 0.5):.0f} ms (median), {share(waits, 0.95):.0f} ms (p95), "
                f"{max(waits):.0f} ms (longest). Goal: 50 ms (p95)."
            )
        ratio = statistics.median(figures.ratios(through(slots)))
        console.print(f"{through(slots)}: {ratio:.3f} of the episodes per minute. Goal: 0.95.")


def parser() -> argparse.ArgumentParser:
    """Command line of the benchmark."""
    plain = Size()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracks", description=__doc__)
    add = parser.add_argument
    add("--concurrency", type=int, default=plain.concurrency, help="episodes at a time (128)")
    add("--rounds", type=int, default=plain.rounds, help="as often as many, more than one (4)")
    add("--latency", type=float, default=plain.latency_s, help="seconds of a reply (5)")
    add("--tokens", type=int, default=plain.tokens, help="of a reply (64)")
    add("--together", type=int, default=plain.together, help="tokens of an event (1)")
    add("--persons", type=int, default=plain.persons, help="who talk to the gateway meanwhile (4)")
    add("--slots", type=int, nargs="+", default=plain.slots, help="--max-concurrent (160 64)")
    add("--batch", type=int, default=plain.batch, help="samples of a step (64)")
    add("--step", type=float, default=plain.step_s, help="seconds of a step (5)")
    add("--person", action="store_true", help="how a reply feels beside episodes, and no more")
    add("--seconds", type=float, default=30.0, help="that this person talks beside them (30)")
    add("--repeat", type=int, default=plain.repeat, help="times that each side runs (3)")
    add("--directory", type=Path, help="where ledgers and logs are kept; else they are not")
    add("--json", type=Path, help="write everything here, too")
    return parser


def main() -> None:
    """Read flags, measure, print tables and, where asked, a JSON file."""
    asked = parser().parse_args()
    size = Size(
        concurrency=asked.concurrency,
        rounds=asked.rounds,
        latency_s=asked.latency,
        tokens=asked.tokens,
        together=asked.together,
        persons=asked.persons,
        slots=tuple(asked.slots),
        batch=asked.batch,
        step_s=asked.step,
        repeat=asked.repeat,
    )
    console, started = Console(width=120), time.monotonic()

    def say(line: str) -> None:
        console.print(f"{time.monotonic() - started:4.0f} s  {line}", style="dim")

    with tempfile.TemporaryDirectory() as name:
        if asked.person:
            rounds = asyncio.run(
                tracks_person.measure(
                    asked.directory or Path(name),
                    serving,
                    concurrency=size.concurrency,
                    seconds=asked.seconds,
                    repeat=size.repeat,
                )
            )
            return tracks_person.show(console, rounds, size.concurrency)
        figures = asyncio.run(measure(asked.directory or Path(name), size, say))
    show(console, figures)
    if asked.json:
        asked.json.write_text(json.dumps(asdict(figures), indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
