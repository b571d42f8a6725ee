"""HTTP servers inside our own TaskGroup: their connections, and the signals that end them.

Rule: the limits are uvicorn's own. All else that a server on the open network needs is left to a
reverse proxy.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from types import FrameType

from fastapi import FastAPI

from tinker_claw import connections
from tinker_claw.app.orders import url
from tinker_claw.connections import listen
from tinker_claw.errors import EXIT_INTERRUPTED

HEAD_BYTES = 65_536
DRAIN_S = 30
"""How long replies in flight may go on after the first signal."""
LAST_WORDS_S = 1
"""How long a reply that is then cut may take to say so."""
STEP_S = 10
"""How long a step in progress may go on after that."""
CLOSE_S = 15
"""How long saving and closing may take after that."""


def spare_collector() -> None:
    """Exempt all present objects from garbage collection, since they live as long as the process,
    and collect rarely: all objects of a running gateway would pause the event loop for 100 ms and
    more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 20, 100)


class GatewayServer(connections.Server):
    """The gateway's server.

    With more connections than half of the open files allowed, a request gets a 503.
    """

    def __init__(self, app: FastAPI) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        super().__init__(
            app,
            ws="none",
            h11_max_incomplete_event_size=HEAD_BYTES,
            limit_concurrency=files // 2,
            log_level="error",  # each request for an upgrade would be two warnings
            proxy_headers=False,  # a client could forge its address
            timeout_graceful_shutdown=DRAIN_S,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down; what the end of the drain cancels may still say so to its client. uvicorn
        would log a traceback for each."""
        logger = logging.getLogger("uvicorn.error")
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            await super().shutdown(sockets)
            if waiting := {*self.server_state.tasks}:
                _, waiting = await asyncio.wait(waiting, timeout=LAST_WORDS_S)
            for task in waiting:  # its client does not read
                task.cancel()
            if waiting:
                await asyncio.wait(waiting, timeout=LAST_WORDS_S)
        finally:
            logger.setLevel(level)


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"{url(host, port)}/v1"


@asynccontextmanager
async def in_background(app: FastAPI) -> AsyncGenerator[str]:
    """Serve `app` on a free loopback port while the context lasts; yields its /v1 address."""
    with listen("127.0.0.1", 0) as listening:
        server = GatewayServer(app)
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
        self.requested = False
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
        if self.requested:
            self._tell()
        try:
            yield
        finally:
            self._end = None

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(EXIT_INTERRUPTED)
        self.requested = True
        signal.signal(signal.SIGALRM, lambda number, frame: os._exit(0))
        signal.alarm(self._within_s)
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        end, self._end = self._end, None  # once: a second call would break off the closing
        if end is not None:
            end()
