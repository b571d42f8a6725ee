"""Asking again: how long to wait between attempts, and for how long at all.

Rule: whoever tries something again does it by a `Backoff`, so that waits, their bounds and their
jitter are data, and stand where somebody looks for them. `call` is for a question that is asked in
one go; a part of the loop whose failures are spread over time counts them, and asks `after`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double up to a bound."""

    first_s: float
    longest_s: float
    jitter: float = 0.0
    """The share of a wait that is left to chance, 0 to 1: those who failed together come back one
    after another."""
    attempts: int | None = None
    """At most so many, the first included; None: no limit."""
    within_s: float | None = None
    """No further attempt once so much time has passed; None: no limit."""

    def after(self, failures: int) -> float:
        """Seconds to wait after so many attempts in a row have failed, at least one."""
        wait_s = min(self.first_s * 2.0 ** min(failures - 1, 60), self.longest_s)
        return wait_s * (1 - self.jitter * random.random()) if self.jitter else wait_s

    def ends_after(self, failures: int) -> bool:
        """Whether there is no further attempt after so many have failed."""
        return self.attempts is not None and failures >= self.attempts

    async def call(self, ask: Callable[[], Awaitable[T]], again: type[Exception]) -> T:
        """What `ask` gives, asked again after every `again`.

        Raises:
            again: the last one, when attempts or time are used up.
        """
        began, failures = monotonic(), 0
        while True:
            try:
                return await ask()
            except again:
                failures += 1
                late = self.within_s is not None and monotonic() - began >= self.within_s
                if late or self.ends_after(failures):
                    raise
            await asyncio.sleep(self.after(failures))
