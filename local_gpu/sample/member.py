"""One server of a pool: its adapters, whether it is in rotation, and its checks.

Rule: an adapter is `ready` only after the server has answered with it as the trainer does. Loads
and unloads of a server never overlap.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import pstdev

from local_gpu.config import Say, ignore
from local_gpu.halves import Facts
from local_gpu.sample.exam import Exam, adapter_fault, differences, distance_fault, sample_exam
from local_gpu.sample.http import Busy
from local_gpu.sample.routing import Prefix
from local_gpu.sample.vllm import ServerInfo, VllmServer
from tinker_claw.errors import BackendError, OutageError, RequestError
from tinker_claw.retry import Backoff
from tinker_claw.types import SamplingParams


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options of a pool of sampler servers."""

    warm_prefixes: int = 4
    """Prefixes computed on each server for a new version before it serves; 0: none."""
    warm_s: float = 20.0
    """Seconds at most for warming up those prefixes, on each server."""
    steps: Callable[[], bool] = bool
    """Whether a training step is running. A version opened by name meanwhile serves without another
    comparison, so that no request waits for a step."""
    score_s: float = 30.0
    """Seconds at most for the trainer to score what a version is compared on; it may be scoring for
    others."""
    ready_s: float = 120.0
    """Seconds at most for a server to load a version and answer with it, in total."""
    returns: Backoff = Backoff(first_s=1.0, longest_s=30.0)  # noqa: RUF009 - frozen
    """Delays before a server that failed is asked again."""
    student_topk: int = 0
    """Top-k logprobs per token that requests may ask for: every server must give as many."""
    look_s: float = 10.0
    """Seconds between health checks, which ask for one token."""
    still_s: float = 120.0
    """Seconds without that token, nor any other, after which a server counts as hung. Engines
    serve nobody while they load an adapter or compile a kernel."""
    hung: Callable[[str], object] = len
    """Receives the URL of a server that hangs, and may start it again."""
    say: Say = ignore
    """Receives what happens to servers, in sentences."""
    away: Callable[[Sequence[str]], object] = len
    """Receives the servers out of the rotation, and why, whenever that changes."""


class Hangs(OutageError):
    """A server computes nothing, whatever its connections say."""


class Disagreement(BackendError):
    """A server answers with other weights than it should."""


@dataclass(eq=False, slots=True)
class Adapter:
    """A published version that servers hold while it is in use."""

    name: str
    folder: Path
    examine: Callable[[], Awaitable[Exam | None]]
    users: int = 0
    """Number of open samplers and requests in flight."""
    _exam: Exam | None = None
    _written: bool = False
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def exam(self) -> Exam | None:
        """Exam on this version, made by the trainer when first needed. None: it had no time."""
        async with self._writing:
            if not self._written:
                self._exam, self._written = await self.examine(), True
            return self._exam


@dataclass(frozen=True, slots=True)
class Probe:
    """A random adapter: a server that does not apply it applies none."""

    folder: Path
    exam: Exam

    @property
    def name(self) -> str:
        return self.exam.ref


@dataclass(slots=True)
class Away:
    """Absence of a server from the rotation, and its cause. Times are on the monotonic clock."""

    since: float
    error: str
    failures: int
    """Number of failures in a row."""
    next_at: float
    """Time at which it is asked again."""


class Member:
    """One server of a pool."""

    def __init__(
        self,
        number: int,
        server: VllmServer,
        facts: Facts,
        base_exam: Exam,
        options: PoolOptions,
        probe: Probe | None = None,
    ) -> None:
        self.number = number
        self.server = server
        self._facts = facts
        self._base_exam = base_exam
        self._probe = probe
        self._options = options
        self.in_flight = 0
        self.away: Away | None = None
        self.epoch = 0
        """Number of its returns: a failure of an earlier epoch says nothing about it now."""
        self.info: ServerInfo | None = None
        """Facts about the server; None: it has never answered."""
        self.held: set[str] = set()
        """Names that it may have loaded."""
        self.sees = False
        """Whether it takes images."""
        self.ready: set[str] = set()
        """Names that it has answered with."""
        self._noise = 0.0
        """Standard deviation of its difference to the trainer on the base, in nats."""
        self._changing = asyncio.Lock()

    @property
    def url(self) -> str:
        return self.server.url

    def leave(self, error: str) -> None:
        """Leave the rotation until it is brought back."""
        if self.away is None:
            self._options.say(f"The server {self.url} leaves the rotation: {error}")
            now = time.monotonic()
            self.away = Away(now, error, 1, now + self._options.returns.after(1))

    def failed_again(self, error: str) -> None:
        if away := self.away:
            away.error, away.failures = error, away.failures + 1
            away.next_at = time.monotonic() + self._options.returns.after(away.failures)

    def come_back(self) -> None:
        if self.away:
            seconds = time.monotonic() - self.away.since
            self._options.say(f"The server {self.url} is back after {seconds:.0f} s.")
            self.away, self.epoch = None, self.epoch + 1

    async def check(self) -> None:
        """Check which adapters it holds, and that it answers as the base and as an adapter.

        Raises:
            OutageError: it does not answer.
            Disagreement: it answers otherwise.
            BackendError: it loads no adapter of this kind.
        """
        async with self._changing:
            self.info = await self.server.info()
            self.held &= self.info.adapters
            self.ready &= self.info.adapters
            self._noise = await self._examine(None, self._base_exam)
            if self._probe is not None:
                await self._check_probe(self._probe)
            if self._facts.image_token is not None:
                self.sees = await self.server.sees(self._facts.image_token)

    async def _check_probe(self, probe: Probe) -> None:
        self.held.add(probe.name)
        await self.server.load(probe.name, probe.folder)
        try:
            await self._examine(probe.name, probe.exam)
        finally:
            await self.server.unload(probe.name)
            self.held.discard(probe.name)

    async def look(self) -> None:
        """Check that it answers.

        Raises:
            Hangs: see `ping`.
            OutageError: it does not answer, or it was restarted and has nothing loaded.
        """
        before = frozenset(self.ready)
        await self.ping()
        loaded = (await self.server.info()).adapters
        if lost := before & self.ready - loaded:
            raise OutageError(f"The server {self.url} no longer has {sorted(lost)}.")

    async def prepare(self, adapter: Adapter, warm: Sequence[Prefix] = ()) -> None:
        """Load an adapter, compute prefixes, the most useful first, and examine the server.

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
            self.held.add(name)  # before the call, which may take effect even if broken off
            await self.server.load(name, adapter.folder)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.warm_s):
                    await self._warm(name, warm)
            if (exam := await adapter.exam()) is not None:
                await self._examine(name, exam)
            self.ready.add(name)

    async def ping(self) -> None:
        """Ask for one token: a hung GPU or process keeps its connections open.

        Requests there wait on, each to its own deadline: the server may only pause.

        Raises:
            Hangs: none came in time, for this request or another.
            OutageError: it does not answer.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._options.still_s):
                # Two prompt tokens: one crashes vLLM's engine on CPU (0.32) under linear attention.
                # For a person: behind a queue of episodes a server that is well would seem to hang.
                await self.server.sample(None, (0, 0), SamplingParams(max_tokens=1, person=True), 1)
        except Busy:
            return
        except TimeoutError as error:
            if self.server.last_token_at < began:
                raise Hangs(
                    f"The server {self.url} hangs: no token came in {self._options.still_s:g} s."
                ) from error

    async def tidy(self, wanted: Callable[[str], bool]) -> None:
        """Unload adapters that are no longer wanted."""
        for name in [name for name in self.held if not wanted(name)]:
            async with self._changing:
                if wanted(name):  # by now
                    continue
                self.ready.discard(name)
                await self.server.unload(name)
                self.held.discard(name)

    async def _warm(self, name: str, prefixes: Sequence[Prefix]) -> None:
        for prefix in prefixes:
            try:
                params = SamplingParams(max_tokens=1, cache_salt=prefix.salt)
                await self.server.sample(name, prefix.tokens, params, 1)
            except (BackendError, RequestError) as error:
                if isinstance(error, OutageError):
                    raise
                self._options.say(f"{self.url} did not compute a prefix for {name}: {error}")

    async def _examine(self, name: str | None, exam: Exam) -> float:
        """Examine it; return the standard deviation of its difference to the trainer, in nats."""
        drawn = await sample_exam(self.server, name, exam)
        d = differences(exam, drawn)
        fault, distant = adapter_fault(exam, drawn, d, self._noise), distance_fault(exam, d)
        if fault or (distant and not self._facts.mixture):
            raise Disagreement(f"The server {self.url} {fault or distant}. {exam.advice}")
        if distant:
            self._options.say(
                f"The server {self.url} {distant}. In a mixture of experts rounding may choose "
                f"other experts, so it is taken. {exam.advice}"
            )
        return pstdev(d)
