"""A session with the service, opened on demand and opened again when it is lost.

Rule: every wait here has a deadline. Making a session blocks inside the SDK, for minutes
where the network is down. So it happens in a daemon thread, which holds up neither the event loop
nor the end of the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import tinker
from tinker.lib.public_interfaces import APIFuture

from tinker_claw.backends.tinker.failures import BILLING, NOTICES, Deadline, unwell

T = TypeVar("T")

CLOSE_S = 5.0
"""Longest wait for closing a session; Ctrl-C waits for it where the service hangs."""
QUESTION_S = 15.0
"""Interval at which the service's health is checked while a request takes long."""
_LOOK_S = 1.0
"""Interval at which a wait checks the deadline and the notices."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of the service, and the API key."""

    base_url: str
    key: str | None
    """API key; None: the SDK finds it (credential command, or stored by `tinker auth login`)."""


class ServiceSession:
    """A session for one purpose, training or sampling."""

    def __init__(self, address: Address, purpose: str) -> None:
        self.address = address
        self._purpose = purpose
        self.service = self._new()
        """The present session; compare it to see whether it was renewed meanwhile."""
        self._doubtful = False
        """The last wait ended without an answer, so the next one checks the service at once."""

    async def ask(
        self, make: Callable[[tinker.ServiceClient], APIFuture[T]], deadline_s: float
    ) -> T:
        """Make a client in this session; the first one opens it.

        Raises:
            Deadline: it took longer; says why, as far as can be found out.
            Exception: whatever the SDK raises.
        """
        service = self.service

        async def opened() -> T:
            return await (await in_daemon_thread(lambda: make(service)))

        return await self._result(opened(), deadline_s)

    async def wait(self, future: APIFuture[T], deadline_s: float) -> T:
        """The result of one request. Raises like `ask`."""
        return await self._result(future.result_async(), deadline_s)

    async def _result(self, answer: Awaitable[T], deadline_s: float) -> T:
        (result,) = await self._settled([answer], deadline_s)
        if isinstance(result, BaseException):
            raise result
        return result

    async def wait_all(
        self, futures: Mapping[str, APIFuture[Any]], deadline_s: float
    ) -> dict[str, Any]:
        """The results of all requests; that of a failed one is its exception."""
        answers = [future.result_async() for future in futures.values()]
        return dict(zip(futures, await self._settled(answers, deadline_s), strict=True))

    async def _settled(
        self, answers: Iterable[Awaitable[T]], deadline_s: float
    ) -> list[T | BaseException]:
        """Wait for all answers, or until the deadline, or until the service is found to be away."""
        tasks = [asyncio.ensure_future(answer) for answer in answers]
        try:
            late = await self._deadline({*tasks}, deadline_s)
            self._doubtful = late is not None
        finally:
            for task in tasks:
                task.cancel()
        return [_outcome(task, late) for task in tasks]

    async def _deadline(
        self, waiting: set[asyncio.Future[T]], deadline_s: float
    ) -> Deadline | None:
        """Return why tasks are waited for no longer; None: all have ended.

        The SDK retries for minutes before it reports that a service is gone. Here two plain
        requests in a row without an answer are enough.
        """
        clock = asyncio.get_running_loop().time
        until, billing, unwell_before = clock() + deadline_s, NOTICES.billing, self._doubtful
        ask_at = clock() + (0.0 if self._doubtful else QUESTION_S)
        while waiting:
            left = max(0.0, until - clock())
            _, waiting = await asyncio.wait(waiting, timeout=min(_LOOK_S, left))
            over = clock() >= until
            if waiting and NOTICES.billing != billing:
                return Deadline(BILLING)
            if waiting and (over or clock() >= ask_at):
                trouble = await unwell(self.address.base_url, self.address.key, late=over)
                ask_at = clock() + QUESTION_S
                if trouble and unwell_before:
                    return Deadline(trouble)
                if over:
                    why = trouble or "it answers other questions; this one hangs"
                    return Deadline(f"nothing came back within {deadline_s:g} s: {why}")
                unwell_before = trouble is not None
        return None

    async def renew(self, broken: tinker.ServiceClient) -> None:
        """Begin a new session, unless that was done since `broken` was looked up."""
        if self.service is broken:
            self.service = self._new()
            await _close(broken, "errored")

    async def aclose(self) -> None:
        """Finish the session, so that the service frees what it holds for us."""
        await _close(self.service, "success")

    def _new(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(
            base_url=self.address.base_url,
            api_key=self.address.key,
            user_metadata={"client": "tinker-claw", "purpose": self._purpose},
        )


def _outcome(task: asyncio.Future[T], late: Deadline | None) -> T | BaseException:
    if not task.done() or task.cancelled():
        return late or Deadline("the request was cancelled")
    return task.exception() or task.result()


async def _close(service: tinker.ServiceClient, ending: Literal["success", "errored"]) -> None:
    """Close the session at the service, which times it out if that fails."""
    try:
        async with asyncio.timeout(CLOSE_S):
            # While a session is being made the SDK holds a lock, which this waits for.
            closing = await in_daemon_thread(lambda: service.close(ending))
            await closing.result_async()
    except (TimeoutError, tinker.TinkerError, RuntimeError):
        return


async def rest_client(address: Address) -> tinker.RestClient:
    """Return a client for requests that need no session."""
    return await in_daemon_thread(
        lambda: tinker.RestClient(base_url=address.base_url, api_key=address.key)
    )


async def in_daemon_thread(call: Callable[[], T]) -> T:
    """Run a blocking call of the SDK; the process does not wait for it when it ends."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="tinker-claw-sdk", daemon=True).start()
    return await asyncio.wrap_future(future)
