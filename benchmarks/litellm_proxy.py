"""Run LiteLLM's proxy in an environment of its own, in front of a canned OpenAI-compatible server.

It reads a request, looks up a model, sends it on and re-reads the stream. It tokenises nothing and
stores nothing: beside ours it shows what a popular proxy costs.

Rule: it never touches this project's environment, has a set time to be installed in, and is
exactly the files that `litellm.txt` names by hash: releases of it have carried malware.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from socket import create_server

from benchmarks.agent_requests import KEY, MODEL
from benchmarks.gateway_client import Measured, pinned
from benchmarks.vocabulary import cache

_PINS = Path(__file__).with_name("litellm.txt")
_ONLY_PINNED = ("--require-hashes", "--no-deps", "--only-binary", ":all:", "--requirement")
_INSTALL_S = 400
_START_S = 120


def install(say: Callable[[str], None]) -> Path | None:
    """Return the proxy's command, installed if it is missing; None: the installation failed."""
    # Named by what is pinned: an environment of other pins is never used.
    folder = cache() / f"litellm-{hashlib.sha256(_PINS.read_bytes()).hexdigest()[:12]}"
    command, complete = folder / "bin" / "litellm", folder / "complete"
    if complete.exists():
        return command
    say(f"installing litellm[proxy] into {folder}")
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=60)
        subprocess.run(
            [str(folder / "bin" / "pip"), "install", "--quiet", *_ONLY_PINNED, str(_PINS)],
            check=True,
            capture_output=True,
            timeout=_INSTALL_S,
        )
        complete.touch()
    except (subprocess.SubprocessError, OSError) as error:
        say(f"litellm cannot be installed here: {_cause(error)}")
        return None
    return command


def _cause(error: Exception) -> str:
    """Output of pip, if pip failed, or else the error."""
    said = getattr(error, "stderr", None)
    return said.decode(errors="replace").strip() if said else str(error)


@contextmanager
def proxy(command: Path, upstream: str, folder: Path, core: int) -> Generator[Measured]:
    """Run the proxy with one worker on one core, and with its defaults otherwise."""
    config, log = folder / "litellm.yaml", folder / "litellm.log"
    config.write_text(
        f"model_list:\n  - model_name: {MODEL}\n    litellm_params:\n      model: openai/{MODEL}\n"
        f"      api_base: {upstream}\n      api_key: bench\n"
    )
    with create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    flags = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"LITELLM_MASTER_KEY": KEY}
    environment.pop("DATABASE_URL", None)
    with (
        log.open("wb") as said,
        subprocess.Popen(
            pinned(core, [str(command), *flags]), stdout=said, stderr=said, env=environment
        ) as process,
    ):
        try:
            _wait(f"http://127.0.0.1:{port}/health/liveliness", process, log)
            yield Measured(process.pid, f"http://127.0.0.1:{port}/v1")
        finally:
            process.kill()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"litellm did not start:\n{log.read_text()[-2000:]}")
