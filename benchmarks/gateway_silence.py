"""Silences of the gateway: idle connections, oversized bodies, and readers of the page.

/healthz is asked while others hold connections and say nothing, and while a body is handled that
is far too large; first turns are timed while others read the page.

Rule: the longest wait of /healthz counts, because that is what a user sees.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from urllib.parse import urlsplit

from benchmarks.agent_requests import MODEL
from benchmarks.gateway_client import Connection, pulse
from benchmarks.gateway_rows import Row, Size, Timing, Wire, openings, run

_AT_ONCE = 200
_OPENED_WITHIN_S = 90.0
_HELD_S = 2.0
"""Seconds that connections are held after the last one was opened."""
_PROSE_BYTES = 1_200_000
_ROUNDS = 4
"""Rounds of each kind, in turn, so that other load on the machine hits both."""


async def idle(wire: Wire, count: int) -> Row:
    """Open silent connections as fast as they are accepted, and hold them."""
    _allow(count + 200)
    parts = urlsplit(wire.at.url)
    address = (parts.hostname, parts.port)
    opened: list[socket.socket] = []
    loop, cpu = asyncio.get_running_loop(), wire.at.cpu_s()
    with pulse(wire.at.url, wire.client_core) as waits:
        try:
            async with asyncio.timeout(_OPENED_WITHIN_S):
                for begin in range(0, count, _AT_ONCE):
                    some = [_socket() for _ in range(min(_AT_ONCE, count - begin))]
                    opened += some
                    await asyncio.gather(*(loop.sock_connect(one, address) for one in some))
        except (TimeoutError, OSError) as error:
            wire.failures.append(f"{count} connections: {type(error).__name__}: {error}")
        await asyncio.sleep(_HELD_S)
        for one in opened:
            one.close()
    timing = Timing(waits, wire.at.cpu_s() - cpu)
    return timing.row(f"{count:,} idle connections", health=waits)


async def too_large(wire: Wire, *, spaced: bool = True) -> Row:
    """Send prompts longer than the context, each different, which must all be answered 400."""
    connection, timing, cpu = await Connection.open(wire.at.url), Timing(), wire.at.cpu_s()
    bodies = [_prose(Random(seed), spaced) for seed in range(3)]
    with pulse(wire.at.url, wire.client_core) as waits:
        for body in bodies:
            answer = await connection.ask(body)
            timing.seconds.append(answer.seconds)
            timing.errors += answer.status != 400
    connection.close()
    timing.cpu_s = wire.at.cpu_s() - cpu
    kind = "prose" if spaced else "signs without blanks"
    return timing.row(f"1.2 MB of {kind}, beyond the context", health=waits)


async def page_read(wire: Wire, size: Size) -> list[Row]:
    """Time first turns while nobody reads the page and while some read it without a pause, and the
    readers' waits."""
    paths = [f"/ui{path}" for path in ("", "/turns", "/turns?verdict=-1", "/steps", "/versions")]
    timings, reads = {readers: Timing() for readers in (0, size.readers)}, Timing()
    await run(wire, openings(wire, size.alone, "page"), 1)
    for number in range(_ROUNDS):
        for readers, timing in timings.items():
            with ExitStack() as stack:
                asked = [pulse(wire.at.url, wire.client_core, *paths) for _ in range(readers)]
                waits = [stack.enter_context(one) for one in asked]
                talks = openings(wire, -(-size.alone // _ROUNDS), f"page-{readers}-{number}")
                some = await run(wire, talks, 1)
            timing.seconds += some.seconds
            timing.errors += some.errors
            reads.errors += sum(not one for one in waits)
            reads.seconds += [wait for one in waits for wait in one]
    # Processor time of the page's own requests does not belong to turns.
    named = {f"first turn, page read by {who or 'nobody'}": of for who, of in timings.items()}
    named["the page, one of its readers"] = reads
    return [replace(timing.row(what), cpu_ms=0.0) for what, timing in named.items()]


def _prose(random: Random, spaced: bool) -> bytes:
    """Random prose: with blanks, words can be counted without encoding them; without, they
    cannot."""
    letters = "etaoinshrdlu"
    words = ["".join(random.choices(letters, k=random.randint(2, 9))) for _ in range(5_000)]
    text = (" " if spaced else "-").join(random.choices(words, k=_PROSE_BYTES // 6))[:_PROSE_BYTES]
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}]}).encode()


def _socket() -> socket.socket:
    one = socket.socket()
    one.setblocking(False)
    return one


def _allow(descriptors: int) -> None:
    """Raise this process's limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(descriptors, hard), hard))
