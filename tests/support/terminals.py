"""Programs on a terminal of their own: what they show is read as it comes, and keys are typed."""

from __future__ import annotations

import codecs
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyte

PATIENCE_S = 400
LINES = 50
_GAPS = re.compile(r"\x1b\[[0-9]*[CG]")
"""Pattern of moves within a line, by which some programs skip the blank between two words."""
_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
"""Pattern of colours and moves of the cursor."""
_BEGUN = re.compile(r"\x1b(?:\[[0-9;?]*)?$")
"""Pattern of a colour or move of which the rest has not come yet."""


class Terminal:
    """A program and the terminal that it talks to."""

    def __init__(self, process: subprocess.Popen[bytes], handle: int, columns: int) -> None:
        self.process, self._handle = process, handle
        self._screen = pyte.Screen(columns, LINES)
        self._draw = pyte.ByteStream(self._screen).feed
        self.shown = ""
        """All output so far."""
        self._read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self.match: re.Match[str]
        """Match that `until` has found."""

    @property
    def screen(self) -> str:
        """What stands on it now: a program that draws only what changes does not write whole words
        into its output."""
        return "\n".join(self._screen.display)

    def until(self, pattern: str) -> str:
        """Wait until a pattern is shown that was not waited for before; return all output up to its
        end."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self.shown[self._read :])) is None:
            assert self._reads(deadline), f"{pattern!r} was not shown:\n{self.shown[-3000:]}"
        self.match = found
        before, self._read = self._read, self._read + found.end()
        return self.shown[before : self._read]

    def shows(self, done: Callable[[], bool], patience_s: float) -> bool:
        """Read output until another condition holds; False: it took too long."""
        deadline = time.monotonic() + patience_s
        while not done() and time.monotonic() < deadline:
            self._reads(min(deadline, time.monotonic() + 0.2))
        return done()

    def types(self, keys: str) -> None:
        os.write(self._handle, keys.encode())

    def ended(self) -> int:
        """Wait for its end; return the exit status, negative for a signal."""
        deadline = time.monotonic() + PATIENCE_S
        while self._reads(deadline):
            pass
        return self.process.wait(timeout=PATIENCE_S)

    def interrupted(self) -> int:
        """Press Ctrl-C until it ends, as people do; return the exit status. Python does not see one
        that comes between a prompt and the read behind it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with suppress(OSError):  # nobody has the other end any more
                self.types("\x03")
            pressed = time.monotonic()
            while self._reads(pressed + 5.0):
                pass
            if self.process.poll() is not None:
                break
        return self.process.wait(timeout=1.0)

    def _reads(self, deadline: float) -> bool:
        """Read some output; False: the program has ended, or is too slow."""
        if not select.select([self._handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            raw = os.read(self._handle, 65536)
        except OSError:  # nobody has the other end any more
            return False
        self._draw(raw)
        came = self._rest + self._decoder.decode(raw)
        begun = _BEGUN.search(came)
        self._rest = begun.group() if begun else ""
        self.shown += _MOVES.sub("", _GAPS.sub(" ", came.removesuffix(self._rest)))
        return bool(raw)


@contextmanager
def on_a_terminal(
    command: Sequence[str | Path],
    folder: Path,
    environment: Mapping[str, str],
    columns: int = 200,
) -> Generator[Terminal]:
    """Start a program on a terminal; it is killed at the end if it still runs."""
    handle, its = pty.openpty()
    termios.tcsetwinsize(its, (LINES, columns))
    # Background jobs of a shell ignore Ctrl-C, and so would all of their children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        ["setsid", "--ctty", *command],  # so that Ctrl-C on this terminal reaches it
        cwd=folder,
        env={**environment, "TERM": "xterm", "COLUMNS": str(columns)},
        stdin=its,
        stdout=its,
        stderr=its,
    )
    signal.signal(signal.SIGINT, before)
    os.close(its)
    try:
        yield Terminal(process, handle, columns)
    finally:
        process.kill()
        process.wait()
        os.close(handle)
