"""Answers that are retrieved later, and the order in which they are computed.

A request gets an id at once, and its result by long poll (`Promises`). Those of one model are
carried out in turns (`Turns`).

Rule: every promise ends in an answer or an error message. A bug of the server is reported to the
one client and logged; it does not end the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeAlias
from uuid import uuid4

from cachetools import FIFOCache

from tinker_claw.errors import AlignmentError, ClawError, RequestError, StepError

Answer: TypeAlias = bytes | Mapping[str, Any]
"""Protobuf, or what becomes JSON."""
Spawn: TypeAlias = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

CREATION = 0
"""The turn that creates a model; the SDK counts its requests from 1."""
_REMEMBERED = 4096
"""Recent requests of a model that are recognised when sent again."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Promise:
    id: str
    owner: str
    """Id of the session, whose end cancels the promise."""
    cancellable: bool
    """Whether its client may cancel it; what changes weights cannot be cancelled."""
    task: asyncio.Task[None] | None = None
    answer: Answer | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    forget_at: float = float("inf")
    """Time on the monotonic clock."""


class Promises:
    """Requests in flight, and answers that may still be retrieved."""

    def __init__(
        self,
        spawn: Spawn,
        *,
        keep_s: float,
        keep_retrieved_s: float,
        most: int,
    ) -> None:
        """`most`: requests and answers at once."""
        self._spawn = spawn
        self._keep_s = keep_s
        self._keep_retrieved_s = keep_retrieved_s
        self._promises: dict[str, Promise] = {}
        self._most = most

    def start(
        self,
        owner: str,
        begin: Callable[[], Coroutine[Any, Any, Answer]],
        *,
        cancellable: bool = False,
    ) -> str:
        """Begin the work of a request; return the promise's id.

        Raises:
            RequestError: 429, too many are waiting already; the SDK retries later.
        """
        if len(self._promises) >= self._most:
            self.sweep()
        if len(self._promises) >= self._most:
            raise RequestError(
                "Too many requests wait for their answers; send this one again later.",
                status=HTTPStatus.TOO_MANY_REQUESTS,
            )
        promise, work = Promise(uuid4().hex, owner, cancellable), begin()
        self._promises[promise.id] = promise
        promise.task = self._spawn(self._settle(promise, work))
        # Not in the task: one that is cancelled before it begins runs none of its code.
        promise.task.add_done_callback(lambda _: self._settled(promise, work))
        return promise.id

    async def wait(self, request_id: str, at_most_s: float) -> Answer | None:
        """Return the answer, or None if it is not there in time.

        Raises:
            RequestError: 410, there is no such promise, or its answer is too old.
        """
        if (promise := self._promises.get(request_id)) is None:
            raise RequestError(
                f"There is no request {request_id}, or its answer is no longer kept.",
                status=HTTPStatus.GONE,
            )
        try:
            async with asyncio.timeout(at_most_s):
                await promise.ready.wait()
        except TimeoutError:
            return None
        forget_at = time.monotonic() + self._keep_retrieved_s
        promise.forget_at = min(promise.forget_at, forget_at)
        return promise.answer

    def cancel(self, request_id: str) -> None:
        promise = self._promises.get(request_id)
        if promise is not None and promise.task is not None and promise.cancellable:
            promise.task.cancel()

    def cancel_all(self, owner: str | None = None) -> None:
        """Cancel the promises of one session, or all; clients that poll for them get an error."""
        for promise in self._promises.values():
            if owner in (None, promise.owner) and promise.task is not None:
                promise.task.cancel()

    def sweep(self) -> None:
        """Drop answers that are too old."""
        now = time.monotonic()
        old = [id for id, promise in self._promises.items() if promise.forget_at <= now]
        for id in old:
            del self._promises[id]

    def __len__(self) -> int:
        return len(self._promises)

    async def _settle(self, promise: Promise, work: Coroutine[Any, Any, Answer]) -> None:
        promise.answer = await guarded(work)

    def _settled(self, promise: Promise, work: Coroutine[Any, Any, Answer]) -> None:
        work.close()  # one that never began would warn
        if promise.answer is None:
            sentence = "The request was cancelled: its session or the server ended."
            promise.answer = failure(sentence, by_user=False)  # nothing was wrong with it
        promise.task = None
        promise.forget_at = time.monotonic() + self._keep_s
        promise.ready.set()


async def guarded(work: Awaitable[Answer]) -> Answer:
    """Return the answer, or the failure as the SDK reads it. The one broad `except` of this
    package."""
    try:
        return await work
    except ClawError as error:
        return failure(str(error), by_user=_is_users(error))
    except Exception as error:
        _log.exception("request_failed")
        return failure(f"The server failed: {type(error).__name__}.", by_user=False)


def failure(sentence: str, *, by_user: bool = True) -> Mapping[str, Any]:
    return {"error": sentence, "category": "user" if by_user else "server"}


def _is_users(error: ClawError) -> bool:
    # A step that torch could not compute (out of memory) is not the client's mistake.
    torch_failed = isinstance(error.__cause__, RuntimeError)
    return isinstance(error, RequestError | AlignmentError | StepError) and not torch_failed


class Turns:
    """Order of one model's requests: by seq_id, not by arrival.

    Those that come before a lower number wait for it, at most until their session ends. The request
    id of each number is remembered, for one that is sent again.
    """

    def __init__(self) -> None:
        self._next = CREATION
        self._busy = False
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self.requests = FIFOCache[int, str](_REMEMBERED)
        """seq_id: the request id that a re-sent request gets again."""

    def unnumbered(self) -> int:
        """A number for a request that came without one: after all that have come."""
        return max([self._next - 1, *self.requests]) + 1

    @asynccontextmanager
    async def turn(self, seq_id: int) -> AsyncGenerator[None]:
        """Wait for the turn of `seq_id` and hold it.

        Raises:
            RequestError: it has passed.
        """
        if seq_id < self._next or seq_id in self._waiting or (self._busy and seq_id == self._next):
            raise RequestError(f"seq_id {seq_id} is too late: {self._next} is next.")
        if seq_id != self._next:
            self._waiting[seq_id] = asyncio.get_running_loop().create_future()
            try:
                await self._waiting[seq_id]
            finally:
                del self._waiting[seq_id]
        self._busy = True
        try:
            yield
        finally:
            self._busy, self._next = False, seq_id + 1
            if (waiter := self._waiting.get(self._next)) and not waiter.done():
                self._busy = True  # no other request may enter before it wakes
                waiter.set_result(None)
