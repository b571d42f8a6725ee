"""Requests compute one by one.

Rule: between two of them the event loop looks at its sockets, so that a crowd of requests, each of
a few milliseconds, does not make the gateway deaf for as long as all of them take together. What
takes longer, because somebody has sent very much, is done in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Turnstile:
    """`async with` it around what computes; nothing in it may wait for anything."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._passed: asyncio.Task[Any] | None = None
        """Who has computed in this round of the event loop."""
        self._thread = ThreadPoolExecutor(1, "tinker-claw-large")

    async def aside(self, compute: Callable[[], T]) -> T:
        """The result of something that takes long and touches nothing that others use.

        One at a time: together they would leave the event loop no time.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, compute)

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        free = not self._lock.locked() and self._passed in (None, task)
        await self._lock.acquire()
        if not free:
            try:
                # Whatever is ready runs in one round of the event loop: let this round end.
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                self._lock.release()
                raise
        self._passed = task

    async def __aexit__(self, *failure: object) -> None:
        self._lock.release()
        asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        self._passed = None
