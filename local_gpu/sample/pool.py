"""A pool of servers that samples as one: the servers, their health checks, and the choice of one.

Rule: an adapter that is in use is on every server of the rotation, and one that is not in use goes
from all of them; it is `ready` only after the server has answered with it as the trainer does.
Loads and unloads of a server never cross. A server that fails leaves the rotation at once, and
comes back by the same way that it came in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from local_gpu.halves import BASE_REF
from local_gpu.sample.exam import Exam, ExamResult, judge, keeps_apart, sit
from local_gpu.sample.hang import hangs, ping
from local_gpu.sample.routing import HotPrefixes, Prefix, Routes, keys_of
from local_gpu.sample.server import InferenceServer, ServerInfo
from local_gpu.tasks import together
from tinker_claw.errors import BackendError, ClawError, OutageError, RequestError
from tinker_claw.retry import Backoff
from tinker_claw.types import SamplingParams, Tokens

_log = logging.getLogger(__name__)


def _nobody_listens() -> None:
    """Ignore a change, for a server that is not in a pool yet."""


_TURN_S: Final = 2.0
"""Seconds of a turn to load. A load takes less; after that the next server begins beside one that
hangs."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options of a pool of sampler servers."""

    tolerance: float = 0.2
    """Largest accepted mean difference of a server's logprobs to the trainer's, in nats. bfloat16
    makes about 0.04, another base model several."""
    warm_prefixes: int = 4
    """Prefixes computed on each server for a new version before it serves; 0: none."""
    warm_s: float = 20.0
    """Seconds at most for warming up those prefixes, on each server."""
    steps: Callable[[], bool] = bool
    """Whether a training step runs. A version that is opened meanwhile, by its name, serves without
    being compared once more: no request waits for a step."""
    score_s: float = 30.0
    """Seconds at most for the trainer to score what a version is compared on; it may be scoring for
    others."""
    ready_s: float = 120.0
    """Seconds at most for a server to load a version and answer with it, all told."""
    returns: Backoff = Backoff(first_s=1.0, longest_s=30.0)  # noqa: RUF009 - frozen
    """Delays before a server that failed is asked again."""
    student_topk: int = 0
    """Top-k logprobs per token that requests may ask for: every server must give as many."""
    look_s: float = 30.0
    """Seconds between health checks of a server that is not busy."""
    quiet_s: float = 5.0
    """Seconds without a sign of life until a server that owes answers is asked for one token."""
    still_s: float = 10.0
    """Further seconds until it counts as hung, beside the time to compute its prompts."""
    say: Callable[[str], None] = _log.warning
    """Receives what happens to servers, in sentences."""
    away: Callable[[Sequence[str]], object] = len
    """Receives the servers out of the rotation, and why, whenever that changes."""


class Disagreement(BackendError):
    """A server answers with other weights than it should."""


@dataclass(eq=False, slots=True)
class Adapter:
    """A published version that servers hold while somebody uses it."""

    name: str
    folder: Path
    examine: Callable[[], Awaitable[Exam | None]]
    users: int = 0
    """Number of open samplers and requests in flight."""
    _exam: Exam | None = None
    _written: bool = False
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def exam(self) -> Exam | None:
        """Exam on this version, written by the trainer when first needed. None: it had no time."""
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
    """A server that is not asked. Times are on the monotonic clock."""

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
        server: InferenceServer,
        base_exams: tuple[Exam, Exam],
        options: PoolOptions,
        probe: Probe | None = None,
        image_token: int | None = None,
    ) -> None:
        """`base_exams`: at temperature 1, and at another. `image_token`: see `Facts`."""
        self.number = number
        self.server = server
        self._base_exams = base_exams
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
        self._image_token = image_token
        self.keeps_apart = True
        """Whether the prefix cache of one salt is never used under another."""
        self.ready: set[str] = set()
        """Names that it has answered with."""
        self.agreements: dict[str, ExamResult] = {}
        """Result of the last exam of each ref."""
        self._noise = 0.0
        """Standard deviation of its difference to the trainer on the base, in nats."""
        self._changing = asyncio.Lock()
        self.turn = asyncio.Semaphore()
        """Turn to load an adapter while the engine computes nothing else; shared by the whole
        pool."""
        self.changed: Callable[[], None] = _nobody_listens
        """Called when it leaves the rotation or comes back."""

    @property
    def url(self) -> str:
        return self.server.url

    def leave(self, error: str) -> None:
        """Leave the rotation until it is brought back."""
        if self.away is None:
            self._options.say(f"The server {self.url} leaves the rotation: {error}")
            now = time.monotonic()
            self.away = Away(now, error, 1, now + self._options.returns.after(1))
            self.changed()

    def failed_again(self, error: str) -> None:
        if away := self.away:
            away.error, away.failures = error, away.failures + 1
            away.next_at = time.monotonic() + self._options.returns.after(away.failures)

    def come_back(self) -> None:
        if self.away:
            seconds = time.monotonic() - self.away.since
            self._options.say(f"The server {self.url} is back after {seconds:.0f} s.")
            self.away, self.epoch = None, self.epoch + 1
            self.server.pulse.returned()
            self.changed()

    async def check(self) -> None:
        """Check which adapters it holds, and that it answers as the base and as an adapter.

        Raises:
            OutageError: it does not answer.
            Disagreement: it answers otherwise.
            BackendError: it loads no adapter of this kind.
        """
        plain, shaped = self._base_exams
        async with self._changing:
            self.info = await self.server.info()
            self.held &= self.info.adapters
            self.ready &= self.info.adapters
            self.agreements[BASE_REF] = await self._sit(None, plain)
            self._noise = self.agreements[BASE_REF].sd
            await self._sit(None, shaped)
            if self._probe is not None:
                await self._try(self._probe)
            if self._image_token is not None:
                self.sees = await self.server.sees(self._image_token)
            self.keeps_apart = await keeps_apart(self.server, plain)
            if not self.keeps_apart:
                self._options.say(
                    f"The server {self.url} uses what it has computed of one user's prompts for "
                    "all others, so that how long it takes may tell one what another has asked: "
                    "take a newer release where not everybody may know. Cached tokens are not told."
                )

    async def _try(self, probe: Probe) -> None:
        self.held.add(probe.name)
        await self._load(probe.name, probe.folder)
        try:
            await self._sit(probe.name, probe.exam)
        finally:
            await self.server.unload(probe.name)
            self.held.discard(probe.name)

    async def look(self) -> None:
        """Check that it answers. Raises OutageError if not, or if it was restarted and has nothing
        loaded."""
        before = frozenset(self.ready)
        await ping(self.server)
        known = (await self.server.info()).adapters
        if lost := before & self.ready - known:
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
            await ping(self.server)  # one that hangs is found out sooner than by a load
            self.held.add(name)  # before: nobody knows what a call that is broken off has done
            await self._load(name, adapter.folder)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.warm_s):
                    await self._warm(name, warm)
            if (exam := await adapter.exam()) is not None:
                self.agreements[name] = await self._sit(name, exam)
            self.ready.add(name)

    async def _load(self, name: str, folder: Path) -> None:
        """Load an adapter in turn; a server that is slow to load holds no other up."""
        await self.turn.acquire()
        with ExitStack() as held:
            held.callback(self.turn.release)
            late = asyncio.get_running_loop().call_later(_TURN_S, held.close)
            held.callback(late.cancel)
            await self.server.load(name, folder)

    async def tidy(self, wanted: Callable[[str], bool]) -> None:
        """Unload adapters that nobody wants any more."""
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

    async def _sit(self, name: str | None, exam: Exam) -> ExamResult:
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


_AFTER_A_BUG_S: Final = 30.0


class Watch:
    """Calls `tend` when woken, and when it has asked to be, one call at a time."""

    def __init__(self, name: str, tend: Callable[[], Awaitable[float | None]]) -> None:
        """`tend` returns the seconds until its next call; None: when woken."""
        self._woken = asyncio.Event()
        self._tending = asyncio.create_task(self._run(name, tend))

    def wake(self) -> None:
        self._woken.set()

    async def aclose(self) -> None:
        """Cancel the running call."""
        self._tending.cancel()
        await asyncio.wait((self._tending,))

    async def _run(self, name: str, tend: Callable[[], Awaitable[float | None]]) -> None:
        seconds: float | None = None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._woken.wait()
            self._woken.clear()
            try:
                seconds = await tend()
            except Exception:
                _log.exception("Looking after %s failed.", name)
                seconds = _AFTER_A_BUG_S


_LEAVE_S: Final = 5.0
"""Seconds for unloading when the pool is closed."""
_FEEL_S: Final = 0.5
"""Seconds between checks whether a server hangs."""
_LOADING: Final = 4
"""At most one server in four loads at a time, but at least one: the others go on streaming."""
_NONE: Final[Mapping[Member, str]] = {}


@dataclass(eq=False, slots=True)
class Lease:
    """A place for one request on a server."""

    member: Member
    epoch: int
    begun: bool = False
    """Whether a token has come: no other server can take over the request then."""


class Pool:
    """The servers in rotation, and the adapters in use."""

    def __init__(
        self, members: Sequence[Member], options: PoolOptions, model: str, context_tokens: int
    ) -> None:
        self._members = members
        self._options = options
        self._model = model
        self.context_tokens = context_tokens
        self.constrains = all(member.server.constrains for member in members)
        self.sees = all(member.sees for member in members if member.away is None)
        """Whether all servers took an image at the start, as any of them may get the request."""
        self._wanted: dict[str, Adapter] = {}
        self._routes = Routes()
        self.hot = HotPrefixes()
        self._watches = [Watch(m.url, lambda m=m: self._tend(m)) for m in members]
        self._pulses = [Watch(f"pulse {m.url}", lambda m=m: self._feel(m)) for m in members]
        turn = asyncio.Semaphore(max(1, len(members) // _LOADING))
        for member in members:
            member.changed, member.turn = self._tell, turn
            self._wake(member)
            self._pulses[member.number].wake()
        self._tell()

    def wanted(self) -> frozenset[str]:
        """Names in use."""
        return frozenset(self._wanted)

    def newest(self, but: str) -> str | None:
        """Name of the adapter in use that was opened last."""
        return next((name for name in reversed(self._wanted) if name != but), None)

    def agreements(self, ref: str) -> tuple[ExamResult, ...]:
        return tuple(m.agreements[ref] for m in self._members if ref in m.agreements)

    def use(self, name: str, make: Callable[[], Adapter]) -> Adapter:
        """Keep an adapter on the servers until it is released as often as it was used."""
        adapter = self._wanted.get(name) or self._wanted.setdefault(name, make())
        adapter.users += 1
        return adapter

    def release(self, adapter: Adapter) -> None:
        adapter.users -= 1
        if adapter.users == 0 and self._wanted.pop(adapter.name, None):  # else it is closed
            self._routes.forget_name(adapter.name)
            for member in self._members:
                self._wake(member)

    @contextmanager
    def using(self, adapter: Adapter | None) -> Generator[Adapter | None]:
        """Keep an adapter open for a request. None: the base, which is always there."""
        if adapter is None:
            yield None
            return
        used = self.use(adapter.name, lambda: adapter)  # closed, and perhaps opened anew since
        try:
            yield used
        finally:
            self.release(used)

    async def open(self, adapter: Adapter) -> None:
        """Bring an adapter that is in use to every server of the rotation.

        A server that fails leaves the rotation, unless all do.

        Raises:
            OutageError: no server answers.
            BackendError: no server loads it, or answers with it as the trainer does.
        """
        rotation = [m for m in self._members if m.away is None]
        if not rotation:
            raise self.nobody()
        warm = self._warm(rotation)
        failures = await together(self._prepare(m, adapter, warm[m]) for m in rotation)
        refused = [e for e in failures if e is not None and not isinstance(e, OutageError)]
        for member, failure in zip(rotation, failures, strict=True):
            if isinstance(failure, OutageError) or (failure and None in failures):
                self.sick(member, failure)
        if None in failures:
            return
        if refused:
            sentences = " ".join(dict.fromkeys(map(str, refused)))
            raise BackendError(f"No server serves {adapter.name!r}: {sentences}") from refused[0]
        raise self.nobody()

    def lease(
        self,
        adapter: Adapter | None,
        prompt: Tokens,
        salt: str | None,
        without: Mapping[Member, str],
    ) -> Lease:
        """Choose the best server for a prompt and count the request there; see `give_back`.

        Args:
            salt: of the prompt, see `SamplingParams.cache_salt`.
            without: servers that are not asked again, and why.

        Raises:
            OutageError: no server is left.
        """
        rotation = {
            m.number: m.in_flight for m in self._members if m.away is None and m not in without
        }
        if not rotation:
            raise self.nobody(without)
        name, keys = (adapter.name if adapter else None), keys_of(prompt, salt)
        if adapter:
            # A name that was let go is on no server or on some: it is loaded where it is not.
            ready = {n: k for n, k in rotation.items() if name in self._members[n].ready}
            rotation = ready or rotation
            self.hot.note(prompt, keys, salt)
        member = self._members[self._routes.choose(name, keys, len(prompt), rotation)]
        self._routes.note(name, keys, len(prompt), member.number)
        member.in_flight += 1
        return Lease(member, member.epoch)

    def give_back(self, lease: Lease) -> None:
        lease.member.in_flight -= 1

    def sick(self, member: Member, error: BaseException, epoch: int | None = None) -> None:
        """Take a server out of the rotation, unless the failure is from before it came back."""
        if member.away is None and epoch in (None, member.epoch):
            member.leave(str(error))
            self._routes.forget_server(member.number)
            self._wake(member)

    def away(self) -> tuple[tuple[str, str], ...]:
        """(url, why) of the servers that are not in the rotation."""
        return tuple((m.url, m.away.error) for m in self._members if m.away)

    def _tell(self) -> None:
        self._options.away([f"{url}: {why}" for url, why in self.away()])

    def nobody(self, without: Mapping[Member, str] = _NONE) -> OutageError:
        now = time.monotonic()
        said = "; ".join(
            f"{m.url} away for {now - m.away.since:.0f} s ({m.away.error})"
            if m.away
            else f"{m.url} has failed ({without.get(m, 'just now')})"
            for m in self._members
        )
        return OutageError(f"No server can be asked: {said}.")

    async def aclose(self) -> None:
        """Unload what the servers hold, as far as they answer, and close the connections."""
        await together(watch.aclose() for watch in (*self._watches, *self._pulses))
        self._wanted.clear()
        await together(self._leave(member) for member in self._members)

    def _warm(self, members: Sequence[Member]) -> dict[Member, list[Prefix]]:
        """Prefixes that each server computes for a new version, the most useful first."""
        most = self._options.warm_prefixes
        hottest = self.hot.hottest(most * len(self._members))
        hot = {prefix: keys_of(prefix.tokens, prefix.salt) for prefix in hottest}
        return {m: self._routes.held(m.number, hot)[:most] for m in members}

    async def _prepare(
        self, member: Member, adapter: Adapter, warm: Sequence[Prefix]
    ) -> ClawError | None:
        try:
            async with _in_time(member, self._options.ready_s):
                await member.prepare(adapter, warm)
        except (BackendError, RequestError) as error:
            return error
        for prefix in warm:
            keys = keys_of(prefix.tokens, prefix.salt)
            self._routes.note(adapter.name, keys, 0, member.number)
        return None

    async def _tend(self, member: Member) -> float | None:
        """Bring a server to the wanted state; return the seconds until the next look."""
        if member.away is None:
            try:
                await member.tidy(self._wanted.__contains__)
                if not member.in_flight:  # a busy one is judged by its requests
                    await member.look()
            except OutageError as error:
                self.sick(member, error)
            except (BackendError, RequestError) as error:
                self._options.say(f"{member.url} does not do as it is told: {error}")
        if member.away is None:
            return self._options.look_s
        wait_s = member.away.next_at - time.monotonic()
        if wait_s > 0:
            return wait_s
        try:
            await self._bring_back(member)
        except (BackendError, RequestError) as error:
            member.failed_again(str(error))
            return max(0.0, member.away.next_at - time.monotonic())
        return 0.0  # what went out of use meanwhile is still there

    async def _feel(self, member: Member) -> float:
        """Check whether a server hangs, and move its requests if so; return the seconds until the
        next look."""
        server, options = member.server, self._options
        if member.away is None and await hangs(
            server, quiet_s=options.quiet_s, still_s=options.still_s
        ):
            error = OutageError(f"The server {member.url} hangs: it says nothing any more.")
            self.sick(member, error)
            server.pulse.cut(str(error))
        return _FEEL_S

    async def _bring_back(self, member: Member) -> None:
        async with _in_time(member, self._options.ready_s):
            await member.check()
        if member.info is None or member.info.model != self._model:
            raise BackendError(f"{member.url} serves another model than {self._model!r}.")
        if self.sees and not member.sees:
            raise BackendError(f"{member.url} takes no images, which the others do.")
        if member.info.context_tokens < self.context_tokens:
            raise BackendError(f"{member.url} has a context of less than {self.context_tokens}.")
        while missing := [a for a in self._wanted.values() if a.name not in member.ready]:
            for adapter in missing:
                warm = self._warm([member])
                failure = await self._prepare(member, adapter, warm[member])
                if failure and adapter.users:
                    raise failure
        member.come_back()

    async def _leave(self, member: Member) -> None:
        with suppress(BackendError, RequestError, TimeoutError):
            if member.away is None:
                async with asyncio.timeout(_LEAVE_S):
                    await member.tidy(lambda _: False)
        await member.server.aclose()

    def _wake(self, member: Member) -> None:
        self._watches[member.number].wake()


@asynccontextmanager
async def _in_time(member: Member, seconds: float) -> AsyncGenerator[None]:
    """Bound the time of work on a server, so that one that hangs delays nobody for long."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise OutageError(f"The server {member.url} was not ready in {seconds:g} s.") from error
