"""The product as a child process: started, awaited, watched, and ended with SIGTERM.

Rule: however the demo ends, the child has ended before it. The child gets a process group of its
own, so that Ctrl-C reaches the demo alone and the child is asked to finish its reply; and it gets
only the few environment variables that a program needs, so that no setting or key leaks in.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from examples import ROOT
from examples.demo import DemoError
from examples.demo.client import Client, connected

START_S = 180.0
"""Seconds to start: importing torch takes long on a busy machine, above all the first time."""
POLL_S = 0.2
STOP_S = 60.0
"""Seconds to stop: the child finishes replies in flight and a training step; then it is killed."""
BREAK_S = 1.0
"""Seconds between a broken connection and the end of the child that caused it."""
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "OMP_NUM_THREADS", "XDG_CACHE_HOME")


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings with which the child process starts."""

    out: Path
    """Folder of the child's log and data."""
    flags: tuple[str, ...]
    """Flags of `run.py`, without the port and the data directory."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables, besides those that every program needs."""
    key: str | None = None
    """Key for /healthz; None: none is needed."""
    port: int | None = None
    """Port; None: a free one."""

    @property
    def data(self) -> Path:
        """Data directory of the child."""
        return self.out / "run"

    @property
    def log(self) -> Path:
        """Log file of the child."""
        return self.out / "server.log"


@dataclass(frozen=True, slots=True)
class Server:
    """A child process that answers."""

    url: str
    client: Client
    process: Process

    async def watch(self) -> None:
        """Wait until the child ends by itself.

        Raises:
            DemoError: always.
        """
        raise _ended(await self.process.wait())


def _last_lines(log: Path) -> str:
    """Return the end of a log, for a person who has to see why."""
    with log.open(errors="replace") as file:
        return "".join(deque(file, maxlen=15))


@asynccontextmanager
async def running(launch: Launch) -> AsyncGenerator[Server]:
    """Run the product, from the moment it answers until it has ended.

    Raises:
        DemoError: it ended or did not answer; also in place of another `DemoError` inside the
            block. It has the end of the log.
    """
    await _end_orphan(launch)
    port = launch.port or free_port()
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    keyless = ("--api-key=none",) if launch.key is None else ()
    with launch.log.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(ROOT / "run.py"),
            *launch.flags,
            f"--port={port}",
            f"--data-dir={launch.data}",
            *keyless,
            cwd=ROOT,
            env={**kept, **launch.environment},
            stdin=DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _pid_file(launch).write_text(str(process.pid))
    url = f"http://127.0.0.1:{port}"
    try:
        async with connected(url, launch.key) as client:
            server = Server(url, client, process)
            await _answers(server)
            yield server
    except DemoError as error:
        # a child's death shows first as a connection that breaks
        cause = _ended(await process.wait()) if await _waited(process, BREAK_S) else error
        lines = _last_lines(launch.log)
        raise DemoError(f"{cause}\nLast lines of {launch.log}:\n{lines}") from error
    finally:
        await _stop(process)
        _pid_file(launch).unlink(missing_ok=True)


def _pid_file(launch: Launch) -> Path:
    return launch.out / "server.pid"


async def _end_orphan(launch: Launch) -> None:
    """End a child that was left by a killed run in this folder."""
    try:
        pid = int(_pid_file(launch).read_text())
    except (OSError, ValueError):
        return
    if f"--data-dir={launch.data}" not in _command_line(pid):
        return  # the number is another process's by now
    for number, seconds in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, BREAK_S)):
        os.kill(pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while _command_line(pid):  # noqa: ASYNC110 - no child of ours
                    await asyncio.sleep(POLL_S)
                return


def _command_line(pid: int) -> list[str]:
    """Command line of a process; empty where there is none, or where it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in words.split(b"\0") if word]


async def _answers(server: Server) -> None:
    """Wait until /healthz answers."""
    try:
        async with asyncio.timeout(START_S):
            while True:
                if server.process.returncode is not None:
                    await server.watch()
                try:
                    await server.client.health()
                except DemoError:
                    await asyncio.sleep(POLL_S)
                else:
                    return
    except TimeoutError as error:
        raise DemoError(f"the server did not answer within {START_S:g} s") from error


async def _stop(process: Process) -> None:
    """Ask the child to end, and wait; what does not end is killed."""
    try:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await _waited(process, STOP_S)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _waited(process: Process, seconds: float) -> bool:
    """Return whether the child ended within that time."""
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        return False
    return True


def _ended(status: int) -> DemoError:
    return DemoError(f"the server ended by itself, with status {status}")


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
