"""Where a command runs that a model typed: in bubblewrap, without a network and with nothing of
this machine but /usr to read and its own folder to write.

Rule: where there is no bubblewrap a model's shell is refused; only the shipped demo models, which
know nothing to do harm with, may use a plain subprocess. What is left of a run that was killed:
its sandboxes die with it, its folders are removed by the next one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.tracks import TrackError
from examples.tracks.environments import tool

SHELL = tool("shell", "Runs a command in the folder of the task.", command="for sh")
HARMLESS = frozenset({"demo", "demo-tracks"})
"""Models of under a million parameters that are shipped; any other is a real one."""
COMMAND_S = 10.0
"""A command that takes longer is killed, with all that it started."""
_SHOWN = 2000
"""Characters of what a command wrote: its beginning and its end."""
_KEPT = 65536
"""Bytes of what a command wrote; what comes after is read and thrown away."""
_LIMITS = "{ ulimit -t 10; ulimit -f 20480; ulimit -v 2097152; } 2>/dev/null; "
"""Ten seconds of CPU, files of 10 MB (in blocks of 512 bytes), 2 GB of memory, for each process.
One at a time: dash, which is sh on Debian, takes no two of them at once, and then sets neither."""
PROGRAMS = "/usr/local/bin:/usr/bin:/bin"
_ENVIRONMENT = {
    "PATH": PROGRAMS,
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",  # a file changed twice in a second would run as it was before
}

Walls = Sequence[str] | None
"""How bubblewrap is called; None: a plain subprocess."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that ran."""

    status: int | None
    """Its exit status; None: it took too long."""
    said: bytes
    """What it wrote, the first of it."""


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
        ended = await run(self.sandbox, self.path, command, limit_s=self.limit_s)
        if ended.status is None:
            return f"error: it took more than {self.limit_s:g} seconds"
        text = ended.said.decode(errors="replace").strip()
        if len(text) > _SHOWN:
            text = f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"
        if ended.status:
            return f"error: exit status {ended.status}\n{text}".strip()
        return text or "(it wrote nothing)"


async def run(
    walls: Walls, folder: Path, command: str, *, told: bytes = b"", limit_s: float = COMMAND_S
) -> Ended:
    """Run a command of sh in a folder, which it sees as /work, and end all that it started.

    `told` is its standard input.
    """
    process = await asyncio.create_subprocess_exec(
        *_around(walls, folder),
        *("/bin/sh", "-c", _LIMITS + command),
        cwd=folder,
        env=_ENVIRONMENT | {"HOME": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    status, said = None, b""
    try:
        async with asyncio.timeout(limit_s):
            said = await _talk(process, told)
            status = await process.wait()
    except TimeoutError:
        pass
    finally:
        _end(process.pid)
        await process.wait()
    return Ended(status, said)


async def _talk(process: asyncio.subprocess.Process, told: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(told)
        await process.stdin.drain()
        process.stdin.close()
    except (BrokenPipeError, ConnectionResetError):
        pass  # it does not listen
    said = b""
    while part := await process.stdout.read(_KEPT):
        said += part[: _KEPT - len(said)]
    return said


def walls_for(model: str) -> Walls:
    """The sandbox for what a model types.

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


@contextmanager
def folder(files: Mapping[str, str]) -> Generator[Path]:
    """A new folder with these files, for as long as it is needed."""
    prefix = f"track-{os.getpid()}-"
    root = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        for file, text in files.items():
            path = root / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        yield root
    finally:
        _remove(root)


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
    """Remove a folder, whatever a command has made of it: Python's own way ends with an error
    where folders lie in one another a thousand deep."""
    command = ("/bin/sh", "-c", 'chmod -R u+rwX "$1"; rm -rf "$1"', "sh", str(path))
    subprocess.run(command, env=_ENVIRONMENT, capture_output=True, check=False)


def _around(walls: Walls, folder: Path) -> Sequence[str]:
    if walls is None:
        return ()
    return (*walls, "--bind", str(folder), "/work", "--chdir", "/work")


def _sandbox() -> Walls:
    """How bubblewrap is called, where it is there and may make a world of its own."""
    program = shutil.which("bwrap")
    if program is None:
        return None
    walls = (
        *(program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *("--ro-bind", "/usr", "/usr", "--ro-bind-try", "/bin", "/bin"),
        *("--ro-bind-try", "/lib", "/lib", "--ro-bind-try", "/lib64", "/lib64"),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
        *("--clearenv", "--setenv", "HOME", "/work"),
        *(part for name, value in _ENVIRONMENT.items() for part in ("--setenv", name, value)),
    )
    tried = subprocess.run([*walls, "/bin/sh", "-c", "true"], capture_output=True, check=False)
    return walls if tried.returncode == 0 else None


def _end(group: int) -> None:
    """Kill what a command has left behind."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
