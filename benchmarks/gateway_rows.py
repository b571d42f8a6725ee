"""Measurements of a server: the requests sent, and the figures of its process meanwhile.

Rule: every row gives the cost of one request in three ways: the time that the client sees, of one
request alone or among so many; processor time of the server; requests a second when its core is
full.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.agent_requests import (
    MIX,
    RELAYED,
    Conversation,
    Surface,
    read_reply,
    relayed,
    unseen,
)
from benchmarks.gateway_client import Answer, Connection, Measured, pulse, share

FULL = 12
"""Requests in flight that keep one core busy."""


@dataclass(frozen=True)
class Size:
    """Number of requests of each kind."""

    alone: int = 120
    """Requests of a row, one after the other."""
    together: int = 240
    """Requests of a row that keep the core full."""
    rounds: int = 10
    """Rounds in which they are sent, to the bare route and to ours in turn."""
    further: int = 6
    """Further turns of a session."""
    crowd: int = 64
    """Requests in flight at the same time."""
    long: int = 98
    """Turns of a long session."""
    streams: tuple[int, ...] = (1, 16, 64)
    """Replies in flight that are relayed token by token."""
    memory: int = 10_000
    """Turns without a successor, and as many sessions."""

    @property
    def memory_every(self) -> int:
        """One request in this many of `memory` has its ids checked."""
        return max(1, self.memory // 250)


FIRST, FURTHER = "first turn of a session", "further turn"
NEVER_SEEN = "first turn, system prompt never seen"
_NEAR = 5
"""Turns whose mean stands for an early turn, and for a late one."""
QUICK = Size(alone=60, together=120, rounds=5, further=4, memory=300)


@dataclass(frozen=True)
class Row:
    """One kind of request at one server."""

    what: str
    median_ms: float
    p95_ms: float
    cpu_ms: float
    """Processor time of the server per request, in milliseconds."""
    per_s: float | None = None
    """Requests per second; None: the core was not kept full."""
    errors: int = 0
    health_ms: float | None = None
    """Longest wait for /healthz meanwhile; None: it was not asked."""
    core: float | None = None
    """Share of its core that the busy server got; below 1, other processes took some."""


@dataclass(frozen=True)
class Memory:
    """Resident memory of the server, in MB, after this many requests of a kind."""

    what: str
    requests: int
    rss_mb: float


@dataclass
class Wire:
    """A server, and the requests that it answered."""

    at: Measured
    client_core: int
    sent: list[bytes] = field(default_factory=list)
    """Bodies that were answered, for the check afterwards."""
    failures: list[str] = field(default_factory=list)
    answered: int = 0

    async def ask(self, connection: Connection, body: bytes, keep: bool = True) -> Answer:
        answer = await connection.ask(body)
        if answer.status != 200 or b'"finish_reason"' not in answer.events:
            raise RuntimeError(f"HTTP {answer.status}: {answer.events[:300]!r}")
        self.answered += 1
        if keep:
            self.sent.append(body)
        return answer


@dataclass
class Timing:
    """Times and errors of a number of requests."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    wall_s: float = 0.0
    errors: int = 0

    def add(self, other: Timing) -> None:
        self.seconds += other.seconds
        self.cpu_s += other.cpu_s
        self.wall_s += other.wall_s
        self.errors += other.errors

    def row(self, what: str, full: Timing | None = None, health: Sequence[float] = ()) -> Row:
        """Make the row. `full`: timing of the same requests while the core was full."""
        many = full or self
        return Row(
            what,
            median_ms=1e3 * statistics.median(self.seconds),
            p95_ms=1e3 * share(self.seconds, 0.95),
            cpu_ms=1e3 * many.cpu_s / len(many.seconds),
            per_s=len(full.seconds) / full.wall_s if full else None,
            errors=self.errors + (full.errors if full else 0),
            health_ms=1e3 * max(health) if health else None,
            core=full.cpu_s / full.wall_s if full else None,
        )


Talk = Callable[[Connection, Timing], Awaitable[None]]


async def run(wire: Wire, talks: Sequence[Talk], width: int) -> Timing:
    """Run all talks, `width` at a time, on connections that are used again."""
    timing, waiting = Timing(), iter(talks)
    connections = [await Connection.open(wire.at.url) for _ in range(width)]

    async def one_by_one(connection: Connection) -> None:
        for talk in waiting:
            try:
                await talk(connection, timing)
            except (OSError, RuntimeError, ValueError, EOFError) as error:
                timing.errors += 1
                wire.failures.append(f"{type(error).__name__}: {error}")

    cpu, started = wire.at.cpu_s(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for connection in connections:
            group.create_task(one_by_one(connection))
    timing.wall_s = time.perf_counter() - started
    timing.cpu_s = wire.at.cpu_s() - cpu
    for connection in connections:
        connection.close()
    return timing


def opening(
    wire: Wire, surface: Surface, key: str, keep: bool = True, about: int | None = None
) -> Talk:
    """Make the first turn of a new session; `about`: a different first message than others of this
    key have."""

    async def talk(connection: Connection, timing: Timing) -> None:
        conversation = Conversation(surface, key)
        conversation.open(about)
        answer = await wire.ask(connection, conversation.body(), keep)
        timing.seconds.append(answer.seconds)

    return talk


def openings(wire: Wire, count: int, name: str) -> list[Talk]:
    return [opening(wire, MIX[n % len(MIX)], f"{name}-{n}") for n in range(count)]


@dataclass(frozen=True)
class Multiple:
    """Ours as a multiple of the bare route's, the median over the rounds."""

    what: str
    clock: float
    """Multiple of the time of one request alone, as its client sees it."""
    cpu: float
    """Multiple of the processor time while the core was full."""


@dataclass(frozen=True)
class Beside:
    """Rows of both servers from alternating rounds, so that other load on the machine hits both."""

    bare: list[Row]
    ours: list[Row]
    multiples: list[Multiple]
    bare_silence_ms: float
    """Longest wait for /healthz in any round."""
    silence_ms: float


async def first_turns(wire: Wire, size: Size, name: str = "first") -> tuple[Timing, Timing]:
    """Time one round of new sessions whose system prompts were seen before: alone, and with the
    core full."""
    return (
        await run(wire, openings(wire, -(-size.alone // size.rounds), f"{name}-alone"), 1),
        await run(wire, openings(wire, -(-size.together // size.rounds), f"{name}-many"), FULL),
    )


async def further_turns(wire: Wire, size: Size, name: str) -> tuple[Timing, Timing]:
    """Time further turns, each with the volatile message dropped and appended anew."""
    timings: list[Timing] = []
    for count, width in ((size.alone, 1), (size.together, FULL)):
        sessions = -(-count // size.rounds // size.further)
        begun = await _begun(wire, sessions, f"{name}-further-{width}")
        timings.append(
            await run(wire, [_going_on(wire, session, size.further) for session in begun], width)
        )
    return timings[0], timings[1]


async def beside(bare: Wire, ours: Wire, size: Size) -> Beside:
    """Measure first and further turns of both servers in alternating rounds."""
    sides, kinds = (bare, ours), {FIRST: first_turns, FURTHER: further_turns}
    sums = {(what, side): (Timing(), Timing()) for what in kinds for side in (0, 1)}
    ratios = {what: list[tuple[float, float]]() for what in kinds}
    waits: tuple[list[float], list[float]] = ([], [])
    for wire in sides:
        await run(wire, openings(wire, len(MIX), "warm"), 1)
    for number in range(size.rounds):
        for what, send in kinds.items():
            rows: dict[int, Row] = {}
            for side in (number % 2, 1 - number % 2):
                with pulse(sides[side].at.url, ours.client_core) as waited:
                    alone, full = await send(sides[side], size, f"round-{number}")
                waits[side].extend(waited)
                for timing, added in zip(sums[what, side], (alone, full), strict=True):
                    timing.add(added)
                rows[side] = alone.row(what, full)
            our_row, bare_row = rows[1], rows[0]
            # Processor time comes in ticks: a few quick turns of the bare route may take none.
            times = our_row.cpu_ms / bare_row.cpu_ms if bare_row.cpu_ms else math.inf
            ratios[what].append((our_row.median_ms / bare_row.median_ms, times))
    bare_rows, our_rows = (
        [sums[what, side][0].row(what, sums[what, side][1]) for what in kinds] for side in (0, 1)
    )
    multiples = [
        Multiple(
            what,
            clock=statistics.median(clock for clock, _ in pairs),
            cpu=statistics.median(cpu for _, cpu in pairs),
        )
        for what, pairs in ratios.items()
    ]
    bare_silence, silence = (1e3 * max(side_waits) for side_waits in waits)
    return Beside(bare_rows, our_rows, multiples, bare_silence, silence)


async def never_seen(wire: Wire, size: Size) -> Row:
    """Time new sessions that each have a new system prompt."""
    surfaces = unseen(max(2, size.alone // 4), "never seen")
    talks = [opening(wire, s, f"never-seen-{n}") for n, s in enumerate(surfaces)]
    return (await run(wire, talks, 1)).row(NEVER_SEEN)


async def long_sessions(wire: Wire, size: Size) -> list[Row]:
    """Time the first further turns of sessions and the last ones."""
    near = min(_NEAR, size.long // 2)
    early, late = Timing(), Timing()

    async def converse(conversation: Conversation) -> None:
        connection = await Connection.open(wire.at.url)
        for turn in range(1, size.long + 1):
            if not 4 <= turn < 4 + near and turn <= size.long - near:
                timing = Timing()  # not measured
            else:
                timing = early if turn < 4 + near else late
            cpu = wire.at.cpu_s()
            answer = await wire.ask(connection, conversation.body(), turn % 10 == 0)
            timing.cpu_s += wire.at.cpu_s() - cpu
            timing.seconds.append(answer.seconds)
            conversation.answer(read_reply(answer.events))
        connection.close()

    for number in range(2):
        conversation = Conversation(MIX[number], f"long-{number}")
        conversation.open()
        await converse(conversation)
    return [early.row("turn 4 of a session"), late.row(f"turn {size.long} of a session")]


async def relaying(wire: Wire, size: Size) -> list[Row]:
    """Time replies that come token by token; every figure is per token."""
    rows: list[Row] = []
    for streams in size.streams:
        timing = await run(
            wire,
            [opening(wire, relayed(MIX[0]), f"relay-{streams}-{n}", False) for n in range(streams)],
            streams,
        )
        row = timing.row(f"a relayed token, {streams} streams")
        per_token = 1 / RELAYED
        rows.append(
            replace(
                row,
                median_ms=row.median_ms * per_token,
                p95_ms=row.p95_ms * per_token,
                cpu_ms=row.cpu_ms * per_token,
            )
        )
    return rows


async def _begun(wire: Wire, count: int, name: str) -> list[Conversation]:
    """Open sessions and finish their first turn."""
    sessions: list[Conversation] = []

    def begin(number: int) -> Talk:
        conversation = Conversation(MIX[number % len(MIX)], f"{name}-{number}")
        conversation.open()
        sessions.append(conversation)

        async def talk(connection: Connection, timing: Timing) -> None:
            answer = await wire.ask(connection, conversation.body())
            conversation.answer(read_reply(answer.events))

        return talk

    await run(wire, [begin(n) for n in range(count)], 1)
    return sessions


def _going_on(wire: Wire, conversation: Conversation, turns: int) -> Talk:
    async def talk(connection: Connection, timing: Timing) -> None:
        for _ in range(turns):
            answer = await wire.ask(connection, conversation.body())
            timing.seconds.append(answer.seconds)
            conversation.answer(read_reply(answer.events))

    return talk


async def crowd(wire: Wire, size: Size, what: str, talks: Sequence[Talk]) -> Row:
    """Send many requests at once, and ask /healthz meanwhile."""
    with pulse(wire.at.url, wire.client_core) as waits:
        timing = await run(wire, talks, size.crowd)
    return timing.row(f"{size.crowd} in flight, {what}", timing, waits)


async def memory(wire: Wire, size: Size, say: Callable[[str], None]) -> list[Memory]:
    """Measure memory over turns that nothing follows, then over sessions of one turn."""
    points = [Memory("after warming up", wire.answered, wire.at.rss_mb())]
    half = size.memory // 2
    for what, turns_each in (("turns without a successor", 100), ("sessions", 1)):
        for part in range(2):
            talks = [
                opening(wire, MIX[0], f"{what}-{n // turns_each}", n % size.memory_every == 0, n)
                for n in range(part * half, (part + 1) * half)
            ]
            await run(wire, talks, FULL)
            points.append(Memory(what, (part + 1) * half, wire.at.rss_mb()))
            say(f"{points[-1].requests:,} {what}: {points[-1].rss_mb:,.0f} MB")
    return points
