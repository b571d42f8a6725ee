"""The requests of one model, one after the other.

Rule: in the order of their seq_id, whatever the order of their arrival. A number that never comes
fails those that wait for it, after a limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from tinker_claw.errors import RequestError

CREATION = 0
"""The turn in which a model comes to be; the SDK counts its requests from 1."""
_REMEMBERED = 4096


class Room:
    """So much of something for all; who finds too little left waits, in the order of arrival."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._freed = asyncio.Event()
        self._door = asyncio.Lock()

    @asynccontextmanager
    async def room(self, needs: int) -> AsyncGenerator[None]:
        """`needs` is at most the whole."""
        async with self._door:
            while needs > self._left:
                self._freed.clear()
                await self._freed.wait()
            self._left -= needs
        try:
            yield
        finally:
            self._left += needs
            self._freed.set()


class Lane:
    """Gives out turns by number, and remembers which request took which number."""

    def __init__(self, hole_s: float, on_hole: Callable[[str], None]) -> None:
        self._hole_s = hole_s
        self._on_hole = on_hole
        self._next = CREATION
        self._busy = False
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._requests: dict[int, str] = {}

    def known(self, seq_id: int) -> str | None:
        """The request id that a re-sent request gets again."""
        return self._requests.get(seq_id)

    def remember(self, seq_id: int, request_id: str) -> str:
        self._requests[seq_id] = request_id
        if len(self._requests) > _REMEMBERED:
            del self._requests[min(self._requests)]
        return request_id

    def unnumbered(self) -> int:
        """A number for a request that came without one: after all that have come."""
        return max([self._next - 1, *self._requests]) + 1

    @asynccontextmanager
    async def turn(self, seq_id: int) -> AsyncGenerator[None]:
        """Wait for one's turn and hold it.

        Raises:
            RequestError: it has passed, or a lower number never came.
        """
        if seq_id < self._next or seq_id in self._waiting or (self._busy and seq_id == self._next):
            raise RequestError(f"seq_id {seq_id} is too late: {self._next} is next.")
        if seq_id != self._next:
            await self._wait(seq_id)
        self._stop_timer()
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            self._advance(seq_id + 1)

    async def _wait(self, seq_id: int) -> None:
        self._waiting[seq_id] = asyncio.get_running_loop().create_future()
        self._watch_for_hole()
        try:
            await self._waiting[seq_id]
        finally:
            self._waiting.pop(seq_id, None)

    def _advance(self, following: int) -> None:
        self._next = following
        if (waiter := self._waiting.get(following)) and not waiter.done():
            self._busy = True  # nobody may slip in before it wakes
            waiter.set_result(None)
        else:
            self._watch_for_hole()

    def _watch_for_hole(self) -> None:
        if self._waiting and not self._busy and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._hole_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        sentence = (
            f"seq_id {self._next} did not come within {self._hole_s:g} s, so the later requests "
            "of this model cannot be carried out."
        )
        self._on_hole(sentence)
        self._next = max(self._waiting) + 1
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(RequestError(sentence))
