"""Silences of the gateway: oversized bodies, and readers of the page.

/healthz is asked while a body is handled that is far too large; first turns are timed while others
read the page.

Rule: the longest wait of /healthz counts, because that is what a user sees.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from random import Random

from benchmarks.agent_requests import MODEL
from benchmarks.gateway_client import Connection, pulse
from benchmarks.gateway_rows import Row, Size, Timing, Wire, openings, run

_PROSE_BYTES = 1_200_000
_ROUNDS = 4
"""Rounds of each kind, in turn, so that other load on the machine hits both."""


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
