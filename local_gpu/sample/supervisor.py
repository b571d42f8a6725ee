"""Inference servers started by us, each in a process group and an environment of its own.

Rule: a server that was ready once is started again on its port whenever it ends; one that ends
before is an error with the last lines of its log. None outlives this process, whatever kills it
(see `child`). Whether one hangs is seen by whoever samples from it, who asks for `restart`.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, Final

import httpx

from local_gpu.config import Say
from local_gpu.sample import child
from tinker_claw.errors import ConfigError
from tinker_claw.files import private

HOST: Final = "127.0.0.1"
KEY: Final = secrets.token_urlsafe(32)
"""Key that the servers ask for: other accounts of this machine reach loopback, too."""
_ANSWER_S: Final = 5.0
"""Seconds for a server to answer a health check."""


def _status(launch: Launch, path: str, within_s: float, body: Any = None) -> int:
    """Return the HTTP status of GET, or of POST if there is a body. Raises httpx.HTTPError."""
    method = "GET" if body is None else "POST"
    # Without certificates, which take 30 ms to load, and without proxies.
    return httpx.request(
        method,
        launch.url + path,
        json=body,
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=within_s,
        trust_env=False,
        verify=False,
    ).status_code


def _first_token(launch: Launch) -> int:
    """Ask for one token, which also compiles kernels; return the HTTP status."""
    body = {"model": launch.model, "prompt": [0], "max_tokens": 1, "logprobs": 1}
    return _status(launch, "/v1/completions", _FIRST_TOKEN_S, body)


GRACE_S: Final = 5.0
"""Seconds that a server may take to end on SIGTERM."""
_STOP_S: Final = GRACE_S + 5.0
_START_S: Final = 1800.0
_POLL_S: Final = 0.2
_REPORT_S: Final = 10.0
_FIRST_DELAY_S: Final = 1.0
_LONGEST_DELAY_S: Final = 60.0
_HEALTHY_S: Final = 300.0
"""Seconds of a run after which the next failure counts as the first one."""
_LAST_LINES: Final = 15
_FIRST_TOKEN_S: Final = 300.0
"""Seconds to wait for the first token of a server that starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Command of a server, and its surroundings."""

    name: str
    """Name of the server in messages."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """The whole environment: nothing is inherited."""
    port: int
    log: Path
    model: str
    """Model that is asked for one token before the server is ready: the first request compiles
    kernels."""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def free_ports(count: int) -> list[int]:
    """Ports of loopback that are free at this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind((HOST, 0))
        return [int(bound.getsockname()[1]) for bound in sockets]


class Servers:
    """Servers that run until `stop`."""

    def __init__(
        self, launches: Sequence[Launch], tell: Say, *, first_delay_s: float = _FIRST_DELAY_S
    ) -> None:
        """Start all servers and return at once; `ready` waits.

        `tell` receives progress and restarts, also from other threads.
        """
        self._tell = tell
        self._servers = [_Supervised(launch, tell, first_delay_s) for launch in launches]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(server.launch.url for server in self._servers)

    async def ready(self, *, within_s: float = _START_S) -> None:
        """Wait until every one answers.

        Raises:
            ConfigError: one has ended, or takes too long; its last lines are quoted.
        """
        began = last_report = time.monotonic()
        while waiting := [server for server in self._servers if not server.ready]:
            await asyncio.to_thread(_mark_ready, waiting)
            now = time.monotonic()
            slow = [server for server in waiting if not server.ready]
            if slow and now - began > within_s:
                launch = slow[0].launch
                raise ConfigError(
                    f"{launch.name} is not ready after {within_s:.0f} s.{_quote_log(launch.log)}"
                )
            if slow and now - last_report >= _REPORT_S:
                last_report = now
                ready = len(self._servers) - len(slow)
                last_line = "".join(_last_lines(slow[0].launch.log, 1))
                self._tell(
                    f"{ready} of {len(self._servers)} servers are ready after {now - began:.0f} s; "
                    f"{slow[0].launch.name}: {last_line or 'no word yet'}"
                )
            await asyncio.sleep(_POLL_S)

    def restart(self, url: str) -> None:
        """End the server of this address, and start it again; returns at once."""
        for server in self._servers:
            if server.launch.url == url and server.ready:
                self._tell(f"{server.launch.name} hangs, and is ended")
                server.end()

    def stop(self) -> None:
        """End all of them; returns when they are gone, after some seconds at the latest."""
        for server in self._servers:
            server.release()
        until = time.monotonic() + _STOP_S
        for server in self._servers:
            server.join(until - time.monotonic())


class _Supervised:
    """One server, and the thread that restarts it."""

    def __init__(self, launch: Launch, tell: Say, delay_s: float) -> None:
        self.launch = launch
        self.ready = False
        self.exit_status: int | None = None
        """Exit status of a server that was never ready."""
        self._tell = tell
        self._first_delay_s = delay_s
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(
            target=self._keep, name=f"tinker-claw-{launch.name}", daemon=True
        )
        self._thread.start()

    def release(self) -> None:
        """Close the pipe that keeps the server alive."""
        self._stopping.set()
        self.end()

    def join(self, patience_s: float) -> None:
        self._thread.join(max(0.0, patience_s))
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()  # the server's own process dies with it
            self._thread.join()

    def _keep(self) -> None:
        delay_s, mode = self._first_delay_s, "wb"
        while (process := self._start(mode)) is not None:
            began = time.monotonic()
            status = process.wait()
            self.end()
            if self._stopping.is_set():
                return
            if not self.ready:
                self.exit_status = status
                return
            if time.monotonic() - began > _HEALTHY_S:
                delay_s = self._first_delay_s
            self._tell(
                f"{self.launch.name} ended with status {status}, and is started again in "
                f"{delay_s:.0f} s; {self.launch.log} says more"
            )
            if self._stopping.wait(delay_s):
                return
            delay_s, mode = min(2 * delay_s, _LONGEST_DELAY_S), "ab"

    def end(self) -> None:
        """End the server, as `child` does where its pipe closes."""
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()

    def _start(self, mode: str) -> subprocess.Popen[bytes] | None:
        launch = self.launch
        with self._lock, _private(launch.log, mode) as log:
            if self._stopping.is_set():
                return None
            self._process = subprocess.Popen(
                # By its path and with -P: none of our packages need be importable there.
                [sys.executable, "-P", child.__file__, str(GRACE_S), *launch.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(launch.environment),
                start_new_session=True,  # Ctrl-C reaches us, and we stop the servers last
            )
            return self._process


def _private(path: Path, mode: str) -> IO[bytes]:
    """Open a file that only its owner may read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, mode, opener=private)


def _mark_ready(waiting: Sequence[_Supervised]) -> None:
    """Mark the servers that answer as ready.

    Raises:
        ConfigError: one has ended, or refuses its first request.
    """
    for server in waiting:
        launch = server.launch
        if server.exit_status is not None:
            raise ConfigError(
                f"{launch.name} ended with status {server.exit_status} before it was ready."
                f"{_quote_log(launch.log)}"
            )
        with suppress(httpx.HTTPError):  # it is starting, has ended, or is slow
            if _status(launch, "/health", _ANSWER_S) == HTTPStatus.OK:
                if (status := _first_token(launch)) != HTTPStatus.OK:
                    raise ConfigError(
                        f"{launch.name} is up, but answers its first request with HTTP {status}."
                        f"{_quote_log(launch.log)}"
                    )
                server.ready = True


def _quote_log(log: Path) -> str:
    lines = "\n".join(f"  {line}" for line in _last_lines(log, _LAST_LINES))
    return f" Its last words ({log} has all of them):\n{lines or '  (none)'}"


def _last_lines(log: Path, count: int) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16_384))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()][-count:]
