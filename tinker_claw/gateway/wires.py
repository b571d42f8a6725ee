"""Middleware before the routes of the wires: paths as clients write them, and origins of apps.

Rule: an origin is allowed by name, on the paths of wire formats only, and to who sends a key. It is
answered by its name, never by `*`, and no browser is asked for credentials of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_V1: Final = "/v1"
_LEADING: Final = re.compile(r"/*(?:v1(?:/+|$))*")
_NAMES: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_ASKS_FOR: Final = "access-control-request-headers"
_LASTS_S: Final = 600
"""Seconds for which a browser may remember what a preflight answered."""


class Wires:
    """Middleware that finds the wires' paths, and lets named origins use them."""

    def __init__(self, app: ASGIApp, paths: Iterable[str], origins: Collection[str] = ()) -> None:
        """`paths`: of all routes of the wires, those with parameters among them."""
        self._app = app
        self._origins = origins
        paths = list(paths)
        self._whole = {path for path in paths if "{" not in path}
        self._begun = tuple(path.partition("{")[0] for path in paths if "{" in path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = self._usual(scope["path"])
        if path is None:
            return await self._app(scope, receive, send)
        scope = {**scope, "path": path}
        origin = Headers(scope=scope).get("origin")
        if origin is None or origin not in self._origins:
            return await self._app(scope, receive, send)
        if scope["method"] == "OPTIONS":
            return await _preflight(scope, origin)(scope, receive, send)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_open_to(origin))
            await send(message)

        await self._app(scope, receive, answer)

    def _usual(self, path: str) -> str | None:
        """Return the path as the wires have it, whatever /v1 or slashes are doubled, missing or at
        its end; None: it is none of theirs."""
        if path in self._whole:
            return path
        short = re.sub("/+", "/", path).rstrip("/")
        if short in self._whole:
            return short
        rest = _LEADING.sub("", path, count=1)  # a model's name keeps its slashes
        short = f"{_V1}/{re.sub('/+', '/', rest).rstrip('/')}"
        if short in self._whole:
            return short
        for named in (path, f"{_V1}/{rest}"):
            if named.startswith(self._begun):
                return named
        return None


def _open_to(origin: str) -> dict[str, str]:
    return {"access-control-allow-origin": origin, "vary": "Origin"}


def _preflight(scope: Scope, origin: str) -> Response:
    """Answer a browser's question whether a page of this origin may send a request."""
    requested = Headers(scope=scope).get(_ASKS_FOR, "")
    headers = {
        "access-control-allow-methods": "GET, POST",
        "access-control-max-age": str(_LASTS_S),
    }
    if _NAMES.fullmatch(requested):
        headers["access-control-allow-headers"] = requested
    return Response(status_code=204, headers=_open_to(origin) | headers)
