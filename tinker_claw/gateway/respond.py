"""The answer to a chat request, streamed or whole.

Rule: the generation lives exactly as long as its client listens. Every answer watches for the
client to hang up, and a stream never stays silent for longer than the keep-alive interval.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tinker_claw.errors import ClawError
from tinker_claw.gateway.admit import Job
from tinker_claw.gateway.book import Book
from tinker_claw.gateway.capture import Generation
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.errors import answer, describe
from tinker_claw.render import Delta
from tinker_claw.wire import sse
from tinker_claw.wire.reply import DONE

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class WholeAnswer(Response):
    """The reply as one JSON object."""

    def __init__(self, deps: GatewayDeps, book: Book, job: Job) -> None:
        super().__init__()
        self._job = job
        self._generation = Generation(deps, book, job)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(_until_hung_up(receive))
            answering = group.create_task(self._answer())
            await asyncio.wait({listening, answering}, return_when=asyncio.FIRST_COMPLETED)
            listening.cancel()
            answering.cancel()
        if not answering.cancelled():
            await answering.result()(scope, receive, send)

    async def _answer(self) -> Response:
        try:
            outcome = await self._generation.run(_show_nothing)
        except ClawError as error:
            return answer(error)
        return JSONResponse(self._job.head.completion(outcome.reply, outcome.finish, outcome.usage))


class StreamedAnswer(Response):
    """The reply as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, deps: GatewayDeps, book: Book, job: Job) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._keepalive_s = deps.settings.keepalive_s
        self._job = job
        self._head = job.head
        self._generation = Generation(deps, book, job)
        self._calls = 0
        self._sent_at = time.monotonic()
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(_until_hung_up(receive))
            answering = group.create_task(self._answer(send))
            pulse = group.create_task(self._pulse(send))
            await asyncio.wait({listening, answering}, return_when=asyncio.FIRST_COMPLETED)
            for task in (listening, answering, pulse):
                task.cancel()

    async def _answer(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._emit(send, self._head.role())

        async def show(deltas: list[Delta]) -> None:
            for delta in deltas:
                await self._emit(send, self._event(delta))

        try:
            outcome = await self._generation.run(show)
        except ClawError as error:
            # No finish_reason follows, so that no client takes the fragment for an answer.
            await self._emit(send, describe(error)[1])
        else:
            await show(outcome.rest)
            await self._emit(send, self._head.finish(outcome.finish))
            if self._job.request.include_usage:
                await self._emit(send, self._head.usage(outcome.usage))
            await self._write(send, DONE)
        self._ended = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _event(self, delta: Delta) -> dict[str, Any]:
        if delta.call is not None:
            self._calls += 1
            return self._head.tool_call(self._calls - 1, delta.call)
        if delta.kind == "reasoning":
            return self._head.reasoning(delta.text)
        return self._head.text(delta.text)

    async def _pulse(self, send: Send) -> None:
        """Send an empty delta whenever nothing else was sent for a while."""
        while not self._ended:
            quiet_s = time.monotonic() - self._sent_at
            if quiet_s < self._keepalive_s:
                await asyncio.sleep(self._keepalive_s - quiet_s)
            else:
                await self._emit(send, self._head.empty())

    async def _emit(self, send: Send, event: dict[str, Any]) -> None:
        await self._write(send, sse(event))

    async def _write(self, send: Send, body: bytes) -> None:
        self._sent_at = time.monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _show_nothing(deltas: list[Delta]) -> None:
    """A whole answer is built from the reply."""


async def _until_hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
