"""uvicorn around the application, and the signals that end it.

Rule: the first signal shuts down in order, the second at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from tinker_claw.errors import ConfigError

EXIT_INTERRUPTED = 130
_DRAIN_S = 2
"""Seconds that answers in flight may take when the server ends."""


class WireServer(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process before we closed."""

    def __init__(
        self, app: ASGIApp, started: Callable[[], None], stopping: Callable[[], None]
    ) -> None:
        """`started` is called when requests are answered, `stopping` before connections close."""
        self._tell_started = started
        self._tell_stopping = stopping
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_DRAIN_S,
                timeout_keep_alive=75,
                lifespan="on",
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._tell_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._tell_stopping()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@contextmanager
def listen(host: str, port: int) -> Generator[socket.socket]:
    """A listening socket, bound before anything slow is loaded.

    Raises:
        ConfigError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error}); stop what uses it, or choose another "
            "--port (0 takes a free one)"
        ) from error
    # asyncio sets it only on sockets that name their protocol, which this one does not: without it
    # each answer waits 40 ms for the client's delayed acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    with listening:
        yield listening


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()  # what other machines may call this one
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(app: FastAPI, listening: socket.socket, started: Callable[[], None]) -> None:
    """Serve until a signal comes; `started` is called when requests are answered."""
    # Clients that poll for a result get an error.
    server = WireServer(app, started, lambda: app.state.service.promises.cancel_all())
    _stop_on_signals(server)
    await server.serve(sockets=[listening])


def _stop_on_signals(server: WireServer) -> None:
    def stop() -> None:
        if server.should_exit:
            os._exit(EXIT_INTERRUPTED)
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
