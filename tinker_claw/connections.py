"""Listening sockets, and HTTP/1.1 connections that cannot be held open without a request.

Both servers here use them: the gateway's, and that of Tinker's API.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import h11
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tinker_claw.errors import ConfigError

REQUEST_S = 60
"""Seconds within which a new connection must send the head of its first request."""
IDLE_S = 75
"""Keep-alive timeout; longer than that of clients, so that they close the connection first."""
QUEUED = 2048
"""Connections that the kernel holds until they are accepted."""
SEND_BYTES = 131_072
"""Size of the socket's send buffer. By default the kernel would buffer megabytes of a reply that
nobody reads."""

_CURES: dict[int, str] = {
    errno.EADDRINUSE: "stop what uses it, or choose another --port (0 takes a free one)",
    errno.EACCES: "ports below 1024 are the system's: choose another --port",
}
"""Remedy by errno; any other error means that the address itself is wrong."""
_LENGTHS = {b"content-length", b"transfer-encoding"}


def allow_open_files() -> None:
    """Raise the process's soft limit of open files to its hard one, for its children, too."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS allows less than the limit that it names
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def listen(host: str, port: int) -> Generator[socket.socket]:
    """A listening socket, bound before anything slow is loaded.

    Raises:
        ConfigError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=QUEUED)
    except (OSError, OverflowError) as error:
        reason, cure = str(error), "choose another --port"
        if isinstance(error, OSError):
            reason = (error.strerror or "").partition(" (while")[0]  # without what Python adds
            cure = _CURES.get(error.errno or 0, "give an address of this machine as --host")
        raise ConfigError(f"cannot listen on {host}:{port} ({reason}); {cure}") from error
    # Accepted connections inherit these. Without NODELAY a small answer waits 40 ms for an ACK.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    with listening:
        yield listening


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1, which ends a connection whose next request does not arrive.

    uvicorn does so only after a response, and until the next byte arrives. It is h11, because
    httptools drops the body of a request that asks for an upgrade.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # pyright: ignore[reportArgumentType]
        self.timeout_keep_alive_task = self.loop.call_later(
            REQUEST_S, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        # uvicorn cancels its timer at the first byte of a head; this one goes on until the last.
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if timer is None:
            return
        if self.conn.their_state is h11.IDLE:
            self.timeout_keep_alive_task = timer
        else:
            timer.cancel()


class OneLength:
    """Middleware that refuses a body with two lengths.

    A proxy that goes by the other one would take the rest of the body for a second request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and dict(scope["headers"]).keys() >= _LENGTHS:
            app = PlainTextResponse(
                "Send Content-Length or Transfer-Encoding, not both.\n",
                status_code=400,
                headers={"connection": "close"},
            )
        await app(scope, receive, send)


class Server(uvicorn.Server):
    """uvicorn with the connections of this module, and without its own signal handling.

    uvicorn raises a signal again once it has drained, which would end the process before the rest
    is closed.
    """

    def __init__(self, app: ASGIApp, **options: Any) -> None:
        """`options`: further ones of `uvicorn.Config`."""
        super().__init__(
            uvicorn.Config(
                OneLength(app),
                http=Connection,
                log_config=None,
                access_log=False,
                timeout_keep_alive=IDLE_S,
                **options,
            )
        )

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
