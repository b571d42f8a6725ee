"""`python -m benchmarks.gateway_pulse URL`: how long a small request has to wait.

Asks every 20 ms on one connection until standard input is closed, then prints all waits in seconds.
Where its connection is closed it opens another, as clients do, and the wait goes on.

Rule: the standard library only, so that it starts at once and takes next to nothing.
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time
from urllib.parse import urlsplit

EVERY_S = 0.02
PATIENCE_S = 120


def ask(connection: http.client.HTTPConnection, path: str) -> http.client.HTTPResponse:
    """Send a request until it is answered, however often that takes."""
    until = time.perf_counter() + PATIENCE_S
    while True:
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            if time.perf_counter() > until:
                raise
        else:
            return answer


def main() -> None:
    at = urlsplit(sys.argv[1])
    connection = http.client.HTTPConnection(at.netloc, timeout=PATIENCE_S)
    waits: list[float] = []
    stopped = False
    while not stopped:
        started = time.perf_counter()
        answer = ask(connection, at.path)
        if answer.status != 200:
            raise SystemExit(f"{at.path} answered {answer.status}")
        waits.append(time.perf_counter() - started)
        if len(waits) == 1:
            print("begun", flush=True)
        left = started + EVERY_S - time.perf_counter()
        stopped = bool(select.select([sys.stdin], [], [], max(0.0, left))[0])
    print(json.dumps(waits))


if __name__ == "__main__":
    main()
