"""The answer to a request, streamed or whole.

Rule: a generation runs exactly as long as its client is connected. Every answer watches for a
disconnect, and a stream never stays silent for longer than the keep-alive interval. One that the
server cancels, at the end of its grace, tells its client that it breaks off.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Awaitable
from contextlib import ExitStack, suppress
from http import HTTPStatus
from typing import Final

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tinker_claw.errors import RequestError
from tinker_claw.formats.base import WireFormat
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.errors import answer, as_request_error
from tinker_claw.gateway.generation import Generation
from tinker_claw.gateway.request import Job
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import Delta

KEEPALIVE_S = 10.0
"""Interval of keep-alives: OpenClaw gives a stream without data up after two to five minutes, a
proxy often after one."""
STOPPED: Final = RequestError(
    "The gateway was stopped before the reply was complete; ask again once it runs.",
    status=HTTPStatus.SERVICE_UNAVAILABLE,
)
_STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class ReplyResponse(Response):
    """The reply to one job, which keeps the place of its request until it is complete."""

    _stopped = False
    """Whether the server ends."""

    def __init__(self, deps: GatewayDeps, wire: WireFormat, job: Job, held: ExitStack) -> None:
        super().__init__()
        self._wire = wire
        self._writer = job.writer
        self._generation = Generation(deps, job)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            async with asyncio.TaskGroup() as group:
                # Not this task, which every token would wake through all layers of the server.
                answering = group.create_task(self._answer(scope, receive, send))
                try:
                    await self._listen(receive, send)
                except asyncio.CancelledError:  # by the server, which waits for what is said
                    self._stopped = True
                    self._generation.cancelled_because = TurnRefusal(Reason.STOPPED)
                answering.cancel()

    @abstractmethod
    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send."""

    async def _listen(self, receive: Receive, send: Send) -> None:
        """Wait until the client has disconnected, or been sent the whole answer."""
        while (await receive())["type"] != "http.disconnect":
            pass


class WholeAnswer(ReplyResponse):
    """The reply as one JSON object."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (await self._whole())(scope, receive, send)

    async def _whole(self) -> Response:
        try:
            reply = self._writer.whole(await self._generation.run())
            return JSONResponse(reply, headers={"x-request-id": self._writer.id})
        except asyncio.CancelledError:
            if not self._stopped:
                raise
            return answer(self._wire, STOPPED)
        except Exception as error:
            return answer(self._wire, error)


class StreamedAnswer(ReplyResponse):
    """The reply as events."""

    _sent_at = 0.0
    """time.monotonic() of the last write."""
    _open = False
    """The answer has begun and not ended."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = f"{self._wire.media_type}; charset=utf-8".encode()
        headers = [
            *_STREAM_HEADERS,
            (b"x-request-id", self._writer.id.encode()),
            (b"content-type", kind),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._open = True
        writer, generation = self._writer, self._generation

        def show(deltas: list[Delta]) -> Awaitable[None]:
            return self._write(send, writer.deltas(deltas, generation.sampling.version))

        try:
            await self._write(send, writer.begin())
            done = await generation.run(show)
            last = writer.deltas(generation.rest, done.version) + writer.end(done)
        except asyncio.CancelledError:
            if not self._stopped:
                raise
            last = writer.error(STOPPED)
        except Exception as error:
            last = writer.error(as_request_error(error))
        self._open = False
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _write(self, send: Send, body: bytes) -> Awaitable[None]:
        self._sent_at = time.monotonic()
        return send({"type": "http.response.body", "body": body, "more_body": True})

    async def _listen(self, receive: Receive, send: Send) -> None:
        """Also send a keep-alive when nothing else was sent for a while."""
        self._sent_at = time.monotonic()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._sent_at + KEEPALIVE_S):
                    return await super()._listen(receive, send)
            if time.monotonic() - self._sent_at < KEEPALIVE_S:
                continue
            if self._open:
                await self._write(send, self._writer.keep_alive())
            else:
                self._sent_at = time.monotonic()
