"""Client side of the measurements: connections, server processes, and their use of resources.

Rule: the client does as little as it can between the first byte out and the last byte in; answers
are parsed afterwards.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.agent_requests import HEADERS

_START_S = 180
_PATIENCE_S = 120
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Answer:
    """Answer to one request."""

    status: int
    events: bytes
    """The stream, without HTTP's chunk headers."""
    seconds: float
    """Seconds from the first byte sent to the last one received."""


class Connection:
    """One kept-alive HTTP/1.1 connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, url: str, path: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        parts = urlsplit(url)
        self._head = (
            f"POST {parts.path}{path} HTTP/1.1\r\nhost: {parts.netloc}\r\n"
            f"connection: keep-alive\r\n{HEADERS}"
        )

    @classmethod
    async def open(cls, url: str, path: str = "/chat/completions") -> Connection:
        """Connect. `path`: of the route that `ask` asks, behind /v1."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**20)
        return cls(reader, writer, url, path)

    async def ask(self, body: bytes) -> Answer:
        """Send a request and wait for the whole answer."""
        trace = f"traceparent: 00-{next(_numbers):032x}-00000000000000ff-01\r\n"
        head = f"{self._head}{trace}content-length: {len(body)}\r\n\r\n".encode()
        async with asyncio.timeout(_PATIENCE_S):
            started = time.perf_counter()
            self._writer.write(head + body)
            status, headers = await self._status()
            length = headers.get("content-length")
            if length is not None:
                return Answer(
                    status,
                    await self._reader.readexactly(int(length)),
                    time.perf_counter() - started,
                )
            raw = bytearray()
            while not raw.endswith(b"\r\n0\r\n\r\n"):
                piece = await self._reader.read(2**16)
                if not piece:
                    raise ConnectionError("the answer broke off")
                raw += piece
            seconds = time.perf_counter() - started
        return Answer(status, _unchunked(bytes(raw)), seconds)

    async def _status(self) -> tuple[int, dict[str, str]]:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = (line.partition(":") for line in lines[1:] if line)
        return int(lines[0].split()[1]), {n.strip().lower(): v.strip() for n, _, v in headers}

    def close(self) -> None:
        self._writer.close()


def _unchunked(raw: bytes) -> bytes:
    pieces: list[bytes] = []
    at = 0
    while True:
        line = raw.index(b"\r\n", at)
        size = int(raw[at:line], 16)
        if not size:
            return b"".join(pieces)
        pieces.append(raw[line + 2 : line + 2 + size])
        at = line + 2 + size + 2


@dataclass(frozen=True)
class Measured:
    """A server process that is being measured."""

    pid: int
    url: str

    def cpu_s(self) -> float:
        """Seconds of processor time of its threads, including those that have ended."""
        # The id of another process's clock on Linux; the standard library has only our own.
        return time.clock_gettime(~self.pid << 3 | 2)

    def rss_mb(self) -> float:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise LookupError("the kernel does not tell VmRSS")


@dataclass(frozen=True)
class Cores:
    """Two cores of this machine: one for the server, one for the client."""

    server: int
    client: int

    @classmethod
    def take(cls) -> Cores:
        """Pick two cores. Raises SystemExit where there are fewer."""
        if not hasattr(os, "sched_getaffinity"):
            raise SystemExit("this benchmark reads /proc and pins processes: it needs Linux")
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise SystemExit("two cores are needed: one for the server, one for the client")
        return cls(server=cores[-1], client=cores[0])


def pinned(core: int, command: Sequence[str]) -> list[str]:
    """The command, pinned to one core from its start."""
    return ["taskset", "--cpu-list", str(core), *command]


@contextmanager
def server(module: str, core: int, *arguments: str) -> Generator[Measured]:
    """Run a server of this package on one core; it is killed at the end."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    with subprocess.Popen(pinned(core, command), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("serving "):
                raise RuntimeError(f"{module} did not start; it says why above")
            yield Measured(process.pid, line.split()[1])
        finally:
            process.kill()
            process.wait()


@contextmanager
def pulse(url: str, core: int) -> Generator[list[float]]:
    """Ask /healthz every 20 ms from another process; the list is filled at the end."""
    health = url.removesuffix("/v1") + "/healthz"
    command = pinned(core, [sys.executable, "-m", "benchmarks.gateway_pulse", health])
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        waits: list[float] = []
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            process.stdout.readline()  # it has begun
            yield waits
        finally:
            process.stdin.close()
            waits.extend(json.loads(process.stdout.read() or "[]"))
            process.wait(_START_S)


def share(values: Sequence[float], part: float) -> float:
    """Quantile: the value below which `part` of all values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
