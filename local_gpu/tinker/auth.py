"""Checks on a request's sender and headers, before anything of its body is read.

Rule: a refusal closes the connection, because an unread body may follow it. Where the body is too
long, the connection stays open and the rest is dropped, so that a client that writes first can read
why. Its status is one that Tinker's SDK does not retry.
"""

from __future__ import annotations

import secrets
from http import HTTPStatus

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from local_gpu.tinker import checkpoints
from local_gpu.tinker.config import WireConfig
from tinker_claw.errors import RequestError
from tinker_claw.origin import refuse_forms, refuse_pages

PROTOBUF = "application/x-protobuf"


class Door:
    """Refuses web pages in a browser of this machine, requests without the key, and bodies that are
    too long or do not state their length."""

    def __init__(self, app: ASGIApp, config: WireConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["path"], Headers(scope=scope))
            except RequestError as error:
                told = {"error": str(error), "category": "user"}
                too_long = error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
                ends = {} if too_long else {"Connection": "close"}
                refusal = JSONResponse(told, error.status, ends)
                return await refusal(scope, receive, send)
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        key, most = self._config.api_key, self._config.body_bytes
        refuse_pages(headers, local=key is None)
        refuse_forms(headers, PROTOBUF)
        if key is not None and not path.startswith(checkpoints.OPEN_PATHS):
            given = headers.get("X-API-Key", "")
            if not secrets.compare_digest(given.encode(), key.encode()):
                raise RequestError(
                    "The API key is wrong: set TINKER_API_KEY to the --api-key of this server.",
                    status=HTTPStatus.UNAUTHORIZED,
                )
        length = headers.get("content-length", "0")
        chunked = "transfer-encoding" in headers
        if chunked or not length.isdecimal() or int(length[:19]) > most:
            raise RequestError(
                f"A body may have {most} bytes, and has to say how many it has.",
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            )
