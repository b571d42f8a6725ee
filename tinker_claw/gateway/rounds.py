"""Share the event loop among requests that compute.

Rule: the event loop polls its sockets between two requests that compute: many requests of a few
milliseconds each do not block the gateway for their total time. Longer work, for very large
requests, runs in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class ComputeRounds:
    """Gives each request that computes a round of the event loop of its own."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._whose: asyncio.Task[Any] | None = None
        """Task that computes in this round; None: none does."""
        self._thread = ThreadPoolExecutor(1, "tinker-claw-large")

    async def own_round(self) -> None:
        """Wait for a round in which no other request computes.

        It lasts until the caller awaits something else; a caller that already has it continues at
        once.
        """
        task = asyncio.current_task()
        if self._whose is not task:
            await self._lock.acquire()
            self._whose = task
            asyncio.get_running_loop().call_soon(self._end_round)

    def _end_round(self) -> None:
        self._whose = None
        self._lock.release()

    async def aside(self, compute: Callable[[], T], *, when: bool = True) -> T:
        """Run a long computation that shares no state in a thread, and return its result.

        One at a time: together they would leave the event loop no time.

        Args:
            when: False: it is short, and run at once.
        """
        if not when:
            return compute()
        return await asyncio.get_running_loop().run_in_executor(self._thread, compute)
