"""How long one request is tried again before another version is asked, or its client is told.

Rule: an outage is waited out for as long as the settings say, counted from when the sampler was
asked first; the time in which tokens came does not count. Any other failure is tried twice more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tinker_claw.errors import OutageError, SamplerError
from tinker_claw.outages import Backoff

WAITS = Backoff(first_s=0.5, longest_s=15.0)
"""Between attempts while the service is away."""
RETRY_WAITS_S = (0.2, 1.0)
"""Seconds before the second and the third attempt, where the sampler failed."""


class Patience:
    """Of one request."""

    def __init__(
        self,
        started: float,
        patience_s: float,
        waits: Backoff,
        retry_waits_s: Sequence[float] = RETRY_WAITS_S,
    ) -> None:
        """`started`: time.monotonic() of the first attempt; `waits`: while the service is away."""
        self._until = started + patience_s
        self._waits = waits
        self._retry_waits_s = retry_waits_s
        self._outages = 0
        self._failures = 0

    def went_well(self, seconds: float) -> None:
        """Tokens came for so long, until the next failure."""
        self._until += seconds
        self._outages = 0

    def wait_s(self, error: SamplerError | OutageError) -> float | None:
        """Seconds until the next attempt; None: there is none. The last one is at the very end."""
        if isinstance(error, OutageError):
            self._outages += 1
            left = self._until - time.monotonic()
            return min(self._waits.after(self._outages), left) if left > 0 else None
        self._failures += 1
        waits_s = self._retry_waits_s
        return waits_s[self._failures - 1] if self._failures <= len(waits_s) else None
