"""Connections that never become a request, and too many of them.

Rule: a connection is kept for a request that is being answered, and otherwise not for long. Where
there are too many, the one that has been silent longest makes room, so that whoever has something
to ask gets in.
"""

from __future__ import annotations

import asyncio
import json
import resource
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinker_claw.wire import error_body

HEAD_S = 30.0
"""From the first byte of a request, or from connecting, to the end of its headers."""
HEAD_BYTES = 65_536
IDLE_S = 75
"""Between two requests on one connection; longer than clients keep theirs, so that they close."""
MOST = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
"""Connections at the same time; files and other sockets need descriptors, too."""


class Connection(HttpToolsProtocol):
    """uvicorn's, with bounds."""

    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    silent_since = 0.0
    """Of the event loop's clock, seconds."""

    @property
    def busy(self) -> bool:
        """A request is here and not yet answered."""
        return self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.silent_since = self.loop.time()
        self._expect_head()
        if len(self.connections) > MOST:
            others = [c for c in self.connections if isinstance(c, Connection) and not c.busy]
            min(others, key=_since).transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.busy:
            self._head_came()
            return
        self._expect_head()
        if self.cycle is None or not self.cycle.more_body:  # pyright: ignore[reportUnnecessaryComparison]
            self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "The headers are too long.")

    def on_response_complete(self) -> None:
        self.silent_since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def _head_came(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.busy:
            self.transport.close()

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer in place of the application, which has seen nothing of it."""
        if not self.busy and not self.transport.is_closing():
            body = json.dumps(error_body(message, status)).encode()
            self.transport.write(
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                + body
            )
        self.transport.close()


def _since(connection: Connection) -> float:
    return connection.silent_since
