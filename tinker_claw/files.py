"""Permissions of files that hold conversations, keys and adapters: readable by their owner only.

Rule: every file we create is private from the start, by the umask; files from before are made
private at the next start, or named where that cannot be done.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_OTHERS = 0o077
_OURS = (
    "ledger.sqlite3",
    "ledger.sqlite3-wal",
    "ledger.sqlite3-shm",
    "lock",
    "control.json",
    "api-key",
    "metrics.jsonl",
    "adapters",
    "states",
    "logs",
    "sinks",
)
"""Files and folders that a run keeps in its data directory."""


def for_owner_only() -> None:
    """Create files for the owner only from now on, in this process and its children."""
    os.umask(_OTHERS)


def private(name: str, flags: int) -> int:
    """Open a file that its owner alone may read; an `opener` of `open`."""
    return os.open(name, flags, 0o600)


def write_private(file: Path, text: str) -> None:
    """Create a file that its owner alone may read.

    Raises:
        OSError: it cannot be written, and is not left in part; or there is one already.
    """
    with open(file, "x", opener=private) as out:
        try:
            out.write(text)
            out.flush()
        except OSError:
            file.unlink()
            raise


def open_to_others(directory: Path) -> list[Path]:
    """Return the paths in a run's data directory, itself included, that others can read or
    write."""
    return [path for path in (directory, *_below(directory)) if _mode(path) & _OTHERS]


def close_to_others(directory: Path) -> list[Path]:
    """Close a run's files to others as far as possible; return the paths that were closed.

    A directory that also holds other things is the user's choice and stays as it is.
    """
    only_ours, closed = {path.name for path in directory.iterdir()} <= {*_OURS}, list[Path]()
    for path in open_to_others(directory):
        if path != directory or only_ours:
            with suppress(OSError):
                path.chmod(_mode(path) & ~_OTHERS)
                closed.append(path)
    return closed


def _below(directory: Path) -> Iterator[Path]:
    for name in _OURS:
        path = directory / name
        if path.exists() and not path.is_symlink():
            yield path
            if path.is_dir():
                yield from (inner for inner in path.rglob("*") if not inner.is_symlink())


def _mode(path: Path) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:  # gone meanwhile
        return 0
