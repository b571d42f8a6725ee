"""HTTP servers inside our own TaskGroup: their connections, and the signals that end them.

Rule: the limits are uvicorn's own. All else that a server on the open network needs is left to a
reverse proxy.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI

from tinker_claw.errors import ConfigError

HEAD_BYTES = 65_536
IDLE_S = 75
"""Keep-alive timeout; longer than that of clients, so that they close the connection first."""
MOST = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
"""Connections at the same time, beyond which a request gets a 503; files need descriptors, too."""
EXIT_INTERRUPTED = 130
DRAIN_S = 30
"""How long replies in flight may go on after the first signal."""
STEP_S = 10
"""How long a step in progress may go on after that."""
CLOSE_S = 15
"""How long saving and closing may take after that."""
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


def spare_collector() -> None:
    """Exempt all present objects from garbage collection, since they live as long as the process,
    and collect rarely: all objects of a running gateway would pause the event loop for 100 ms and
    more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 20, 100)


class Server(uvicorn.Server):
    """uvicorn without its own signal handling.

    uvicorn raises a signal again once it has drained, which would kill the process before the
    learner and the trainer are closed; `Stop` only asks it to end.
    """

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",  # httptools drops the body of a request that asks for an upgrade
                ws="none",
                h11_max_incomplete_event_size=HEAD_BYTES,
                limit_concurrency=MOST,
                log_config=None,
                log_level="error",  # each request for an upgrade would be two warnings
                access_log=False,
                proxy_headers=False,  # a client could forge its address
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=DRAIN_S,
            )
        )

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down without uvicorn's traceback for each reply cut at the end of the drain."""
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
        reason = (error.strerror or "").partition(" (while")[0]  # without what Python adds
        raise ConfigError(
            f"cannot listen on {host}:{port} ({reason}); "
            + _CURES.get(error.errno or 0, "give an address of this machine as --host")
        ) from error
    # Accepted connections inherit these. Without NODELAY a small answer waits 40 ms for an ACK.
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
        # No TaskGroup: it would wrap errors of the caller in a group that nobody catches.
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield url_of(listening)
        finally:
            server.should_exit = True
            await serving


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
        """Call `end` at the first signal inside the block; the process exits within that time.

        A step in a foreign library cannot be interrupted; what is worth saving is saved by then.
        """
        self._end, self._within_s = end, within_s
        if self.asked:
            self._tell()
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
        end, self._end = self._end, None  # once: a second call would break off the closing
        if end is not None:
            end()
