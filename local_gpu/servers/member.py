"""One server as the pool knows it: what it holds, what it has shown to answer rightly, its absence.

Rule: an adapter is `ready` only after the server has answered with it as the trainer does, and is
let go only when nobody has it in use. One change at a time: loads and unloads never cross.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from local_gpu.parts import BASE_REF
from local_gpu.servers.probe import Agreement, Exam, judge, keeps_apart, sit
from local_gpu.servers.pulse import ping
from local_gpu.servers.routing import Prefix
from local_gpu.servers.server import Server, ServerInfo
from tinker_claw.errors import BackendError, OutageError, RequestError
from tinker_claw.types import SamplingParams

_log = logging.getLogger(__name__)


def _nobody_listens() -> None:
    """Until it is in a pool."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How a pool serves."""

    tolerance: float = 0.2
    """Of the mean difference between a server's logprobs and the trainer's, in nats. bfloat16 makes
    about 0.04, and another base model several."""
    warm_prefixes: int = 4
    """Computed for a new version before it serves, on each server; 0: none."""
    warm_s: float = 20.0
    """At most so long for that, on each server."""
    steps: Callable[[], bool] = bool
    """Whether a training step runs. A version that is opened meanwhile, by its name, serves without
    being compared once more: no request waits for a step."""
    score_s: float = 30.0
    """At most so long until the trainer has scored what a version is compared on; it may be scoring
    for others."""
    ready_s: float = 120.0
    """At most so long until a server has loaded a version and answered with it, all told."""
    first_wait_s: float = 1.0
    """Until a server that failed is asked again; doubles each time."""
    longest_wait_s: float = 30.0
    student_topk: int = 0
    """Candidates per token that requests will ask for: the most that a server must give."""
    look_s: float = 30.0
    """How often a server that is not busy is asked whether it is well."""
    quiet_s: float = 5.0
    """After so long without a sign of life, a server that owes answers is asked for one token."""
    still_s: float = 10.0
    """After so long more it hangs; besides what it takes to compute the prompts that it has."""
    say: Callable[[str], None] = _log.warning
    """Hears what befalls a server, in sentences."""
    away: Callable[[Sequence[str]], object] = len
    """Hears which servers are out of the rotation, and why, whenever that changes."""


class Disagreement(BackendError):
    """A server answers with other weights than it was told to."""


@dataclass(eq=False, slots=True)
class Adapter:
    """A published version that servers hold while somebody uses it."""

    name: str
    folder: Path
    examine: Callable[[], Awaitable[Exam | None]]
    users: int = 0
    """Open samplers and requests in flight."""
    _exam: Exam | None = None
    _written: bool = False
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def exam(self) -> Exam | None:
        """Written by the trainer when it is first wanted. None: it had no time."""
        async with self._writing:
            if not self._written:
                self._exam, self._written = await self.examine(), True
            return self._exam


@dataclass(slots=True)
class Away:
    """A server that is not asked. Times are on the monotonic clock."""

    since: float
    error: str
    wait_s: float
    """Until it is asked again."""
    asked_at: float

    @property
    def next_at(self) -> float:
        return self.asked_at + self.wait_s


class Member:
    """One server of a pool."""

    def __init__(
        self, number: int, server: Server, base_exams: tuple[Exam, Exam], options: PoolOptions
    ) -> None:
        """`base_exams`: at temperature 1, and at another."""
        self.number = number
        self.server = server
        self._base_exams = base_exams
        self._options = options
        self.in_flight = 0
        self.away: Away | None = None
        self.epoch = 0
        """Goes up when it comes back: what failed before then says nothing about it now."""
        self.info: ServerInfo | None = None
        """None: it has never answered."""
        self.held: set[str] = set()
        """Names that it may have loaded."""
        self.keeps_apart = True
        """What it has computed under one salt is not used under another."""
        self.ready: set[str] = set()
        """Names that it has answered with."""
        self.agreements: dict[str, Agreement] = {}
        """By ref, of its last exam."""
        self._noise = 0.0
        """Standard deviation of its difference to the trainer on the base, in nats."""
        self._changing = asyncio.Lock()
        self.changed: Callable[[], None] = _nobody_listens
        """Called when it leaves the rotation or comes back."""

    @property
    def url(self) -> str:
        return self.server.url

    def leave(self, error: str) -> None:
        """Out of the rotation, until it is brought back."""
        if self.away is None:
            self._options.say(f"The server {self.url} leaves the rotation: {error}")
            now = time.monotonic()
            self.away = Away(now, error, self._options.first_wait_s, now)
            self.changed()

    def failed_again(self, error: str) -> None:
        if away := self.away:
            away.error, away.asked_at = error, time.monotonic()
            away.wait_s = min(2 * away.wait_s, self._options.longest_wait_s)

    def come_back(self) -> None:
        if self.away:
            seconds = time.monotonic() - self.away.since
            self._options.say(f"The server {self.url} is back after {seconds:.0f} s.")
            self.away, self.epoch = None, self.epoch + 1
            self.server.pulse.returned()
            self.changed()

    async def check(self) -> None:
        """Ask what it holds, and whether it answers as the base model does.

        Raises:
            OutageError: it does not answer.
            Disagreement: it answers otherwise.
        """
        plain, shaped = self._base_exams
        async with self._changing:
            self.info = await self.server.info()
            self.held &= self.info.adapters
            self.ready &= self.info.adapters
            self.agreements[BASE_REF] = await self._sit(None, plain)
            self._noise = self.agreements[BASE_REF].sd
            await self._sit(None, shaped)
            self.keeps_apart = await keeps_apart(self.server, plain)
            if not self.keeps_apart:
                self._options.say(
                    f"The server {self.url} uses what it has computed of one user's prompts for "
                    "all others, so that how long it takes may tell one what another has asked: "
                    "take a newer release where not everybody may know. Cached tokens are not told."
                )

    async def look(self) -> None:
        """Raises OutageError if it does not answer, or was started anew and has nothing loaded."""
        before = frozenset(self.ready)
        await ping(self.server)
        known = (await self.server.info()).adapters
        if lost := before & self.ready - known:
            raise OutageError(f"The server {self.url} no longer has {sorted(lost)}.")

    async def prepare(self, adapter: Adapter, warm: Sequence[Prefix] = ()) -> None:
        """Load an adapter, compute prefixes, the most useful first, and let the server prove it.

        Raises:
            OutageError: it does not answer.
            Disagreement: it answers otherwise.
            BackendError, RequestError: it does not load it.
        """
        name = adapter.name
        if name in self.ready:
            return
        async with self._changing:
            if name in self.ready:
                return
            await ping(self.server)  # one that hangs is found out sooner than by a load
            self.held.add(name)  # before: nobody knows what a call that is broken off has done
            await self.server.load(name, adapter.folder)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.warm_s):
                    await self._warm(name, warm)
            if (exam := await adapter.exam()) is not None:
                self.agreements[name] = await self._sit(name, exam)
            self.ready.add(name)

    async def tidy(self, wanted: Callable[[str], bool]) -> None:
        """Unload what nobody wants any more."""
        for name in [name for name in self.held if not wanted(name)]:
            async with self._changing:
                if wanted(name):  # by now
                    continue
                self.ready.discard(name)
                await self.server.unload(name)
                self.held.discard(name)
                self.agreements.pop(name, None)

    async def _warm(self, name: str, prefixes: Sequence[Prefix]) -> None:
        for prefix in prefixes:
            try:
                params = SamplingParams(max_tokens=1, cache_salt=prefix.salt)
                await self.server.sample(name, prefix.tokens, params, 1)
            except (BackendError, RequestError) as error:
                if isinstance(error, OutageError):
                    raise
                self._options.say(f"{self.url} did not compute a prefix for {name}: {error}")

    async def _sit(self, name: str | None, exam: Exam) -> Agreement:
        drawn = await sit(self.server, name, exam)
        found, fault = judge(
            exam,
            self.url,
            drawn,
            base=BASE_REF,
            noise=self._noise,
            tolerance=self._options.tolerance,
        )
        if fault:
            raise Disagreement(f"The server {self.url} {fault}. {exam.advice}")
        return found
