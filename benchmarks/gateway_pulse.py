"""`python -m benchmarks.gateway_pulse URL...`: how long a small request has to wait.

Asks every 20 ms on one connection, for one address after the other, until standard input is closed,
then prints all waits in seconds.
Where its connection is closed it opens another, as clients do, and the wait goes on.

Rule: the standard library only, so that it starts at once and takes next to nothing.
"""

from __future__ import annotations

import http.client
import itertools
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
    parts = [urlsplit(url) for url in sys.argv[1:]]
    asked = itertools.cycle(f"{part.path}?{part.query}" for part in parts)
    connection = http.client.HTTPConnection(parts[0].netloc, timeout=PATIENCE_S)
    waits: list[float] = []
    stopped = False
    while not stopped:
        started = time.perf_counter()
        path = next(asked)
        answer = ask(connection, path)
        if answer.status != 200:
            raise SystemExit(f"{path} answered {answer.status}")
        waits.append(time.perf_counter() - started)
        if len(waits) == 1:
            print("begun", flush=True)
        left = started + EVERY_S - time.perf_counter()
        stopped = bool(select.select([sys.stdin], [], [], max(0.0, left))[0])
    print(json.dumps(waits))


if __name__ == "__main__":
    main()
