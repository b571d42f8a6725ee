"""A server that misbehaves: wraps an ASGI application and spoils chosen answers.

Rule: a fault says where (path, kind of request, which one of that kind) and how; everything else
passes through to the real server.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ALWAYS = 1_000_000


@dataclass
class Fault:
    """One way to misbehave."""

    path: str
    """Last part of the path: asample, optim_step, retrieve_future ..."""
    how: Literal["status", "hang", "cut", "fail", "again"] = "status"
    """Answer a status; never answer; break off in the middle of the answer; resolve the future to
    an error; say "try again" for ever."""
    status: int = 500
    times: int = ALWAYS
    of: str | None = None
    """Kind of result at retrieve_future: ForwardBackward, OptimStep, Sample, SaveWeights ..."""
    number: int | None = None
    """Number of the request of that kind since the fault was set, from 1; None: every one."""
    category: str = "server"
    lost: bool = False
    """Whether the real server gets the request first, so that only the answer is lost."""


@dataclass
class Faulty:
    """An ASGI application with faults, which a test adds and removes while it runs."""

    app: App
    faults: list[Fault] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    """Number of requests by path, spoiled ones included."""
    _ids: dict[str, dict[str, int]] = field(default_factory=dict)

    def spoil(self, *faults: Fault) -> None:
        """Misbehave like this, and count requests, from now on."""
        self._ids.clear()
        self.faults[:] = faults

    def behave(self) -> None:
        self.faults.clear()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"].rsplit("/", 1)[-1]
        self.seen[path] += 1
        body = await body_of(receive)
        fault = self._fault(path, scope, body)
        if fault is None:
            await self.app(scope, replay(body, receive), send)
            return
        fault.times -= 1
        if fault.lost:
            await self.app(scope, replay(body, receive), _ignore)
        await self._spoil(fault, body, receive, send)

    def _fault(self, path: str, scope: Scope, body: bytes) -> Fault | None:
        headers = {k.decode().lower(): v.decode() for k, v in scope["headers"]}
        kind = headers.get("x-tinker-request-type", "")
        number = self._number(kind, body) if path == "retrieve_future" else None
        for fault in self.faults:
            if fault.path != path or fault.times < 1:
                continue
            if fault.of in (None, kind) and fault.number in (None, number):
                return fault
        return None

    def _number(self, kind: str, body: bytes) -> int:
        """Number of this request among its kind; asking again for the same result has the same
        number."""
        known = self._ids.setdefault(kind, {})
        return known.setdefault(json.loads(body)["request_id"], len(known))

    async def _spoil(self, fault: Fault, body: bytes, receive: Receive, send: Send) -> None:
        if fault.how == "hang":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        if fault.how == "fail":
            answer = {"error": "the test says so", "category": fault.category}
            await answer_with(send, 200, answer)
        elif fault.how == "again":
            await asyncio.sleep(0.05)
            request_id = json.loads(body)["request_id"]
            told = {"type": "try_again", "request_id": request_id, "queue_state": "paused_capacity"}
            await answer_with(send, 200, told)
        elif fault.how == "cut":
            headers = [(b"content-type", b"application/json"), (b"content-length", b"999")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"{", "more_body": True})
            raise ConnectionAbortedError("cut off, as told")
        else:
            await answer_with(send, fault.status, {"detail": "the test says so"})


async def answer_with(send: Send, status: int, body: dict[str, Any]) -> None:
    said = json.dumps(body).encode()
    length = str(len(said)).encode()  # the SDK retries a 400 that names none
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]
    headers.append((b"connection", b"close"))  # the SDK leaves one open on which it asks once
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": said})


async def body_of(receive: Receive) -> bytes:
    pieces, more = [], True
    while more:
        message = await receive()
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(pieces)


def replay(body: bytes, receive: Receive) -> Receive:
    """Give the body again, then the real messages."""
    told = False

    async def again() -> dict[str, Any]:
        nonlocal told
        if not told:
            told = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


async def _ignore(message: dict[str, Any]) -> None:
    """Drop the real answer."""
