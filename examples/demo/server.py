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
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from examples.demo import DemoError
from examples.demo.client import Client
from examples.demo.options import ROOT, Options

START_S = 180.0
"""Importing torch takes long on a busy machine, above all the first time."""
POLL_S = 0.2
STOP_S = 60.0
"""The child finishes replies in flight and a training step; then it is killed."""
BREAK_S = 1.0
"""Between a broken connection and the end of the child that caused it."""
ANSWER_S = 300.0
"""A reply that takes longer is no reply."""
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "OMP_NUM_THREADS", "XDG_CACHE_HOME")


@dataclass(frozen=True, slots=True)
class Server:
    """A child that answers."""

    client: Client
    process: Process

    async def watch(self) -> None:
        """Wait for the child's end, which nobody asked for.

        Raises:
            DemoError: always.
        """
        raise _ended(await self.process.wait())


def command(options: Options, port: int) -> list[str]:
    """The command line of the product, as a user would write it."""
    return [
        sys.executable,
        str(ROOT / "run.py"),
        *("--config", str(options.config)),
        *("--method", options.method),
        *("--seed", str(options.seed)),
        *("--port", str(port)),
        *("--data-dir", str(options.out / "run")),
    ]


def log_path(options: Options) -> Path:
    """What the child wrote."""
    return options.out / "server.log"


def last_lines(path: Path, lines: int = 15) -> str:
    """The end of a log, for a person who has to see why."""
    if not path.is_file():
        return ""
    with path.open(errors="replace") as file:
        return "".join(deque(file, maxlen=lines))


@asynccontextmanager
async def running(options: Options) -> AsyncGenerator[Server]:
    """The product, from the moment it answers until it has ended.

    Raises:
        DemoError: it ended or did not answer; also in place of another `DemoError` inside the
            block, where the child's end was the cause of that.
    """
    port = _free_port()
    with log_path(options).open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command(options, port),
            cwd=ROOT,
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            stdin=DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    http = httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=httpx.Timeout(ANSWER_S), trust_env=False
    )
    server = Server(Client(http), process)
    try:
        async with http:
            await _answers(server)
            yield server
    except DemoError as error:
        # a child's death shows first as a connection that breaks
        if await _waited(process, BREAK_S):
            raise _ended(await process.wait()) from error
        raise
    finally:
        await _stop(process)


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
    """Whether the child ended within that time."""
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        return False
    return True


def _ended(status: int) -> DemoError:
    return DemoError(f"the server ended by itself, with status {status}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
