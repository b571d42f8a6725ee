"""The answer to a chat request, streamed or whole.

Rule: the generation lives exactly as long as its client listens. Every answer watches for the
client to hang up, and a stream never stays silent for longer than the keep-alive interval.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tinker_claw.conversation.index import ConversationIndex
from tinker_claw.errors import ClawError
from tinker_claw.formats.chat_reply import DONE, ReplyChunks, ReplyHead, sse
from tinker_claw.gateway.deps import GatewayDeps
from tinker_claw.gateway.errors import answer, describe
from tinker_claw.gateway.generation import Generation
from tinker_claw.gateway.request import Job
from tinker_claw.render.stream import Delta

KEEPALIVE_S = 10.0
"""Between chunks without text: OpenClaw gives a stream without data up after two to five minutes, a
proxy often after one."""
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class WholeAnswer(Response):
    """The reply as one JSON object."""

    def __init__(self, deps: GatewayDeps, book: ConversationIndex, job: Job) -> None:
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
        head = _head(self._job, self._generation)
        whole = head.completion(outcome.reply, outcome.finish, outcome.usage)
        return JSONResponse(whole, headers={"x-request-id": head.id})


class StreamedAnswer(Response):
    """The reply as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, deps: GatewayDeps, book: ConversationIndex, job: Job) -> None:
        super().__init__(headers=_HEADERS | {"x-request-id": job.head.id})
        del self.headers["content-length"]
        self._job = job
        self._generation = Generation(deps, book, job)
        self._chunks = ReplyChunks(job.head)
        self._version = job.head.version
        self._calls = 0
        self._sent_at = time.monotonic()
        self._started = False
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(self._listen(receive, send))
            answering = group.create_task(self._answer(send))
            await asyncio.wait({listening, answering}, return_when=asyncio.FIRST_COMPLETED)
            listening.cancel()
            answering.cancel()

    async def _answer(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._started = True
        await self._write(send, self._chunks.role())

        async def show(deltas: list[Delta]) -> None:
            await self._write(send, self._events(deltas))

        try:
            outcome = await self._generation.run(show)
        except ClawError as error:
            # No finish_reason follows, so that no client takes the fragment for an answer.
            await self._end(send, sse(describe(error)[1]))
        else:
            last = self._events(outcome.rest) + self._chunks.finish(outcome.finish)
            if self._job.request.include_usage:
                last += self._chunks.usage(outcome.usage)
            await self._end(send, last + DONE)

    def _events(self, deltas: list[Delta]) -> bytes:
        if self._version != self._generation.version:
            head = _head(self._job, self._generation)
            self._version, self._chunks = head.version, ReplyChunks(head)
        return b"".join([self._event(delta) for delta in deltas])

    def _event(self, delta: Delta) -> bytes:
        if delta.call is not None:
            self._calls += 1
            return self._chunks.tool_call(self._calls - 1, delta.call)
        if delta.kind == "reasoning":
            return self._chunks.reasoning(delta.text)
        return self._chunks.text(delta.text)

    async def _listen(self, receive: Receive, send: Send) -> None:
        """Until the client hangs up: send an empty delta when nothing else was sent for a while."""
        while True:
            quiet_s = time.monotonic() - self._sent_at
            try:
                async with asyncio.timeout(max(0.0, KEEPALIVE_S - quiet_s)):
                    return await _until_hung_up(receive)
            except TimeoutError:
                if time.monotonic() - self._sent_at >= KEEPALIVE_S:
                    await self._keep_alive(send)

    async def _keep_alive(self, send: Send) -> None:
        if self._ended or not self._started:
            self._sent_at = time.monotonic()
        else:
            await self._write(send, self._chunks.empty())

    async def _write(self, send: Send, body: bytes) -> None:
        self._sent_at = time.monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end(self, send: Send, body: bytes) -> None:
        """The last events and the end of the body, in one write."""
        self._ended = True
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _head(job: Job, generation: Generation) -> ReplyHead:
    """The reply's head, with the version that has answered."""
    return replace(job.head, version=generation.version)


async def _show_nothing(deltas: list[Delta]) -> None:
    """A whole answer is built from the reply."""


async def _until_hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
