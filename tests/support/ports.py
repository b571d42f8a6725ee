"""Ports that stay free until somebody here takes them, and servers on them.

Rule: a port that the system chose, and that was given back, may be the next one that it chooses for
somebody else; so none of those is handed on.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Generic, TypeVar

from tinker_claw.connections import Server, listen

T = TypeVar("T")
PATIENCE_S = 240
_NEVER_CHOSEN = range(12_000, 32_000)
"""Upper bound of ports that Linux does not choose by itself."""
_next = cycle(_NEVER_CHOSEN)
for _ in range(os.getpid() * 97 % len(_NEVER_CHOSEN)):  # processes begin at different places
    next(_next)


def free_port() -> int:
    """Return a free port, for programs that cannot choose one themselves."""
    for port in _next:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError("a cycle has no end")


@dataclass(frozen=True)
class Serving(Generic[T]):
    """A server in a thread with a loop of its own."""

    url: str
    loop: asyncio.AbstractEventLoop
    server: Server
    opened: T


@contextmanager
def in_a_thread(
    opening: AbstractAsyncContextManager[T],
    app_of: Callable[[T], Any] = lambda app: app,
    *,
    port: int = 0,
) -> Generator[Serving[T]]:
    """Serve the app of what is opened, and closed, in that thread."""
    started: Future[Serving[T]] = Future()

    async def serve(listening: socket.socket) -> None:
        async with opening as opened:
            server = Server(app_of(opened), timeout_graceful_shutdown=2, lifespan="off")
            url = "http://127.0.0.1:{1}".format(*listening.getsockname())
            started.set_result(Serving(url, asyncio.get_running_loop(), server, opened))
            await server.serve(sockets=[listening])

    def live(listening: socket.socket) -> None:
        try:
            asyncio.run(serve(listening))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    with listen("127.0.0.1", port) as listening:
        thread = threading.Thread(target=live, args=(listening,))
        thread.start()
        try:
            running = started.result(PATIENCE_S)
            try:
                yield running
            finally:
                running.server.should_exit = True
        finally:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@contextmanager
def serving(app: Any) -> Generator[str]:
    """Serve an app in a thread, and yield its URL."""
    with in_a_thread(nullcontext(app)) as running:
        yield running.url
