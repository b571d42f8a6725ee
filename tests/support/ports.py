"""Ports that stay free until somebody here takes them.

Rule: a port that the system chose, and that was given back, may be the next one that it chooses for
somebody else; so none of those is handed on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

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
