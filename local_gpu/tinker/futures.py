"""Answers that are retrieved later, and the order in which a model's requests are carried out.

Rule: every request that has an id ends in an answer or an error. A bug of the server is reported to
the client and logged; it does not end the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, TypeAlias

from cachetools import FIFOCache

from tinker_claw.errors import AlignmentError, ClawError, RequestError, SamplerError, StepError

Answer: TypeAlias = bytes | Mapping[str, Any]
"""Protobuf, or what becomes JSON."""
Work: TypeAlias = Callable[[], Awaitable[Answer]]
_KEPT: Final = 64
"""Newest answers that are given again to a client that lost one."""
_CANCELLED: Final = {
    "error": "The request was cancelled: its session, its model or the server ended.",
    "category": "server",
}
_log = logging.getLogger(__name__)


class Futures:
    """Requests in flight, and answers that may still be retrieved, by request id."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Task[Answer]] = {}
        self._retrieved = FIFOCache[str, asyncio.Task[Answer]](_KEPT)

    def start(self, request_id: str, work: Work) -> None:
        """Begin a request, unless it is one that was sent again."""
        if request_id not in self._open and request_id not in self._retrieved:
            self._open[request_id] = asyncio.create_task(_guarded(work))

    async def retrieve(self, request_id: str, within_s: float) -> Answer | None:
        """Return the answer, or None if it is not there in time.

        Raises:
            RequestError: 410, there is no such request, or its answer is no longer kept.
        """
        task = self._open.get(request_id) or self._retrieved.get(request_id)
        if task is None:
            raise RequestError(
                f"There is no request {request_id}, or its answer is no longer kept.",
                status=HTTPStatus.GONE,
            )
        await asyncio.wait((task,), timeout=within_s)
        if not task.done():
            return None
        if self._open.pop(request_id, None) is not None:
            self._retrieved[request_id] = task
        return _CANCELLED if task.cancelled() else task.result()

    def cancel(self, prefix: str = "") -> None:
        """Cancel the requests whose ids begin so, and keep their answers like retrieved ones."""
        for request_id in [key for key in self._open if key.startswith(prefix)]:
            task = self._retrieved[request_id] = self._open.pop(request_id)
            task.cancel()


class Turns:
    """Carries out a model's requests in the order of their numbers, whenever they arrive."""

    def __init__(self) -> None:
        self.next = 0
        """Number of the next request; 0 makes the model, and the SDK counts from 1."""
        self._changed = asyncio.Condition()

    async def carry_out(self, number: int, work: Work) -> Answer:
        async with self._changed:
            await self._changed.wait_for(lambda: self.next == number)
        try:
            return await work()
        finally:
            async with self._changed:
                self.next += 1
                self._changed.notify_all()


async def _guarded(work: Work) -> Answer:
    """Return the answer, or the failure as the SDK reads it."""
    try:
        return await work()
    except ClawError as error:
        # A step that torch could not compute (out of memory) is not the client's mistake.
        mistake = isinstance(error, RequestError | AlignmentError | StepError | SamplerError)
        user = mistake and not isinstance(error.__cause__, RuntimeError)
        return {"error": str(error), "category": "user" if user else "server"}
    except Exception as error:
        _log.exception("request.failed")
        return {"error": f"The server failed: {type(error).__name__}.", "category": "server"}
