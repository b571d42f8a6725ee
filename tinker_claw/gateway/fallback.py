"""Retries of a request, and its stand-ins when its version cannot answer.

Rule: in an outage a request is retried for four minutes, counted from its first attempt; the time
in which tokens came does not count. After any other failure it is retried twice. Then the nearest
earlier version with other weights stands in, then the frozen base model; a version that a request
asks for by name has no stand-in.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tinker_claw.errors import OutageError, SamplerError
from tinker_claw.outages import Outages
from tinker_claw.policy import Sampler
from tinker_claw.retry import Backoff
from tinker_claw.types import PolicyVersion

PATIENCE_S = 240.0
"""Seconds of retries in an outage: OpenClaw, configured by `openclaw-config`, gives a request up
after ten minutes, and a stand-in needs time as well."""
WAITS = Backoff(first_s=0.5, longest_s=15.0, jitter=0.25)
"""Delays between attempts while the service is away."""
RETRIES = Backoff(first_s=0.4, longest_s=1.0, attempts=3)
"""Delays between attempts after a failure of the sampler."""

STAND_IN_S = 30.0
"""Most seconds to a stand-in's first token while the service is away."""
BASE_VERSION = 0
"""Version whose adapter changes nothing, so that it samples as the base model does."""


@dataclass(slots=True)
class Retries:
    """The attempts of one request."""

    until: float
    """time.monotonic() of the last attempt in an outage."""
    waits: Backoff
    """Delays while the service is away."""
    retries: Backoff = RETRIES
    outages: int = 0
    failures: int = 0

    def went_well(self, seconds: float) -> None:
        """Extend the deadline by the seconds for which tokens came."""
        self.until += seconds
        self.outages = 0

    def wait_s(self, error: SamplerError | OutageError) -> float | None:
        """Seconds until the next attempt; None: there is none. The last is at the deadline."""
        if isinstance(error, OutageError):
            self.outages += 1
            left = self.until - time.monotonic()
            return min(self.waits.after(self.outages), left) if left > 0 else None
        self.failures += 1
        ends = self.retries.ends_after(self.failures)
        return None if ends else self.retries.after(self.failures)


@dataclass(frozen=True, slots=True)
class StandIn:
    """Weights that may answer in place of others."""

    version: int
    open: Callable[[], Awaitable[Sampler]]
    """Raises BackendError or LookupError where they cannot be opened."""
    base: bool = False
    """The frozen base model, not the sampler that was published for version 0."""

    @property
    def name(self) -> str:
        return "the base model" if self.base else f"v{self.version}"


StandIns = Callable[[int], Sequence[StandIn]]
"""Returns the stand-ins for a version, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class ServingDeps:
    """Settings for answering requests: versions, stand-ins, and retries."""

    open_version: Callable[[int], Awaitable[Sampler]]
    """Sampler of an earlier version. Raises LookupError when there is none of that number."""
    outages: Outages
    """Records whether the service answers."""
    stand_ins: StandIns
    """Returns what answers in place of a version that cannot."""
    waits: Backoff = WAITS
    """Delays between the attempts of one request while the service is away."""
    retries: Backoff = RETRIES
    """Delays between the attempts of one request after a failure of the sampler."""
    stand_in_s: float = STAND_IN_S
    """Most seconds to a stand-in's first token while the service is away."""


def lineage(
    version_record: Callable[[int], PolicyVersion | None],
    open_version: Callable[[int], Awaitable[Sampler]],
    base: Sampler,
) -> StandIns:
    """Stand-ins from a run's own versions. `version_record`: a version's record, by its id."""

    async def open_base() -> Sampler:
        return base

    def stand_ins(version: int) -> Sequence[StandIn]:
        failed = ancestor = version_record(version)
        # The nearest ancestor with a sampler of its own: a restart repeats its parent's.
        while failed and ancestor and ancestor.sampler_ref == failed.sampler_ref:
            ancestor = version_record(ancestor.parent) if ancestor.parent is not None else None
        base_model = StandIn(BASE_VERSION, open_base, base=True)
        if ancestor is None:
            return [base_model]
        return [StandIn(ancestor.id, partial(open_version, ancestor.id)), base_model]

    return stand_ins
