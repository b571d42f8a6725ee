"""Ports that stay free until somebody here takes them.

Rule: a port that the system chose, and that was given back, may be the next one that it chooses for
somebody else; so none of those is handed on.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import uvicorn

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


@contextmanager
def deaf_port() -> Iterator[int]:
    """A port that is taken, but not listened to."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an app in a thread, and yield its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, ws="none"))
    began, start = threading.Event(), server.startup

    async def startup(sockets: Any = None) -> None:
        await start(sockets)
        began.set()

    server.startup = startup
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert began.wait(60)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
