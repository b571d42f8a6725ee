"""A pool of servers that samples as one: the servers, their health checks, and the choice of one.

Rule: an adapter in use is loaded on every server in rotation, and one no longer in use is unloaded
from all of them. A server that fails leaves the rotation at once, and comes back by the checks that
first let it in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from local_gpu.sample.http import Busy
from local_gpu.sample.member import Adapter, Hangs, Member, PoolOptions
from local_gpu.sample.routing import RecentPrompts, Routes, keys_of
from tinker_claw.errors import BackendError, ClawError, OutageError, RequestError
from tinker_claw.tasks import together
from tinker_claw.types import Tokens

_log = logging.getLogger(__name__)

_AFTER_BUG_S: Final = 30.0


class Watch:
    """Calls `tend` when woken or due, one call at a time."""

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
                seconds = _AFTER_BUG_S


_LEAVE_S: Final = 5.0
"""Seconds for unloading when the pool is closed."""
_NO_MEMBERS: Final[Mapping[Member, str]] = {}


@dataclass(eq=False, slots=True)
class Lease:
    """A place for one request on a server."""

    member: Member
    epoch: int
    begun: bool = False
    """Whether a token has come: no other server can take over the request then."""


class Pool:
    """The servers in rotation, and the adapters in use. See `serving` for what opens them."""

    def __init__(
        self, members: Sequence[Member], options: PoolOptions, model: str, context_tokens: int
    ) -> None:
        self._members = members
        self._options = options
        self._model = model
        self.context_tokens = context_tokens
        self.sees = all(member.sees for member in members if member.away is None)
        """Whether all servers took an image at the start, as any of them may get the request."""
        self._wanted: dict[str, Adapter] = {}
        self._routes = Routes()
        self.recent = RecentPrompts()
        self._watches = [Watch(m.url, lambda m=m: self._tend(m)) for m in members]
        for member in members:
            self._wake(member)
        self._report_away()

    def live(self) -> frozenset[str]:
        """Names in use. A running reply also keeps its version's folder: servers may read it
        again."""
        return frozenset(self._wanted)

    def forget(self) -> None:
        self.recent.clear()

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

    async def bring(self, adapter: Adapter) -> None:
        """Bring an adapter that is in use to every server of the rotation.

        A server that fails leaves the rotation, unless all do.

        Raises:
            OutageError: no server answers.
            BackendError: no server loads it, or answers with it as the trainer does.
        """
        rotation = [m for m in self._members if m.away is None]
        if not rotation:
            raise self.no_server_error()
        failures = await together(self._prepare(member, adapter) for member in rotation)
        refused = [e for e in failures if e is not None and not isinstance(e, OutageError)]
        for member, failure in zip(rotation, failures, strict=True):
            if isinstance(failure, OutageError) or (failure and None in failures):
                self.take_out(member, failure)
        if None in failures:
            return
        if refused:
            sentences = " ".join(dict.fromkeys(map(str, refused)))
            raise BackendError(f"No server serves {adapter.name!r}: {sentences}") from refused[0]
        raise self.no_server_error()

    @contextmanager
    def lease(
        self,
        adapter: Adapter | None,
        prompt: Tokens,
        salt: str | None,
        without: Mapping[Member, str],
    ) -> Generator[Lease]:
        """Choose the best server for a prompt, and count the request there.

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
            raise self.no_server_error(without)
        name, keys = (adapter.name if adapter else None), keys_of(prompt, salt)
        if adapter:
            # A released name may be on some servers or none: it is loaded where it is missing.
            ready = {n: k for n, k in rotation.items() if name in self._members[n].ready}
            rotation = ready or rotation
        member = self._members[self._routes.choose(name, keys, len(prompt), rotation)]
        if adapter:
            self.recent.note(prompt, keys, salt, member.number)
        self._routes.note(name, keys, len(prompt), member.number)
        member.in_flight += 1
        try:
            yield Lease(member, member.epoch)
        finally:
            member.in_flight -= 1

    def take_out(self, member: Member, error: BaseException, epoch: int | None = None) -> None:
        """Stop routing to a server, unless the failure predates its return."""
        if member.away is None and epoch in (None, member.epoch):
            member.leave(str(error))
            self._report_away()
            self._routes.forget_server(member.number)
            self._wake(member)

    def away(self) -> tuple[tuple[str, str], ...]:
        """(url, why) of the servers that are not in the rotation."""
        return tuple((m.url, m.away.error) for m in self._members if m.away)

    def _report_away(self) -> None:
        self._options.away([f"{url}: {why}" for url, why in self.away()])

    def no_server_error(self, without: Mapping[Member, str] = _NO_MEMBERS) -> OutageError:
        now = time.monotonic()
        states = "; ".join(
            f"{m.url} away for {now - m.away.since:.0f} s ({m.away.error})"
            if m.away
            else f"{m.url} has failed ({without.get(m, 'just now')})"
            for m in self._members
        )
        return OutageError(f"No server can be asked: {states}.")

    async def aclose(self) -> None:
        """Unload what the servers hold, as far as they answer, and close the connections."""
        await together(watch.aclose() for watch in self._watches)
        self._wanted.clear()
        await together(self._leave(member) for member in self._members)

    async def _prepare(self, member: Member, adapter: Adapter) -> ClawError | None:
        most = self._options.warm_prefixes
        warm = self.recent.prefixes(most, member.number) or self.recent.prefixes(min(most, 1))
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
        """Bring a server to the wanted state; return the seconds until the next check."""
        if member.away is None:
            try:
                await member.look()  # before an unload, which a hung server blocks
                await member.tidy(self._wanted.__contains__)
            except Busy:
                pass  # it is asked again
            except OutageError as error:
                self.take_out(member, error)
                self._end_if_hung(member, error)
            except (BackendError, RequestError) as error:
                self._options.say(f"{member.url} refuses a command: {error}")
        if member.away is None:
            return self._options.look_s
        wait_s = member.away.next_at - time.monotonic()
        if wait_s > 0:
            return wait_s
        try:
            await self._bring_back(member)
        except (BackendError, RequestError) as error:
            member.failed_again(str(error))
            self._end_if_hung(member, error)
            return max(0.0, member.away.next_at - time.monotonic())
        return 0.0  # to unload what went out of use meanwhile

    def _end_if_hung(self, member: Member, error: ClawError) -> None:
        if isinstance(error, Hangs):
            self._options.hung(member.url)

    async def _bring_back(self, member: Member) -> None:
        await member.ping()
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
                failure = await self._prepare(member, adapter)
                if failure and adapter.users:
                    raise failure
        member.come_back()
        self._report_away()

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
    """Bound the time of work on a server, so that a hung one delays no other for long."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise OutageError(f"The server {member.url} was not ready in {seconds:g} s.") from error
