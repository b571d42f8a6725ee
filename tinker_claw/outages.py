"""Track whether the service behind the backend answers, and which version does.

Rule: every caller reports how its request went, under the kind of request. An outage begins with an
`OutageError` and ends with the next answer to a request of the same kind; the log has one event
when the service goes away and one when it is back, however often either is noticed.

A refusal ends an outage, as somebody answers. A `RequestError` is about one request and changes
nothing. A `SamplerError` is about the version that was to answer: it counts as refused from then
until it answers, and its stand-in, if there is one, as what answers. After a `GoneError` it waits
to be published anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Literal

from tinker_claw.errors import BackendError, ClawError, GoneError, OutageError
from tinker_claw.telemetry import log

Asking = Literal["serving", "judging", "teaching", "learning"]


@dataclass(frozen=True, slots=True)
class Outage:
    """An outage of one kind of request."""

    since: float
    """Time of the first failure, in seconds since 1970."""
    error: str
    """Message of the last failure."""
    attempts: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A version that should answer and cannot."""

    version: int
    ref: str
    """Its sampler."""
    since: float
    """Time of the first refusal, in seconds since 1970."""
    error: str
    """Message of the last refusal."""
    by: str | None
    """Name of what answers in its place; None: nothing does."""


class Outages:
    """Current outages of the service, with their beginnings and causes."""

    def __init__(self) -> None:
        self._away: dict[Asking, Outage] = {}
        self._back = defaultdict[Asking, asyncio.Event](asyncio.Event)
        self._well_since = time.time()
        self.refused: Refused | None = None
        """The version that should answer and cannot; None: it answers, as far as known."""
        self.gone = asyncio.Event()
        """Set while the refused version's weights wait to be published anew."""
        self.closing = False
        """Whether the process is ending, which ends all waits for the service."""

    def give_up(self) -> None:
        """End every wait, now and from now on."""
        self.closing = True
        for back in self._back.values():
            back.set()

    @property
    def away(self) -> frozenset[Asking]:
        return frozenset(self._away)

    @property
    def since(self) -> float:
        """Time since which the service is away, or has been well, in seconds since 1970."""
        return min((outage.since for outage in self._away.values()), default=self._well_since)

    @property
    def error(self) -> str | None:
        """Message of the latest outage to begin; None while all is well."""
        latest = max(self._away.values(), key=lambda outage: outage.since, default=None)
        return latest.error if latest else None

    def attempts(self, asking: Asking) -> int:
        """Return the failures in a row of this kind of request; 0 after an answer."""
        outage = self._away.get(asking)
        return outage.attempts if outage else 0

    def seen(self, asking: Asking, error: ClawError) -> None:
        """Record that a request of this kind failed because the service is away."""
        if not self._away:
            log.error("backend.lost", noticed=asking, error=str(error))
        outage = self._away.get(asking) or Outage(time.time(), "", 0)
        self._away[asking] = replace(outage, error=str(error), attempts=outage.attempts + 1)
        self._back[asking].clear()

    def over(self, asking: Asking) -> None:
        """Record that a request of this kind was answered."""
        since = self.since
        if self._away.pop(asking, None) is not None and not self._away:
            self._well_since = time.time()
            log.info("backend.recovered", noticed=asking, away_s=round(self._well_since - since, 1))
        self._back[asking].set()

    def refuses(self, version: int, ref: str, error: ClawError, by: str | None) -> None:
        """Record that the version that should answer could not, and what answered instead."""
        earlier = self.refused
        since = earlier.since if earlier and earlier.version == version else time.time()
        self.refused = Refused(version, ref, since, str(error), by)
        if earlier is None or replace(earlier, error=str(error)) != self.refused:
            log.error("version.refused", version=version, by=by, error=str(error))
        if isinstance(error, GoneError):
            self.gone.set()

    def answers(self, version: int) -> None:
        """Record that the version that should answer did."""
        if self.refused is None or version != self.refused.version:
            return  # another one says nothing of it
        self.refused = None
        self.gone.clear()
        log.info("version.answers", version=version)

    @contextmanager
    def watching(self, asking: Asking) -> Generator[None]:
        """Record how the request inside ends. An error that is no outage counts as an answer."""
        try:
            yield
        except OutageError as error:
            self.seen(asking, error)
            raise
        except BackendError:
            self.over(asking)
            raise
        else:
            self.over(asking)

    async def rest(self, asking: Asking, seconds: float) -> None:
        """Wait for `seconds`, until another request of this kind is answered, or until the process
        ends."""
        if self.closing:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._back[asking].wait()
