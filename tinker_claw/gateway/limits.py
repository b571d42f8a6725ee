"""How much is taken in at once, and how requests share the event loop.

Rule: what cannot be taken is refused before it is read, with the time to come back. Whoever was let
in waits for a slot inside their answer, so that headers and keep-alives flow; a slot is kept for
every user who has none, and the others are served in turn: no user's flood starves another. Between
two requests that compute the event loop looks at its sockets, so that a crowd of requests, each of
a few milliseconds, does not make the gateway deaf for as long as all of them take together. What
takes longer, because somebody has sent very much, is done in a thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from tinker_claw.errors import RequestError

T = TypeVar("T")

MAX_QUEUE: Final = 256
"""Requests of one user that may wait: more than agents open by themselves, so only a loop that has
gone wrong is told to come back."""
MAX_BODY_BYTES: Final = 16_000_000
"""Of one request: twice what the longest context that is served (262,144 tokens) can need."""
BODY_S: Final = 60.0
"""How long a body may take to come: OpenClaw's have 38 to 156 kB, so a slow line needs seconds."""
BYTES_PER_TOKEN = 32
"""Real requests have four to five; of a body with more than so many, nothing is read."""
ALWAYS_READ_BYTES = 65_536
"""However small the context."""
COME_BACK_S = 10
"""For a client that finds the queue full."""


class ComputeRounds:
    """Gives each request that computes a round of the event loop of its own."""

    def __init__(self) -> None:
        self._whose: asyncio.Task[Any] | bool | None = None
        """Who computes in this round; True: somebody who was called; None: nobody."""
        self._waiting = deque[asyncio.Future[None]]()
        self._thread = ThreadPoolExecutor(1, "tinker-claw-large")

    async def own_round(self) -> None:
        """Wait for a round in which no other request computes.

        It is the caller's until the caller waits for something else; whoever has it goes on at
        once.
        """
        task = asyncio.current_task()
        if self._whose is task:
            return
        loop = asyncio.get_running_loop()
        if self._whose is None:
            loop.call_soon(self._next_round)
        else:
            called = loop.create_future()
            self._waiting.append(called)
            await called
        self._whose = task

    def _next_round(self) -> None:
        self._whose = None
        while self._waiting and self._whose is None:
            called = self._waiting.popleft()
            if not called.done():  # its client may have hung up
                called.set_result(None)
                self._whose = True
                asyncio.get_running_loop().call_soon(self._next_round)

    async def aside(self, compute: Callable[[], T]) -> T:
        """The result of something that takes long and touches nothing that others use.

        One at a time: together they would leave the event loop no time.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, compute)


@dataclass(slots=True)
class UserShare:
    """What a user was given, private turns included."""

    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Limits:
    """The requests that are being answered, and those that wait."""

    def __init__(self, users: Sequence[str], concurrent: int, queue: int) -> None:
        """`concurrent`: of all users; `queue`: how many more of one user may wait."""
        self._users = users
        self._most = concurrent + queue
        self._free = concurrent
        self._here: Counter[str] = Counter()
        self._sampling: Counter[str] = Counter()
        self._waiting = {user: deque[asyncio.Future[None]]() for user in users}
        self._served = {user: UserShare() for user in users}

    @contextmanager
    def place(self, user: str, cache_salt: str | None = None) -> Generator[Caller]:
        """Held for as long as a request is here.

        Args:
            cache_salt: of the user's group.

        Raises:
            RequestError: too many of this user's requests are.
        """
        if self._here[user] >= self._most:
            raise RequestError(
                f"Too many requests at once: {self._most} are being answered or waiting; come back "
                f"in {COME_BACK_S} seconds.",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                code="rate_limit_exceeded",
                headers={"retry-after": str(COME_BACK_S)},
            )
        self._here[user] += 1
        try:
            yield Caller(user, self, cache_salt)
        finally:
            self._here[user] -= 1

    def figures(self, user: str) -> dict[str, int]:
        """A user's own, since the start."""
        return {"requests_now": self._here[user]} | asdict(self._served[user])

    def served(self, user: str, prompt_tokens: int, completion_tokens: int) -> None:
        """A turn has ended."""
        figures = self._served[user]
        figures.turns += 1
        figures.prompt_tokens += prompt_tokens
        figures.completion_tokens += completion_tokens

    @asynccontextmanager
    async def slot(self, user: str) -> AsyncGenerator[None]:
        """Held while a reply is sampled; waits for one."""
        if self._waiting[user] or not self._may_start(user):
            await self._wait(user)
        else:
            self._start(user)
        try:
            yield
        finally:
            self._end(user)

    async def _wait(self, user: str) -> None:
        """Whoever ends a reply starts this one."""
        called = asyncio.get_running_loop().create_future()
        self._waiting[user].append(called)
        try:
            await called
        except asyncio.CancelledError:
            if called.cancelled():
                with suppress(ValueError):  # it may have been passed over already
                    self._waiting[user].remove(called)
            else:
                self._end(user)
            raise

    def _may_start(self, user: str) -> bool:
        if self._sampling[user]:
            return self._free > sum(not self._sampling[other] for other in self._users)
        return self._free > 0

    def _start(self, user: str) -> None:
        self._free -= 1
        self._sampling[user] += 1
        self._waiting[user] = self._waiting.pop(user)  # to the end of the round

    def _end(self, user: str) -> None:
        self._free += 1
        self._sampling[user] -= 1
        while (following := self._next()) is not None:
            called = self._waiting[following].popleft()
            self._start(following)
            called.set_result(None)

    def _next(self) -> str | None:
        for user, calls in self._waiting.items():
            while calls and calls[0].cancelled():
                calls.popleft()
            if calls and self._may_start(user):
                return user
        return None


@dataclass(frozen=True, slots=True)
class Caller:
    """A user with a place."""

    user: str
    limits: Limits
    cache_salt: str | None


async def read_body(
    receive: Receive,
    headers: Mapping[str, str],
    *,
    most: int,
    limit_s: float,
    context_tokens: int,
) -> bytes:
    """The body, refused as soon as it is known to be too long, or too long in coming.

    Args:
        headers: names in lower case.
        most: bytes.
        context_tokens: of the model.

    Raises:
        RequestError: 413, 408, or the 400 of a prompt that does not fit the context.
        ClientDisconnect: the client has hung up.
    """
    useful = max(ALWAYS_READ_BYTES, BYTES_PER_TOKEN * context_tokens)
    limit = min(most, useful)

    def too_long() -> RequestError:
        return hopeless(context_tokens) if useful < most else _too_long(most)

    declared = headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:19]) > limit:
        raise too_long()
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(limit_s):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_long()
                more = message.get("more_body", False)
    except TimeoutError as error:
        raise RequestError(
            f"The body did not come within {limit_s:g} seconds.",
            status=HTTPStatus.REQUEST_TIMEOUT,
            code="request_timeout",
            headers={"connection": "close"},
        ) from error
    return bytes(body)


def _too_long(limit: int) -> RequestError:
    return RequestError(
        f"The body is longer than {limit} bytes.",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        code="request_too_large",
    )


def hopeless(context_tokens: int) -> RequestError:
    """As for any prompt that does not fit, so that agents compact their history."""
    return RequestError(
        f"This model's maximum context length is {context_tokens} tokens; the body is so long that "
        "it cannot fit.",
        code="context_length_exceeded",
        param="messages",
    )
