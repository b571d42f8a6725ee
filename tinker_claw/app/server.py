"""HTTP servers inside our own TaskGroup: their connections, and the signals that end them.

Rule: a connection is kept for a request in flight, and otherwise not for long. Where there are too
many, the one idle longest is closed, so that new requests get in. A reply that its client does not
read is dropped after a timeout. All else that a server on the open network needs is left to a
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
import struct
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from tinker_claw.errors import ConfigError
from tinker_claw.telemetry import log

HEAD_S = 30.0
"""Time for a request's headers to arrive, counted from connecting or from its first byte."""
HEAD_BYTES = 65_536
IDLE_S = 75
"""Keep-alive timeout; longer than that of clients, so that they close the connection first."""
WRITE_S = 60.0
"""How long a client may take to read a reply that no longer fits the send buffer."""
MOST = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
"""Connections at the same time; files and other sockets need descriptors, too."""
ACCEPTED_AT_ONCE = max(1, min(32, MOST // 8))
"""Connections accepted per round of the event loop: a flood does not starve open ones."""
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
"""Size of the socket's send buffer. By default the kernel would buffer megabytes, and a reply that
nobody reads would be sampled to its end."""

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


class Connections(ServerState):
    """Open connections of one server."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: dict[Connection, None] = {}
        """Idle connections, the longest idle first."""

    def make_room(self) -> None:
        """Close the connection that has been idle longest, if there are too many."""
        if len(self.connections) > MOST and self.silent:
            longest = next(iter(self.silent))
            del self.silent[longest]
            self.connections.discard(longest)
            longest.transport.abort()


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with a deadline and a size limit for heads, and a deadline for writing."""

    server_state: Connections
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether a request is in flight."""
        return self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # pause_writing comes for every byte not taken
        self._expect_head()
        self.server_state.silent[self] = None
        self.server_state.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        self._written()
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
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.busy and self in self.connections:
            self.server_state.silent[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_S, self._stalled)

    def resume_writing(self) -> None:
        self._written()
        super().resume_writing()

    def _stalled(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        log.warning("connection.stalled", unsent_bytes=unsent, seconds=WRITE_S)
        # Without SO_LINGER the kernel would keep the unsent bytes, and go on waiting.
        end: socket.socket = self.transport.get_extra_info("socket")
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _written(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _head_came(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


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
                proxy_headers=False,  # a client could forge its address
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=DRAIN_S,
                backlog=ACCEPTED_AT_ONCE,
            )
        )
        self.server_state = Connections()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then lengthen the kernel's queue: asyncio ties it to connections per round."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(QUEUED)

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
    # Accepted connections inherit both. Without NODELAY a small answer waits 40 ms for an ACK.
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
