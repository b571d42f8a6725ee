"""Limits of concurrent requests, and how requests share the event loop.

Rule: a request over a limit is refused before it is read, with a Retry-After. An admitted one waits
for a slot inside its answer, so that headers and keep-alives flow. Requests of episodes have a
queue of their own, with lower priority than that of persons, and leave slots free for the next
person. In the persons' queue a slot is kept for users who have none, and in either queue users are
served in turn: no user's flood starves another. Between two requests that compute, the event loop
polls its sockets, so that many requests of a few milliseconds each do not block the gateway for
their total time. Longer work, for very large requests, runs in a thread.
"""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeVar

from starlette.requests import Request

from tinker_claw.errors import RequestError
from tinker_claw.gateway.coding import TooLongError, coding_of, decode

T = TypeVar("T")

MAX_QUEUE: Final = 256
"""Requests of one user that may wait in either queue: more than agents open by themselves, so only
a runaway loop is refused."""
MAX_HELD_BYTES: Final = 32_000_000
"""Most bytes of bodies of one user's requests in either queue. A request takes up to 15 times its
bytes: 410 kB with 100,000 tokens took 6 MB. OpenClaw's have 59 kB on average, so a full queue of
them has less; a loop that sends the longest possible ones would take all memory."""
MAX_BODY_BYTES: Final = 16_000_000
"""Largest body of a request: twice what the longest served context (262,144 tokens) can need."""
BODY_S: Final = 60.0
"""Most seconds to receive a body: OpenClaw's have 38 to 156 kB, so a slow network takes seconds."""
CHARS_PER_TOKEN = 32
"""Most characters of a prompt per token of context; real ones have four to five."""
ALWAYS_READ = 65_536
"""Characters up to which a prompt is read, however small the context."""
COME_BACK_S = 10
"""Retry-After for a client that finds the queue full."""
LEFT_FREE = 2
"""Fewest slots that episodes leave free for the next persons: a reply takes seconds, and a person
with an agent asks for one or two at a time."""
LEFT_SHARE = 16
"""Episodes leave one slot in so many: four of 64, because with two a few persons had to wait."""
PASSED_BY = 8
"""Replies of persons that may begin in a row while an episode waits. Then one of an episode begins,
so that episodes go on where persons take every slot."""


class ComputeRounds:
    """Gives each request that computes a round of the event loop of its own."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._whose: asyncio.Task[Any] | None = None
        """Task that computes in this round; None: none does."""
        self._thread = ThreadPoolExecutor(1, "tinker-claw-large")

    async def own_round(self) -> None:
        """Wait for a round in which no other request computes.

        It lasts until the caller awaits something else; a caller that already has it continues at
        once.
        """
        task = asyncio.current_task()
        if self._whose is not task:
            await self._one.acquire()
            self._whose = task
            asyncio.get_running_loop().call_soon(self._end_round)

    def _end_round(self) -> None:
        self._whose = None
        self._one.release()

    async def aside(self, compute: Callable[[], T]) -> T:
        """Run a long computation that shares no state in a thread, and return its result.

        One at a time: together they would leave the event loop no time.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, compute)


class _Line:
    """Queue of the requests of persons, or of episodes."""

    def __init__(self, users: Sequence[str]) -> None:
        self.here: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        """Bytes of the bodies held, by user."""
        self.sampling: dict[str, int] = {}
        """Number of replies being sampled, by user; users without one are absent."""
        self.waiting = {user: deque[asyncio.Future[None]]() for user in users}
        """Waiting requests by user, the users in the order in which they are served."""

    @property
    def first(self) -> Iterator[str]:
        """Yield the users who have a request waiting, the next one first."""
        for user, calls in self.waiting.items():
            while calls and calls[0].cancelled():
                calls.popleft()
            if calls:
                yield user

    @property
    def anybody(self) -> bool:
        return next(self.first, None) is not None


class Limits:
    """The requests that are being answered, and those that wait."""

    def __init__(self, users: Sequence[str], concurrent: int, queue: int) -> None:
        """`concurrent`: of all users; `queue`: how many more of one user may wait in a line."""
        self._users = len(users)
        self._most = concurrent + queue
        self._free = concurrent
        self._left = max(LEFT_FREE, concurrent // LEFT_SHARE)
        """Slots that episodes leave free."""
        self._kept = min(max(LEFT_FREE, concurrent // 4), concurrent - 1)
        """Slots that are kept free for persons at most: with more users than that, nobody could
        have two."""
        self._persons, self._episodes = _Line(users), _Line(users)
        self._passed = 0
        """Replies of persons that have begun while an episode waits."""
        self._served = {
            user: Counter(turns=0, prompt_tokens=0, completion_tokens=0) for user in users
        }
        """Turns and tokens that each user was served, private turns included."""

    @contextmanager
    def place(
        self, user: str, cache_salt: str | None = None, *, episode: bool = False
    ) -> Generator[Caller]:
        """Hold a place until a request is answered.

        Args:
            cache_salt: of the user's group.
            episode: no person waits for it.

        Raises:
            RequestError: this user has too many requests.
        """
        here = self._line(episode).here
        if here[user] >= self._most:
            raise _too_many(f"{self._most} are being answered or waiting")
        here[user] += 1
        caller = Caller(user, self, cache_salt, episode)
        try:
            yield caller
        finally:
            here[user] -= 1
            self._line(episode).bytes[user] -= caller.bytes

    def hold(self, caller: Caller, count: int) -> None:
        """Count further bytes of a request's body.

        Raises:
            RequestError: this user's requests have too many bytes.
        """
        held = self._line(caller.episode).bytes
        if held[caller.user] + count > MAX_HELD_BYTES:
            raise _too_many(f"more than {MAX_HELD_BYTES // 10**6} MB of them would be held")
        held[caller.user] += count
        caller.bytes += count

    def figures(self, user: str) -> dict[str, int]:
        """Return a user's own figures since the start."""
        here = self._persons.here[user] + self._episodes.here[user]
        return {"requests_now": here, **self._served[user]}

    def served(self, user: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Count a turn that has ended."""
        self._served[user].update(
            turns=1, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
        )

    @asynccontextmanager
    async def slot(self, user: str, *, episode: bool = False) -> AsyncGenerator[None]:
        """Wait for a slot, and hold it while a reply is sampled."""
        line = self._line(episode)
        behind = episode and self._persons.anybody
        if behind or user in line.first or not self._may_start(line, user):
            await self._wait(line, user)
        else:
            self._start(line, user)
            self._call()  # a waiting episode may be due next
        try:
            yield
        finally:
            self._end(line, user)

    def _line(self, episode: bool) -> _Line:
        return self._episodes if episode else self._persons

    async def _wait(self, line: _Line, user: str) -> None:
        """Wait in the queue until the end of another reply starts this one."""
        called = asyncio.get_running_loop().create_future()
        line.waiting[user].append(called)
        try:
            await called
        except asyncio.CancelledError:
            if not called.cancelled():
                self._end(line, user)
            raise

    def _may_start(self, line: _Line, user: str) -> bool:
        without = self._users - len(self._persons.sampling)
        if line is self._episodes:
            kept = 0 if self._passed >= PASSED_BY else max(self._left, without)
        else:
            kept = without if user in line.sampling else 0
        return self._free > min(kept, self._kept)

    def _start(self, line: _Line, user: str) -> None:
        self._free -= 1
        line.sampling[user] = line.sampling.get(user, 0) + 1
        line.waiting[user] = line.waiting.pop(user)  # to the end of the round
        passed = line is self._persons and self._episodes.anybody
        self._passed = self._passed + 1 if passed else 0

    def _end(self, line: _Line, user: str) -> None:
        self._free += 1
        line.sampling[user] -= 1
        if not line.sampling[user]:
            del line.sampling[user]
        self._call()

    def _call(self) -> None:
        while (following := self._next()) is not None:
            line, user = following
            called = line.waiting[user].popleft()
            self._start(line, user)
            called.set_result(None)

    def _next(self) -> tuple[_Line, str] | None:
        """Return the queue and the user whose request may start now; None: none may."""
        lines = (self._persons, self._episodes)
        for line in lines if self._passed < PASSED_BY else reversed(lines):
            for user in line.first:
                if self._may_start(line, user):
                    return line, user
            if line is self._persons and line.anybody:
                break
        return None


@dataclass(slots=True)
class Caller:
    """A user whose request holds a place."""

    user: str
    limits: Limits
    cache_salt: str | None
    episode: bool
    """The request is a step of an episode: no person waits for it."""
    bytes: int = 0
    """Bytes of the body received so far."""


async def read_body(
    request: Request, most: int | None = None, caller: Caller | None = None
) -> bytes:
    """Read the body, and decode it where the client compressed it; refuse it as soon as it is known
    to be too long, or takes too long.

    Args:
        most: bytes, before and after decoding; None: MAX_BODY_BYTES.
        caller: the bytes count as theirs until the answer; None: it is small, and not counted.

    Raises:
        RequestError: it is too long or too slow, its coding is not read here, this user's requests
            hold too much, or the client has disconnected.
    """
    most = MAX_BODY_BYTES if most is None else most
    too_long = _too_large(most)
    coding = coding_of(", ".join(request.headers.getlist("content-encoding")))
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:19]) > most:
        raise too_long
    body: bytes | bytearray = bytearray()
    more = True
    try:
        async with asyncio.timeout(BODY_S):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise RequestError("The client has disconnected.")
                piece = message.get("body", b"")
                if len(body) + len(piece) > most:
                    raise too_long
                if caller is not None:
                    caller.limits.hold(caller, len(piece))
                body += piece
                more = message.get("more_body", False)
    except TimeoutError as error:
        raise RequestError(
            f"The body did not come within {BODY_S:g} seconds.",
            status=HTTPStatus.REQUEST_TIMEOUT,
            code="request_timeout",
            headers={"connection": "close"},
        ) from error
    if coding:
        body = await _decoded(bytes(body), coding, caller)
        if len(body) > most:
            raise too_long
    return bytes(body).removeprefix(BOM_UTF8)


async def _decoded(body: bytes, coding: str, caller: Caller | None) -> bytes:
    try:
        found = await decode(body, coding, MAX_BODY_BYTES)
    except TooLongError as error:
        raise _too_large(MAX_BODY_BYTES) from error
    if caller is not None and len(found) > len(body):
        caller.limits.hold(caller, len(found) - len(body))
    return found


def _too_large(most: int) -> RequestError:
    return RequestError(
        f"The body is longer than {most} bytes.",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        code="request_too_large",
    )


def _too_many(what: str) -> RequestError:
    return RequestError(
        f"Too many requests at once: {what}; come back in {COME_BACK_S} seconds.",
        status=HTTPStatus.TOO_MANY_REQUESTS,
        code="rate_limit_exceeded",
        headers={"retry-after": str(COME_BACK_S)},
    )


def no_room(context_tokens: int) -> RequestError:
    """Return the error where no history is short enough. On a length error agents compact and retry
    for ever, so its text has none of the words by which they recognise one."""
    return RequestError(
        "System prompt and tools alone do not fit this model's window of "
        f"{context_tokens} tokens, so a new or a shorter conversation does not help: give the "
        "agent fewer tools, or serve with more --context-tokens, or another model.",
        code="window_too_small",
    )


def hopeless(context_tokens: int) -> RequestError:
    """Return the error of any prompt that does not fit, so that agents compact their history."""
    return RequestError(
        f"This model's maximum context length is {context_tokens} tokens; the messages are so "
        "long that they cannot fit.",
        code="context_length_exceeded",
        param="messages",
    )
