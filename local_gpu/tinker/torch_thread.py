"""The one thread in which all torch work but sampling runs, in the order it was asked for.

Rule: the event loop never waits for torch, and no two operations meet in one module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tinker_claw.errors import BackendError

T = TypeVar("T")


class TorchThread:
    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tinker-wire-torch")

    async def run(self, call: Callable[[], T]) -> T:
        """Raises BackendError for what fails in torch or on the disk."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, call)
        except OSError as error:
            raise BackendError(f"The disk failed: {error}") from error
        except RuntimeError as error:
            raise BackendError(f"torch failed: {error}") from error

    async def aclose(self) -> None:
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
