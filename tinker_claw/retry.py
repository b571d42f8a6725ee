"""Retries: how long to wait between attempts, and when to give up.

Rule: every retry uses a `Backoff`, so that waits, their bounds and their jitter are data that is
easy to find. `call` retries one request until it ends; a loop whose failures are spread over time
counts them, and calls `after`.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double up to a limit."""

    first_s: float
    longest_s: float
    jitter: float = 0.0
    """Random share of a wait, from 0 to 1, so that clients that failed together retry apart."""
    attempts: int | None = None
    """Most attempts, the first included; None: no limit."""
    within_s: float | None = None
    """Seconds after which no further attempt is made; None: no limit."""

    def after(self, failures: int) -> float:
        """Return the seconds to wait after `failures` attempts in a row, at least one."""
        wait_s = min(self.first_s * 2.0 ** min(failures - 1, 60), self.longest_s)
        return wait_s * (1 - self.jitter * random.random()) if self.jitter else wait_s

    def ends_after(self, failures: int) -> bool:
        """Return whether no attempt follows `failures` failed ones."""
        return self.attempts is not None and failures >= self.attempts

    async def call(self, ask: Callable[[], Awaitable[T]], again: type[Exception]) -> T:
        """Return the result of `ask`, retrying whenever it raises `again`.

        Raises:
            again: the last one, when attempts or time are used up.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(again),
            wait=lambda state: self.after(state.attempt_number),
            stop=stop_after_attempt(sys.maxsize if self.attempts is None else self.attempts)
            | stop_after_delay(math.inf if self.within_s is None else self.within_s),
            reraise=True,
        )

        async def attempt() -> T:  # tenacity awaits coroutine functions, not lambdas
            return await ask()

        return await retrying(attempt)
