"""`python -m benchmarks.parts`: the cost of single parts of requests and of `status`.

Routing a prompt; searching a history that was seen before for secrets; the sums of `status`; the
transactions that drop old turns, between which the gateway writes.

Rule: processor time of the thread, so that whatever else runs on the machine is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.agent_requests import SURFACES, Conversation
from benchmarks.ledger import Talk
from local_gpu.sample.routing import Routes, keys_of
from tinker_claw.cli.status import board, read_overview
from tinker_claw.formats.chat import parse_chat
from tinker_claw.gateway.limits import ComputeRounds
from tinker_claw.gateway.privacy import SessionPrivacy
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.prune import trim
from tinker_claw.privacy.redact import Redactor

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Processor time of one call, in milliseconds."""

    what: str
    calls: int
    median_ms: float
    p95_ms: float


def timed(what: str, call: Callable[[T], object], given: Iterable[T]) -> Part:
    """Time a call with each of `given`, without making these, until one raises StopIteration."""
    seconds = list[float]()
    for one in given:
        began = time.thread_time()
        try:
            call(one)
        except StopIteration:
            break
        seconds.append(time.thread_time() - began)
    seconds.sort()
    p95 = seconds[int(0.95 * len(seconds))]
    return Part(what, len(seconds), 1e3 * statistics.median(seconds), 1e3 * p95)


def measure(folder: Path, turns: int, calls: int) -> list[Part]:
    """Measure all parts, over a ledger of this many turns."""
    ledger = Ledger(folder)
    try:
        return [_routing(calls), _searching(ledger, calls), *_looking_and_dropping(ledger, turns)]
    finally:
        ledger.close()


def _routing(calls: int) -> Part:
    routes, in_flight = Routes(), dict.fromkeys(range(3), 0)

    def route(prompt: tuple[int, ...]) -> None:
        keys = keys_of(prompt)
        routes.note("v1", keys, len(prompt), routes.choose("v1", keys, len(prompt), in_flight))

    prompts = ((*range(18_000), *range(call, call + 2000)) for call in range(calls))
    return timed("a prompt of 20,000 tokens is routed", route, prompts)


def _searching(ledger: Ledger, calls: int) -> Part:
    sessions = SessionPrivacy(ledger.turns, Redactor(["secrets"]), ComputeRounds())
    talk = Conversation(SURFACES[0], "parts")
    talk.open()
    sessions.holds(parse_chat(talk.body()))
    requests = (parse_chat(talk.body()) for _ in range(calls))  # new strings each time
    return timed(
        f"{len(talk.body()):,} bytes that were seen are searched for secrets",
        sessions.holds,
        requests,
    )


def _looking_and_dropping(ledger: Ledger, turns: int) -> list[Part]:
    ledger.steps.add_first_version(state_ref="s0", sampler_ref="p0")
    talk = Talk(ledger)
    for _ in range(turns):
        ledger.turns.refuse(ledger.turns.add(talk.turn()), "side turn: a benchmark")
    folder = ledger.path.parent
    looking = timed(
        f"status of {turns:,} turns", lambda _: board(read_overview(folder, 16)), range(5)
    )
    work = trim(ledger._db, None, ledger.live_bytes() // 2)  # pyright: ignore[reportPrivateUsage]
    dropping = timed(
        "old turns are dropped, a transaction", lambda _: next(work), itertools.count()
    )
    return [looking, dropping]


def main() -> None:
    """Read flags, measure, print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parts", description=__doc__)
    parser.add_argument("--turns", type=int, default=10_000, help="of the ledger (10,000)")
    parser.add_argument("--calls", type=int, default=100, help="of the other parts (100)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        parts = measure(Path(place), given.turns, given.calls)
    print(json.dumps([asdict(part) for part in parts], indent=2))


if __name__ == "__main__":
    sys.exit(main())
