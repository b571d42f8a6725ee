"""uvicorn around the application, and the signals that end it.

Rule: the first signal shuts down in order, the second at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable

from fastapi import FastAPI
from starlette.types import ASGIApp

from tinker_claw.connections import Server

EXIT_INTERRUPTED = 130
_DRAIN_S = 2
"""Seconds that answers in flight may take when the server ends."""


class WireServer(Server):
    """Server that tells when it answers, and when it stops."""

    def __init__(
        self, app: ASGIApp, started: Callable[[], None], stopping: Callable[[], None]
    ) -> None:
        """`started` is called when requests are answered, `stopping` before connections close."""
        self._tell_started = started
        self._tell_stopping = stopping
        super().__init__(app, timeout_graceful_shutdown=_DRAIN_S, lifespan="on")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._tell_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._tell_stopping()
        await super().shutdown(sockets)


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
