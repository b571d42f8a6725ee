"""Checks on a request's sender and headers, before anything of its body is read.

Rule: a refusal closes the connection, because a body that nobody reads may follow it. Its status
is one that Tinker's SDK takes as final.
"""

from __future__ import annotations

import secrets
from http import HTTPStatus

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from local_gpu.tinker import checkpoints
from tinker_claw.errors import RequestError
from tinker_claw.origin import refuse_forms, refuse_pages

PROTOBUF = "application/x-protobuf"


class Pages:
    """Turns away what a web page in a browser of this machine sends."""

    def __init__(self, app: ASGIApp, *, keyless: bool) -> None:
        self._app = app
        self._keyless = keyless

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                refuse_pages(headers, local=self._keyless)
                refuse_forms(headers, PROTOBUF)
            except RequestError as error:
                refusal = _refusal(str(error), HTTPStatus(error.status))
                return await refusal(scope, receive, send)
        await self._app(scope, receive, send)


class Key:
    """Turns away who has not the key."""

    def __init__(self, app: ASGIApp, wanted: str) -> None:
        self._app = app
        self._wanted = wanted.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(checkpoints.OPEN_PATHS):
            given = Headers(scope=scope).get("X-API-Key", "")
            if not secrets.compare_digest(given.encode(), self._wanted):
                told = "The API key is wrong: set TINKER_API_KEY to the --api-key of this server."
                return await _refusal(told, HTTPStatus.UNAUTHORIZED)(scope, receive, send)
        await self._app(scope, receive, send)


class BodyLimit:
    """Turns away a body that is too long, or that does not say how long it is."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            length = headers.get("content-length", "0")
            chunked = "transfer-encoding" in headers
            if chunked or not length.isdecimal() or int(length[:19]) > self._limit:
                told = f"A body may have {self._limit} bytes, and has to say how many it has."
                refusal = _refusal(told, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
                return await refusal(scope, receive, send)
        await self._app(scope, receive, send)


def _refusal(told: str, status: HTTPStatus) -> JSONResponse:
    return JSONResponse({"error": told, "category": "user"}, status, {"Connection": "close"})
