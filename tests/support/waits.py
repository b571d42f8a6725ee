"""Waiting for what nobody reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path


async def eventually(happened: Callable[[], object], seconds: float = 60) -> None:
    """Wait for a condition; the limit is long, for machines are busy."""
    async with asyncio.timeout(seconds):
        while not happened():  # noqa: ASYNC110 - an event would change what is observed
            await asyncio.sleep(0.005)


def comes(condition: Callable[[], bool], within_s: float = 300) -> bool:
    """Whether a condition becomes true within this time."""
    until = time.monotonic() + within_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def alive(pid: int) -> bool:
    """Whether a process lives; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(pids: Sequence[int]) -> bool:
    """Whether all processes end."""
    return comes(lambda: not any(map(alive, pids)))
