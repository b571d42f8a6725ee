"""`python -m benchmarks.startup`: from the start of the process to the first answer.

The product is started as users start it, `run.py --backend tinker`, with its model on a server of
its own (local_gpu.tinker, on the other core): nothing is loaded in the process that is measured but
the tokenizer. Beside it a FastAPI route that does nothing and, with --litellm, LiteLLM's proxy.

Rule: every process starts on the same core, with its files read once before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import litellm_proxy
from benchmarks.agent_requests import MODEL
from benchmarks.gateway_client import Connection, Cores, Measured, pinned, server

GOAL_S = 3.0
_START_S = 240
_KEY = {"TINKER_API_KEY": "tml-benchmark", "TINKER_TELEMETRY": "0"}

Open = Callable[[], AbstractContextManager[Measured]]


@dataclass(frozen=True)
class Start:
    """Medians over all starts of one kind of server."""

    what: str
    listening_s: float
    """Seconds from the start of the process until it listens."""
    first_ms: float
    """Time of the first request in milliseconds, as the client sees it."""
    cpu_s: float
    """Processor time of the process in seconds, until its first answer."""
    rss_mb: float
    """Resident memory in MB after the first answer."""


async def measure(what: str, model: str, start: Open, times: int) -> Start:
    """Start the server `times` times after one warm-up start, and return the medians."""
    found: list[tuple[float, float, float, float]] = []
    for _ in range(times + 1):
        began = time.perf_counter()
        with start() as at:
            listening = time.perf_counter() - began
            connection = await Connection.open(at.url)
            answer = await connection.ask(_request(model))
            connection.close()
            if answer.status != 200 or b"[DONE]" not in answer.events:
                raise RuntimeError(f"{what}: HTTP {answer.status}: {answer.events[:300]!r}")
            found.append((listening, 1e3 * answer.seconds, at.cpu_s(), at.rss_mb()))
    return Start(what, *(median(column) for column in zip(*found[1:], strict=True)))


def _request(model: str) -> bytes:
    said = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": model, "messages": said, "max_tokens": 8, "stream": True}
    return json.dumps(body).encode()


@contextmanager
def gateway(folder: Path, core: int, box: str) -> Generator[Measured]:
    """Run the product over a server that has the model; it is killed at the end."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        log = Path(name) / "log"
        command = [sys.executable, "run.py", "--model-name", "demo", "--backend", "tinker"]
        command += ["--base-url", box, "--port", "0", "--data-dir", f"{name}/data"]
        command += ["--api-key", "none"]
        with (
            log.open("wb") as said,
            subprocess.Popen(
                pinned(core, command), stdout=said, stderr=said, env=os.environ | _KEY
            ) as process,
        ):
            try:
                yield Measured(process.pid, _url(process, log))
            finally:
                process.kill()
                process.wait()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("{") and line.endswith("}"):
                event: dict[str, Any] = json.loads(line)
                if event.get("event") == "serving":
                    return event["url"]
        time.sleep(0.01)
    raise RuntimeError(f"the gateway did not start:\n{log.read_text()[-2000:]}")


@contextmanager
def box(folder: Path, core: int) -> Generator[str]:
    """Serve the shipped model behind Tinker's API, on the other core."""
    command = [sys.executable, "-m", "local_gpu.tinker", "--port", "0", "--threads", "1"]
    command += ["--root", str(folder / "box")]
    log = folder / "box.log"
    with (
        log.open("wb") as said,
        subprocess.Popen(
            pinned(core, command), stdout=subprocess.PIPE, stderr=said, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("serving "):
                raise RuntimeError(f"the model's server did not start:\n{log.read_text()[-2000:]}")
            yield line.split(" at ")[1].split()[0]
        finally:
            process.kill()
            process.wait()


async def run(folder: Path, times: int, say: Callable[[str], None], litellm: bool) -> list[Start]:
    """Measure every server, ours last."""
    cores = Cores.take()
    say("a bare route")
    rows = [
        await measure(
            "a bare FastAPI route", MODEL, lambda: server("bare_server", cores.server), times
        )
    ]
    command = litellm_proxy.install(say) if litellm else None
    if command is not None:
        say("LiteLLM's proxy")
        with server("bare_server", cores.client) as behind:
            start: Open = lambda: litellm_proxy.proxy(command, behind.url, folder, cores.server)  # noqa: E731
            rows.append(await measure("LiteLLM's proxy", MODEL, start, times))
    say("the gateway")
    with box(folder, cores.client) as url:
        ours = await measure(
            "ours, over Tinker", "demo", lambda: gateway(folder, cores.server, url), times
        )
    return [*rows, ours]


def show(console: Console, rows: list[Start]) -> None:
    """Print the table, and the ratios of ours to the others."""
    table = Table("what", "listening", "first request", "CPU", "RSS", "goal")
    for row in rows:
        table.add_row(
            row.what,
            f"{row.listening_s:.2f} s",
            f"{row.first_ms:.0f} ms",
            f"{row.cpu_s:.2f} s",
            f"{row.rss_mb:.0f} MB",
            f"listening in {GOAL_S:.0f} s" if row is rows[-1] else "",
        )
    console.print(table)
    ours = rows[-1]
    for row in rows[:-1]:
        console.print(
            f"ours / {row.what}: listening {ours.listening_s / row.listening_s:.2f}, "
            f"CPU {ours.cpu_s / row.cpu_s:.2f}, RSS {ours.rss_mb / row.rss_mb:.2f}"
        )


def main() -> None:
    """Read flags, measure, print and, where asked, write a JSON file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="starts of each kind (5)")
    parser.add_argument("--litellm", action="store_true", help="LiteLLM's proxy, too")
    parser.add_argument("--json", type=Path, help="write everything here, too")
    arguments = parser.parse_args()
    console = Console(width=120)

    def say(line: str) -> None:
        console.print(line, style="dim")

    with tempfile.TemporaryDirectory() as name:
        rows = asyncio.run(run(Path(name), arguments.times, say, arguments.litellm))
    show(console, rows)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
