"""Looks after one server in the background: brings it back, unloads what nobody uses.

Rule: a thread that only keeps time. All that is done to the server is done in the event loop, where
the pool lives, one call at a time; so whichever task closes the pool can end it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, Final

_AFTER_A_BUG_S: Final = 30.0

_log = logging.getLogger(__name__)


class Watch:
    """Calls `tend` in the running event loop when woken, and when it has asked to be."""

    def __init__(self, name: str, tend: Callable[[], Coroutine[Any, Any, float | None]]) -> None:
        """`tend` returns after how many seconds it wants to be called again; None: when woken."""
        self._name = name
        self._tend = tend
        self._loop = asyncio.get_running_loop()
        self._woken = threading.Event()
        self._ended = False
        self._tending: asyncio.Task[Any] | None = None
        # A daemon: it does not keep a process alive whose loop has ended without `aclose`.
        self._thread = threading.Thread(target=self._run, name=f"watch {name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    async def aclose(self) -> None:
        """Call off what is being done, and end the thread."""
        self._ended = True
        if self._tending is not None:
            self._tending.cancel()
        self.wake()
        await asyncio.to_thread(self._thread.join)

    async def _once(self) -> float | None:
        if self._ended:
            return None
        self._tending = asyncio.current_task()
        try:
            return await self._tend()
        finally:
            self._tending = None

    def _run(self) -> None:
        seconds: float | None = None
        while not self._ended:
            self._woken.wait(seconds)
            self._woken.clear()
            call = self._once()
            try:
                future = asyncio.run_coroutine_threadsafe(call, self._loop)
            except RuntimeError:  # the loop is closed
                call.close()
                return
            try:
                error = future.exception()
            except CancelledError:
                return
            if error is not None:
                _log.error("Looking after %s failed.", self._name, exc_info=error)
            seconds = _AFTER_A_BUG_S if error else future.result()
