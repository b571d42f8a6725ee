"""Programs from PyPI that tests start, each set installed once into an environment of its own, as
they need packages that the project does not."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

from examples.day.npm import CACHE


def installed(name: str, *packages: str) -> Path:
    """Return the folder of the set's programs, `python` among them; takes a minute the first
    time."""
    folder = CACHE / "-".join([name, *(package.partition("==")[2] for package in packages)])
    folder.mkdir(parents=True, exist_ok=True)
    programs = folder / "venv" / "bin"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not (folder / "installed").exists():
            for command in (
                (sys.executable, "-m", "venv", "--clear", str(folder / "venv")),
                (str(programs / "python"), "-m", "pip", "install", "-q", *packages),
            ):
                subprocess.run(command, check=True, capture_output=True, timeout=900)
            (folder / "installed").touch()
    return programs
