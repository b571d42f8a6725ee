"""HTTP servers inside our own TaskGroup, and the signals that end them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI

from tinker_claw.errors import ConfigError

EXIT_INTERRUPTED = 130
DRAIN_S = 30
"""How long replies in flight may go on after the first signal."""


class Server(uvicorn.Server):
    """uvicorn without its own signal handling.

    uvicorn raises a signal again once it has drained, which would kill the process before the
    learner and the trainer are closed; `stop_on_signals` only asks it to stop.
    """

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_config=None, access_log=False, timeout_graceful_shutdown=DRAIN_S
            )
        )

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Replies that outlast the drain are cut, which uvicorn logs with a traceback each."""
        logger = logging.getLogger("uvicorn.error")
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            await super().shutdown(sockets)
        finally:
            logger.setLevel(level)


@contextmanager
def listen(host: str, port: int) -> Generator[socket.socket]:
    """A listening socket, bound before anything slow is loaded.

    Raises:
        ConfigError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}); stop what uses "
            "it, or choose another --port (0 takes a free one)"
        ) from error
    # Accepted connections inherit it; without it a small answer waits 40 ms for an acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    with listening:
        yield listening


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


@asynccontextmanager
async def in_background(app: FastAPI) -> AsyncGenerator[str]:
    """Serve `app` on a free loopback port while the context lasts; yields its /v1 address."""
    with listen("127.0.0.1", 0) as listening:
        server = Server(app)
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listening]))
            try:
                yield url_of(listening)
            finally:
                server.should_exit = True


def stop_on_signals(server: Server, on_stop: Callable[[], None]) -> None:
    """The first SIGTERM or Ctrl-C lets replies in flight end; the second ends at once.

    `on_stop` is called at the first. Ending at once loses nothing that was committed: the ledger
    is transactional.
    """

    def stop() -> None:
        if server.should_exit:
            os._exit(EXIT_INTERRUPTED)
        server.should_exit = True
        on_stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
