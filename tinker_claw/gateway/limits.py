"""Limits of concurrent requests, and of their bodies.

Rule: a request over a limit is refused before it is read, with a Retry-After. An admitted one waits
for a slot inside its answer, so that headers and keep-alives flow. Episodes leave slots free for
the next person, and no user has so many that another cannot have one. Requests are served in the
order of their arrival. The event loop polls its sockets between two requests that compute: many
requests of a few milliseconds each do not block the gateway for their total time. Longer work, for
very large requests, runs in a thread.
"""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from starlette.requests import Request

from tinker_claw.errors import RequestError
from tinker_claw.gateway.coding import coding_of, decode, too_large

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


class Limits:
    """The requests that are being answered, and those that wait."""

    def __init__(self, users: Sequence[str], concurrent: int, queue: int) -> None:
        """`concurrent`: of all users; `queue`: how many more of one user may wait, persons and
        episodes apart."""
        kept = min(len(users) - 1, max(LEFT_FREE, concurrent // 4), concurrent - 1)
        left = max(LEFT_FREE, concurrent // LEFT_SHARE)
        self._most = concurrent + queue
        self._all = asyncio.Semaphore(concurrent)
        self._episodes = asyncio.Semaphore(max(1, concurrent - left))
        self._own = {user: asyncio.Semaphore(concurrent - kept) for user in users}
        self._here = Counter[tuple[str, bool]]()
        self._bytes = Counter[tuple[str, bool]]()
        """Bytes of the bodies held, by user, persons and episodes apart."""
        self._served = {
            user: Counter(turns=0, prompt_tokens=0, completion_tokens=0) for user in users
        }
        """Turns and tokens that each user was served, private turns included."""

    @contextmanager
    def admission(
        self, user: str, cache_salt: str | None = None, *, episode: bool = False
    ) -> Generator[Caller]:
        """Hold a place until a request is answered.

        Args:
            cache_salt: of the user's group.
            episode: no person waits for it.

        Raises:
            RequestError: this user has too many requests.
        """
        if self._here[user, episode] >= self._most:
            raise _too_many(f"{self._most} are being answered or waiting")
        self._here[user, episode] += 1
        caller = Caller(user, self, cache_salt, episode)
        try:
            yield caller
        finally:
            self._here[user, episode] -= 1
            self._bytes[user, episode] -= caller.bytes

    def count_bytes(self, caller: Caller, count: int) -> None:
        """Count further bytes of a request's body.

        Raises:
            RequestError: this user's requests have too many bytes.
        """
        whose = caller.user, caller.episode
        if self._bytes[whose] + count > MAX_HELD_BYTES:
            raise _too_many(f"more than {MAX_HELD_BYTES // 10**6} MB of them would be held")
        self._bytes[whose] += count
        caller.bytes += count

    def figures(self, user: str) -> dict[str, int]:
        """Return a user's own figures since the start."""
        here = self._here[user, False] + self._here[user, True]
        return {"requests_now": here, **self._served[user]}

    def served(self, user: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Count a turn that has ended."""
        self._served[user].update(
            turns=1, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
        )

    @asynccontextmanager
    async def slot(self, user: str, *, episode: bool = False) -> AsyncGenerator[None]:
        """Wait for a slot, and hold it while a reply is sampled."""
        # Of all slots last: who waits for an own one holds none that others could have.
        async with self._episodes if episode else nullcontext(), self._own[user], self._all:
            yield


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
    sent = ", ".join(request.headers.getlist("content-encoding"))
    coding = coding_of(sent) if sent else ""
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:19]) > most:
        raise too_large(most)
    received, more = bytearray(), True
    try:
        async with asyncio.timeout(BODY_S):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise RequestError("The client has disconnected.")
                piece = message.get("body", b"")
                if len(received) + len(piece) > most:
                    raise too_large(most)
                if caller is not None:
                    caller.limits.count_bytes(caller, len(piece))
                received += piece
                more = message.get("more_body", False)
    except TimeoutError as error:
        raise RequestError(
            f"The body did not come within {BODY_S:g} seconds.",
            status=HTTPStatus.REQUEST_TIMEOUT,
            code="request_timeout",
            headers={"connection": "close"},
        ) from error
    body = bytes(received)
    if coding:
        body = await decode(body, coding, most)
        if caller is not None:
            caller.limits.count_bytes(caller, max(0, len(body) - len(received)))
    return body.removeprefix(BOM_UTF8)


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
