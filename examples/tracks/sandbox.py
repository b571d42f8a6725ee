"""Run commands that a model typed, in bubblewrap.

A command has no network, can only read /usr and write its own folder, and stays within bounds
(bounds.py).

Rule: where there is no bubblewrap a model's shell is refused; only the shipped demo models, which
know no harmful command, may use a plain subprocess. When a run is killed its sandboxes die with it,
and the next run removes its folders.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from examples.tracks import TrackError, bounds
from examples.tracks.environments import tool

SHELL = tool("shell", "Runs a command in the folder of the task.", command="for sh")
HARMLESS = frozenset({"demo", "demo-tracks"})
"""Shipped models of under a million parameters, whose commands are harmless; any other is a real
one."""
COMMAND_S = 10.0
"""Seconds after which a command is killed, with all that it started."""
_SHOWN = 2000
"""Characters shown of a command's output: its beginning and its end."""
_LONGEST = 100_000
"""Most bytes of a command: Linux takes 131,071 in one argument."""
_KEPT = 65536
"""Bytes kept of a command's output; the rest is read and thrown away."""
_LIMITS = (
    "{ ulimit -t 10; ulimit -f 20480; ulimit -v 2097152; "
    f"ulimit -d {bounds.MEMORY >> 10}; ulimit -n 256; }} 2>/dev/null; "
)
"""Shell limits of each process: ten seconds of CPU, files of 10 MB (in blocks of 512 bytes), 2 GB
of addresses, memory as all processes together may have, 256 open files. They are set one at a time,
as dash, which is sh on Debian, rejects two at once and then sets neither."""
_OTHERS = f"{{ ulimit -u {bounds.PROCESSES} || ulimit -p {bounds.PROCESSES}; }} 2>/dev/null; "
"""Limit of processes, only set in a sandbox, as outside it counts all processes of the user; root
has no such limit. The option is -u in bash and -p in dash."""
PLACES = 8
"""Commands that run in sandboxes at the same time; others wait."""
PROGRAMS = "/usr/local/bin:/usr/bin:/bin"
_THERE = ("--remount-ro", "/", "--chdir", "/work")
_ENVIRONMENT = {
    "PATH": PROGRAMS,
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",  # a file changed twice in a second would run as it was before
}


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """Sandboxes, of which a few are there at a time."""

    command: Sequence[str]
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PLACES))


Walls = Bubblewrap | None
"""How commands are isolated; None: a plain subprocess."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of a command."""

    status: int | None
    """Exit status; None: it was killed."""
    output: bytes
    """Beginning of the output."""
    took: str | None = None
    """Bound that it exceeded, or None."""


@dataclass(frozen=True, slots=True)
class Shell:
    """An attempt in a folder, with a shell as its tool."""

    path: Path
    sandbox: Walls
    limit_s: float

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name != "shell":
            return f"error: there is no tool {name}, but shell"
        command = arguments.get("command")
        if not isinstance(command, str) or "\0" in command:
            return "error: command must be a text"
        if len(command.encode()) > _LONGEST:
            return f"error: a command has at most {_LONGEST} bytes"
        ended = await run(self.sandbox, self.path, command, limit_s=self.limit_s)
        if ended.took is not None:
            return f"error: it took {ended.took}"
        text = ended.output.decode(errors="replace").strip()
        if len(text) > _SHOWN:
            text = f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"
        if ended.status:
            return f"error: exit status {ended.status}\n{text}".strip()
        return text or "(it wrote nothing)"


async def run(
    walls: Walls, folder: Path, command: str, *, stdin: bytes = b"", limit_s: float = COMMAND_S
) -> Ended:
    """Run a shell command in a folder, which it sees as /work, and end all that it started.

    `stdin` is its standard input.
    """
    async with nullcontext() if walls is None else walls.places:
        return await _run(walls, folder, command, stdin, limit_s)


async def _run(walls: Walls, folder: Path, command: str, stdin: bytes, limit_s: float) -> Ended:
    status, output, late = None, b"", None
    async with _begun(walls, folder, command) as (process, first):
        over = threading.Event()
        watching = asyncio.get_running_loop().run_in_executor(_WATCH, _watch, first, folder, over)
        try:
            async with asyncio.timeout(limit_s):
                output = await _talk(process, stdin)
                status = await process.wait()
        except TimeoutError:
            late = f"more than {limit_s:g} seconds"
        finally:
            over.set()
            took = await watching or late
    return Ended(None if took else status, output, took)


@dataclass(frozen=True, slots=True)
class _First:
    """The first process in a sandbox; all others end with it."""

    number: int
    handle: int

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def gone(self) -> None:
        """Wait until all processes have ended."""
        select.select([self.handle], [], [])
        os.close(self.handle)


def _watch(first: _First | None, folder: Path, over: threading.Event) -> str | None:
    """Kill a sandbox that exceeds a bound, and return which."""
    if first is None:
        return None
    if (took := bounds.watch(first.number, folder, over)) is not None:
        first.kill()
    return took


def _before_others() -> None:
    """Raise this thread's priority where that is allowed, so that it also runs under load."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)


_WATCH = ThreadPoolExecutor(PLACES, "watch", _before_others)


@asynccontextmanager
async def _begun(
    walls: Walls, folder: Path, command: str
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, _First | None]]:
    """Start a command; yield its process and the first one in its sandbox. All that they start ends
    with this."""
    limits = _LIMITS if walls is None else _LIMITS + _OTHERS
    program = ("nice", "-n", "5", "/bin/sh", "-c", limits + command)
    info: IO[bytes] | None = None
    with ExitStack() as stack:
        fds: list[int] = []
        if walls is not None:
            read, write = os.pipe()
            info, fds = os.fdopen(read, "rb"), [write, bounds.rules()]
            names = ("--info-fd", str(write), "--seccomp", str(fds[1]))
            program = (*walls.command, *names, "--bind", str(folder), "/work", *_THERE, *program)
        for fd in fds:
            stack.callback(os.close, fd)
        process = await asyncio.create_subprocess_exec(
            *program,
            cwd=folder,
            env=_ENVIRONMENT | {"HOME": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=fds,
        )
    first = None
    try:
        if info is not None:
            first = await asyncio.to_thread(_first, info)
        yield process, first
    finally:
        if first is not None:
            first.kill()
        _end(process.pid)
        await process.wait()
        if first is not None:
            await asyncio.to_thread(first.gone)


def _first(info: IO[bytes]) -> _First | None:
    """Read the sandbox's first process from bubblewrap; None: there is no sandbox, or it has
    ended."""
    with info, suppress(ValueError, ProcessLookupError):
        number = json.load(info)["child-pid"]
        return _First(number, os.pidfd_open(number))
    return None


async def _talk(process: asyncio.subprocess.Process, stdin: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(stdin)
        await process.stdin.drain()
        process.stdin.close()
    except (BrokenPipeError, ConnectionResetError):
        pass  # it does not listen
    output = b""
    while part := await process.stdout.read(_KEPT):
        output += part[: _KEPT - len(output)]
    return output


def walls_for(model: str) -> Walls:
    """Choose the sandbox for a model's commands.

    Raises:
        TrackError: there is none, and the model is a real one.
    """
    walls = _sandbox()
    if walls is None and model not in HARMLESS:
        raise TrackError(
            "There is no bubblewrap (bwrap) that works here, and without it what "
            f"{model} types would run on this machine as you. Install bubblewrap."
        )
    return walls


@asynccontextmanager
async def folder(files: Mapping[str, str]) -> AsyncGenerator[Path]:
    """Make a temporary folder with these files."""
    prefix = f"track-{os.getpid()}-"
    root = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        for file, text in files.items():
            path = root / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        yield root
    finally:
        await asyncio.to_thread(_remove, root)


def sweep() -> None:
    """Remove the folders of runs that were killed."""
    for path in Path(tempfile.gettempdir()).glob("track-*-*"):
        number = path.name.split("-")[1]
        if not number.isdecimal() or path.is_symlink() or path.stat().st_uid != os.getuid():
            continue
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            _remove(path)
        except (OverflowError, PermissionError):
            continue  # no process has that number, or another user's has it


def _remove(path: Path) -> None:
    """Remove a folder, whatever a command has put in it: Python's own function fails on folders
    nested a thousand deep."""
    command = ("/bin/sh", "-c", 'chmod -R u+rwX "$1"; rm -rf "$1"', "sh", str(path))
    subprocess.run(command, env=_ENVIRONMENT, capture_output=True, check=False)


def _sandbox() -> Walls:
    """Find bubblewrap's command line, where it is installed and may make namespaces."""
    program = shutil.which("bwrap")
    if program is None or platform.machine() not in bounds.UNSEEN:
        return None
    half = f"--size {bounds.MEMORY // 2} --tmpfs"
    walls = (
        "--unshare-all --die-with-parent --new-session --cap-drop ALL --size 1048576 --tmpfs / "
        "--ro-bind /usr /usr --ro-bind-try /bin /bin --ro-bind-try /lib /lib "
        "--ro-bind-try /lib64 /lib64 --proc /proc --dev /dev "
        f"{half} /tmp {half} /dev/shm --remount-ro /dev --clearenv --setenv HOME /work"
    )
    variables = (part for name, value in _ENVIRONMENT.items() for part in ("--setenv", name, value))
    command = (program, *walls.split(), *variables)
    tried = subprocess.run([*command, "/bin/sh", "-c", "true"], capture_output=True, check=False)
    return Bubblewrap(command) if tried.returncode == 0 else None


def _end(group: int) -> None:
    """Kill the processes that a command has left behind."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
