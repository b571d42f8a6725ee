"""Run the programs that report steps to sinks (`tinker_claw.sinks.follow`), one per sink.

Rule: nothing waits for them except the shutdown, and that briefly. A sink that fails is logged and
restarted with growing delays; it continues after the last step that it has.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path

from tinker_claw.retry import Backoff
from tinker_claw.sinks.base import FOLDER
from tinker_claw.telemetry import log

RESTARTS = Backoff(first_s=5.0, longest_s=300.0)
END_S = 5.0
"""How long a sink may take to exit when the gateway stops, before it is killed."""


async def report(name: str, directory: Path) -> None:
    """Keep the program of one sink running until cancelled."""
    output, failures = directory / FOLDER / f"{name}.log", 0
    while True:
        try:
            output.parent.mkdir(exist_ok=True)
            status = await _follow(name, directory, output)
            error = f"it ended with status {status}, and the log beside this says why"
        except OSError as failure:
            error = str(failure)
        failures += 1
        wait_s = RESTARTS.after(failures)
        log.warning("sink.failed", sink=name, error=error, again_in_s=wait_s, log=str(output))
        await asyncio.sleep(wait_s)


async def _follow(name: str, directory: Path, output: Path) -> int:
    """Run it and return its exit status; if cancelled, tell it to end."""
    with output.open("wb") as printed:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tinker_claw.sinks.follow",
            name,
            str(directory),
            stdin=PIPE,
            stdout=printed,
            stderr=printed,
            # It gets neither our keys nor Ctrl-C.
            env={key: value for key, value in os.environ.items() if not key.startswith("TINKER")},
            start_new_session=True,
        )
    try:
        return await process.wait()
    except asyncio.CancelledError:
        await _end(name, process)
        raise


async def _end(name: str, process: Process) -> None:
    """Let it report what is left, within a time limit."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        log.warning("sink.killed", sink=name, because=f"it did not end within {END_S:g} s")
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
