"""Example programs that use the product as its users do: from outside, over HTTP."""

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository, or the part of it that a wheel holds: run.py and configs/ are here."""


class StoppedError(Exception):
    """An error that stops a program; its message is a sentence for the person who started it."""


def exit_status(program: Callable[[], object], *expected: type[Exception]) -> int:
    """Run a program; return 0, 1 where it was stopped by an error, or 130 after Ctrl-C.

    SIGTERM, and a terminal that is closed, act as Ctrl-C: what a program started ends first. Files
    are created for their owner only.

    Args:
        expected: errors with such a message, besides `StoppedError`.
    """
    os.umask(0o077)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has none
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        program()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        cause = error
        while isinstance(cause, ExceptionGroup):
            cause = cause.exceptions[0]
        if not isinstance(cause, (StoppedError, *expected)):
            raise
        print(f"Stopped: {cause}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Make a folder, and keep it for this process.

    Raises:
        StoppedError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoppedError(f"another run is at work in {folder}") from error
        yield


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)
