"""HTTP servers inside our own TaskGroup, and the signals that end them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI

from tinker_claw.errors import ConfigError
from tinker_claw.serve.connections import ACCEPTED_AT_ONCE, IDLE_S, Connection, Connections

EXIT_INTERRUPTED = 130
DRAIN_S = 30
"""How long replies in flight may go on after the first signal."""
STEP_S = 10
"""How long a step in hand may go on after that."""
CLOSE_S = 15
"""How long saving and closing may take after that."""
QUEUED = 2048
"""Connections that the kernel holds until they are accepted."""
SEND_BYTES = 131_072
"""What the kernel holds of an answer that is not read. Left to itself it would hold megabytes, and
a reply to nobody would be sampled to its end."""


class Server(uvicorn.Server):
    """uvicorn without its own signal handling.

    uvicorn raises a signal again once it has drained, which would kill the process before the
    learner and the trainer are closed; `Stop` only asks it to end.
    """

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_config=None,
                access_log=False,
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=DRAIN_S,
                backlog=ACCEPTED_AT_ONCE,
            )
        )
        self.server_state = Connections()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """asyncio takes as many connections in one round as it lets the kernel queue."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(QUEUED)

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
        listening = socket.create_server((host, port), family=family, backlog=QUEUED)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}); stop what uses "
            "it, or choose another --port (0 takes a free one)"
        ) from error
    # Accepted connections inherit both. Without it a small answer waits 40 ms to be acknowledged.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
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


class Stop:
    """The first SIGTERM or Ctrl-C ends everything in order, within bounds; the second at once.

    Ending at once loses nothing that was committed: the ledger is transactional.
    """

    def __init__(self) -> None:
        self.asked = False
        self._loop = asyncio.get_running_loop()
        self._end: Callable[[], object] | None = None
        self._within_s = CLOSE_S
        for number in (signal.SIGTERM, signal.SIGINT):
            # Not through the loop: a process whose loop is busy ends at the second signal, too.
            signal.signal(number, self._signalled)

    @contextmanager
    def calls(self, end: Callable[[], object], *, within_s: int) -> Generator[None]:
        """While this lasts, the first signal calls `end`, and the process has ended in that time.

        A step in a foreign library cannot be interrupted; what is worth saving is saved by then.
        """
        self._end, self._within_s = end, within_s
        if self.asked:
            end()
        try:
            yield
        finally:
            self._end = None

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(EXIT_INTERRUPTED)
        self.asked = True
        signal.signal(signal.SIGALRM, lambda number, frame: os._exit(0))
        signal.alarm(self._within_s)
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if self._end is not None:
            self._end()
