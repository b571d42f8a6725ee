"""Programs from npm, installed once into a cache, with a Node of their own."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

NODE = "24"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tinker-claw-tests"


def npm() -> str | None:
    return shutil.which("npm")


def installed(name: str, *packages: str) -> Path:
    """Return the folder of the programs; the first installation takes about half a minute."""
    folder = CACHE / f"{name}-node-{NODE}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not (folder / "installed").exists():
            _install(folder, *packages)
            (folder / "installed").touch()
    return folder


def on_path(folder: Path) -> str:
    """A PATH on which the folder's programs come first."""
    return f"{folder / 'node_modules' / '.bin'}:{os.environ['PATH']}"


def _install(folder: Path, *packages: str) -> None:
    (folder / "package.json").write_text('{"private": true}')
    for package in (f"node@{NODE}", *packages):
        subprocess.run(
            [npm() or "npm", "install", "--no-audit", "--no-fund", package],
            cwd=folder,
            check=True,
            capture_output=True,
            env=os.environ | {"PATH": on_path(folder)},
            timeout=600,
        )
