"""The product as a real process: `run.py` with a temporary data directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.lives import events_in

ROOT = Path(__file__).parent.parent
START_S = 240


@dataclass(frozen=True)
class Running:
    """A started `run.py`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def events(self) -> list[dict[str, Any]]:
        return events_in(self.log.read_text(errors="replace"))

    def health(self) -> dict[str, Any]:
        return httpx.get(self.url.removesuffix("/v1") + "/healthz", timeout=240).json()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=240)


LOCAL = ("--backend", "local", "--threads", "1")


@contextmanager
def product(
    data_dir: Path,
    *flags: str,
    env: dict[str, str] | None = None,
    backend: Sequence[str] = LOCAL,
    python: str = sys.executable,
) -> Iterator[Running]:
    """Start the demo model, locally unless told otherwise; killed at the end if it still runs."""
    log = data_dir.with_suffix(".log")
    command = [python, "run.py", "--model-name", "demo", *backend]
    command += ["--port", "0", "--data-dir", str(data_dir), *flags]
    with log.open("ab") as stderr:
        start = stderr.tell()
        process = subprocess.Popen(
            command, cwd=ROOT, stderr=stderr, stdout=stderr, env=os.environ | (env or {})
        )
    try:
        yield Running(process, _wait_for_url(process, log, start), log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _wait_for_url(process: subprocess.Popen[bytes], log: Path, start: int) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        text = log.read_bytes()[start:].decode(errors="replace")
        for event in events_in(text):
            if event["event"] == "serving":
                return event["url"]
        if process.poll() is not None:
            raise AssertionError(f"run.py ended with {process.returncode}:\n{text[-3000:]}")
        time.sleep(0.1)
    raise AssertionError(f"run.py did not start:\n{log.read_text()[-3000:]}")
