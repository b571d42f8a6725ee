"""The product as a real process with a temporary data directory.

Rule: it is forked from a process that has imported everything, because imports are most of what a
start costs; where a Python is named it is `run.py`, and has imported what it needs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import httpx

from tests.support.lives import Fate, events_in, fork

ROOT = Path(__file__).parents[2]
START_S = 240


@dataclass(frozen=True)
class Forked:
    """A forked process with the verbs of `subprocess.Popen`."""

    process: ForkServerProcess

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise TimeoutError(f"it still runs after {timeout} s")
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.process.exitcode is None:
            assert self.process.pid is not None
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()


@dataclass(frozen=True)
class Running:
    """A started product."""

    process: subprocess.Popen[bytes] | Forked
    url: str
    log: Path

    def events(self) -> list[dict[str, Any]]:
        return events_in(self.log.read_text(errors="replace"))

    def health(self) -> dict[str, Any]:
        return httpx.get(self.url.removesuffix("/v1") + "/healthz", timeout=240).json()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=240)


LOCAL = ("--backend", "local")


@contextmanager
def product(
    data_dir: Path,
    *flags: str,
    env: dict[str, str] | None = None,
    backend: Sequence[str] = LOCAL,
    python: str | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Iterator[Running]:
    """Start the product with the demo model, locally unless told otherwise; killed at the end.

    `constants`: by `module:name`, where it is forked.
    """
    log = data_dir.with_suffix(".log")
    arguments = ["--model-name", "demo", *backend, "--port", "0", "--data-dir", str(data_dir)]
    arguments += flags
    with log.open("ab") as stderr:
        start = stderr.tell()
        process = (
            Forked(fork(arguments, log, Fate(constants=constants or {}), env=env))
            if python is None
            else subprocess.Popen(
                [python, "run.py", *arguments],
                cwd=ROOT,
                stderr=stderr,
                stdout=stderr,
                env=os.environ | (env or {}),
            )
        )
    try:
        yield Running(process, _wait_for_url(process, log, start), log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _wait_for_url(process: subprocess.Popen[bytes] | Forked, log: Path, start: int) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        text = log.read_bytes()[start:].decode(errors="replace")
        for event in events_in(text):
            if event["event"] == "serving":
                return event["url"]
        if process.poll() is not None:
            raise AssertionError(f"it ended with {process.returncode}:\n{text[-3000:]}")
        time.sleep(0.1)
    raise AssertionError(f"it did not start:\n{log.read_text()[-3000:]}")
