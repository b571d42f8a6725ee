"""Run one server as a child process, and end it when the parent has died.

    python -P child.py GRACE_S COMMAND ...       standard input: a pipe from its parent

The pipe closes when the parent ends, for whatever reason. Then, or on SIGTERM, the server gets
SIGTERM, and after the grace SIGKILL goes to all of its processes: those of its session, and orphans
that left it.

Rule: standard library only, and no import of this project: it is started by its path. It ends with
its server, and leaves none of the server's processes behind.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2), Linux. Elsewhere there is only the pipe."""
_POLL_S = 0.05


def main(arguments: list[str]) -> int:
    """Run the command to its end, or to the end of the pipe; return its exit status."""
    grace_s, command = float(arguments[0]), arguments[1:]
    _control(_SET_CHILD_SUBREAPER, 1)  # orphans of the server become children of this process
    wake, signalled = os.pipe()
    os.set_blocking(signalled, False)
    signal.set_wakeup_fd(signalled)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda _number, _frame: None)
    try:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_dies_with_this
        )
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        return 127
    _wait(server, wake)
    if server.poll() is None:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(grace_s)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    _sweep(server.pid)
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def _wait(server: subprocess.Popen[bytes], wake: int) -> None:
    """Wait until the server ends, the pipe closes, or a signal asks for the end."""
    while server.poll() is None:
        ready, _, _ = select.select([0, wake], [], [])
        if 0 in ready and not os.read(0, 1024):
            return
        if wake in ready and set(os.read(wake, 1024)) - {signal.SIGCHLD}:
            return


def _sweep(session: int) -> None:
    """Kill the remaining processes of the server's session, and orphans that left it."""
    while True:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(session, signal.SIGKILL)
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(_POLL_S)  # killed, and not gone yet
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Ids of this process's children."""
    file = Path(f"/proc/self/task/{os.getpid()}/children")
    try:
        return [int(number) for number in file.read_text().split()]
    except OSError:
        return []


def _dies_with_this() -> None:
    _control(_SET_PDEATHSIG, signal.SIGKILL)


def _control(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
