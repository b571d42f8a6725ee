"""Connections: too many of them, those that never become a request, and clients that do not read.

Rule: a connection is kept for a request that is being answered, and otherwise not for long. Where
there are too many, the one that has been silent longest makes room, at once and in constant time,
so that whoever has something to ask gets in. What a client does not take is not kept for ever.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import struct
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from tinker_claw.telemetry import log
from tinker_claw.wire import error_body

HEAD_S = 30.0
"""From the first byte of a request, or from connecting, to the end of its headers."""
HEAD_BYTES = 65_536
IDLE_S = 75
"""Between two requests on one connection; longer than clients keep theirs, so that they close."""
WRITE_S = 60.0
"""A client that takes nothing of what it was sent for so long has stopped reading."""
MOST = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
"""Connections at the same time; files and other sockets need descriptors, too."""
ACCEPTED_AT_ONCE = max(1, min(32, MOST // 8))
"""In one round of the event loop: a flood leaves room for those who are there."""


class Connections(ServerState):
    """All of one server's."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: dict[Connection, None] = {}
        """Those without a request, in the order in which they fell silent."""

    def make_room(self) -> None:
        """Cut off the one that has been silent longest, if there are too many."""
        if len(self.connections) > MOST and self.silent:
            longest = next(iter(self.silent))
            del self.silent[longest]
            self.connections.discard(longest)
            longest.cut()


class Connection(HttpToolsProtocol):
    """uvicorn's, with bounds."""

    server_state: Connections
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _unsent = 0
    """Bytes, when it was last looked at."""

    @property
    def busy(self) -> bool:
        """A request is here and not yet answered."""
        return self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def cut(self) -> None:
        """End it now: to close it would be to wait until the client has taken what it was sent."""
        if self.transport.get_write_buffer_size():
            end: socket.socket = self.transport.get_extra_info("socket")
            # Or else the kernel would go on waiting.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # told of every byte that the kernel does not take
        self._expect_head()
        self.server_state.silent[self] = None
        self.server_state.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        self._stop_watching()
        self.server_state.silent.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.busy:
            self.server_state.silent.pop(self, None)
            self._head_came()
            return
        self._expect_head()
        if self.cycle is None or not self.cycle.more_body:  # pyright: ignore[reportUnnecessaryComparison]
            self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "The headers are too long.")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.busy and self in self.connections:
            self.server_state.silent[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _watch_writing(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(WRITE_S, self._look_at_writing)

    def _look_at_writing(self) -> None:
        """Nothing is written while something waits to be sent, so that it gets less or stands."""
        if self.transport.get_write_buffer_size() < self._unsent:
            self._watch_writing()
        else:
            self._write_timer = None
            log.warning("connection.stalled", unsent_bytes=self._unsent, seconds=WRITE_S)
            self.cut()

    def _stop_watching(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

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
