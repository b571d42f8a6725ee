"""Long work on the ledger, beside the loop that serves.

Rule: in a thread, over a connection of its own, in transactions of a few milliseconds with pauses
in between; a writer on the loop waits for one of them at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event

from tinker_claw.ledger.database import Writer

PAUSE_S = 0.005
"""Between two transactions."""


async def beside(path: Path, work: Callable[[Writer], Iterator[int]]) -> int:
    """Do all steps of some work; returns the sum of what they yield.

    Cancelled, it ends after the step in hand.

    Raises:
        LedgerError: the ledger refused.
    """
    leave = Event()

    def run() -> int:
        total = 0
        with closing(Writer(path)) as writer:
            for some in work(writer):
                total += some
                if leave.wait(PAUSE_S):
                    break
        return total

    running = asyncio.ensure_future(asyncio.to_thread(run))
    try:
        return await asyncio.shield(running)
    finally:
        leave.set()
        if not running.done():
            await asyncio.wait({running})
