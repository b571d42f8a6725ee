"""Small jobs in a shell: a folder with files, a sentence that says what is to be done, a checker.

Rule: what a model types runs in bubblewrap, without a network and with nothing of this machine but
/usr to read and its own folder to write. Where there is no bubblewrap a model's shell is refused;
only the shipped demo models, which know nothing to do harm with, may use a plain subprocess.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from examples.tracks import TrackError
from examples.tracks.environments import tool
from examples.tracks.track import Track

SHELL = tool("shell", "Runs a command in the folder of the task.", "command", "for sh")
HARMLESS = frozenset({"demo", "demo-tracks"})
"""Models of under a million parameters that are shipped; any other is a real one."""
COMMAND_S = 10.0
"""A command that takes longer is killed, with all that it started."""
_SHOWN = 2000
"""Characters of what a command wrote."""
_LIMITS = "ulimit -t 10 -f 20480 -v 2097152 2>/dev/null; "
"""Ten seconds of CPU, files of 10 MB (in blocks of 512 bytes), 2 GB of memory, for each process."""
_WORDS = ("pear", "plum", "kite", "mug", "shell", "stamp", "bead", "key", "box", "lamp", "rope")


@dataclass(frozen=True, slots=True)
class Job:
    """A task."""

    name: str
    wish: str
    before: Mapping[str, str]
    """The files of the folder, by name."""
    after: Mapping[str, str | None]
    """What must be there when it is done, but for blanks around it; None: nothing."""
    sandbox: Sequence[str] | None
    """How bubblewrap is called; None: a plain subprocess."""
    limit_s: float = COMMAND_S

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        return ({"role": "user", "content": self.wish},)

    @asynccontextmanager
    async def attempt(self) -> AsyncGenerator[Folder]:
        with tempfile.TemporaryDirectory(prefix="track-", ignore_cleanup_errors=True) as name:
            for file, text in self.before.items():
                (Path(name) / file).write_text(text, encoding="utf-8")
            yield Folder(self, Path(name))


@dataclass(frozen=True, slots=True)
class Folder:
    """An attempt."""

    job: Job
    path: Path

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name != "shell":
            return f"error: there is no tool {name}, but shell"
        command = arguments.get("command")
        if not isinstance(command, str) or "\0" in command:
            return "error: command must be a text"
        process = await asyncio.create_subprocess_exec(
            *_command(self.job.sandbox, self.path, _LIMITS + command),
            cwd=self.path,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.path), "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), self.job.limit_s)
        except TimeoutError:
            return f"error: it took more than {self.job.limit_s:g} seconds"
        finally:
            _end(process.pid)
            await process.wait()
        text = said.decode(errors="replace").strip()
        text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
        if process.returncode:
            return f"error: exit status {process.returncode}\n{text}".strip()
        return text or "(it wrote nothing)"

    def solved(self, answer: str) -> bool:
        return all(_holds(self.path / file, text) for file, text in self.job.after.items())


@dataclass(frozen=True, slots=True)
class Terminal:
    """Six kinds of jobs, with other names and words each time."""

    seed: int
    sandbox: Sequence[str] | None

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (SHELL,)

    @classmethod
    def of(cls, track: Track) -> Terminal:
        sandbox = _sandbox()
        if sandbox is None and track.model not in HARMLESS:
            raise TrackError(
                "There is no bubblewrap (bwrap) that works here, and without it what "
                f"{track.model} types would run on this machine as you. Install bubblewrap."
            )
        return cls(track.seed, sandbox)

    def task(self, number: int) -> Job:
        return self._drawn(f"train {number}")

    def held_out(self, number: int) -> Job:
        return self._drawn(f"exam {number}")

    def _drawn(self, which: str) -> Job:
        rng = Random(f"{self.seed} {which}")
        kind = rng.choice(_KINDS)
        wish, before, after = kind(rng)
        kept = {name: text for name, text in before.items() if name not in after}
        return Job(f"{kind.__name__} {which}", wish, before, {**kept, **after}, self.sandbox)


_Drawn = tuple[str, dict[str, str], dict[str, str | None]]


def write(rng: Random) -> _Drawn:
    word, file = rng.choice(_WORDS), _file(rng)
    return f"Write the word {word} into the file {file}.", {}, {file: word}


def rename(rng: Random) -> _Drawn:
    old, new, text = _file(rng), _file(rng), _lines(rng, 2)
    if old == new:
        new = f"new-{new}"
    return f"Rename {old} to {new}.", {old: text}, {old: None, new: text}


def remove(rng: Random) -> _Drawn:
    gone = [f"{word}.tmp" for word in rng.sample(_WORDS, 2)]
    kept = _file(rng)
    before = {name: _lines(rng, 1) for name in [*gone, kept]}
    return "Delete all files whose names end in .tmp.", before, dict.fromkeys(gone)


def count(rng: Random) -> _Drawn:
    file, lines = _file(rng), rng.randint(3, 30)
    wish = f"Count the lines of {file} and write the number into count.txt."
    return wish, {file: _lines(rng, lines)}, {"count.txt": str(lines)}


def order(rng: Random) -> _Drawn:
    file, words = _file(rng), rng.sample(_WORDS, 6)
    wish = f"Sort the lines of {file} and write them into sorted.txt."
    return wish, {file: "\n".join(words) + "\n"}, {"sorted.txt": "\n".join(sorted(words))}


def find(rng: Random) -> _Drawn:
    file, word = _file(rng), rng.choice(_WORDS)
    others = [w for w in _WORDS if w != word]
    drawn = [f"{rng.choice(others)} {n}" for n in range(9)]
    for at in rng.sample(range(9), 3):
        drawn[at] = f"{word} {at}"
    wanted = "\n".join(line for line in drawn if line.startswith(f"{word} "))
    wish = f"Write the lines of {file} that hold the word {word} into found.txt."
    return wish, {file: "\n".join(drawn) + "\n"}, {"found.txt": wanted}


_KINDS: tuple[Callable[[Random], _Drawn], ...] = (write, rename, remove, count, order, find)


def _file(rng: Random) -> str:
    return f"{rng.choice(_WORDS)}s-{rng.randrange(100)}.txt"


def _lines(rng: Random, number: int) -> str:
    return "".join(f"{rng.choice(_WORDS)} {rng.randrange(10)}\n" for _ in range(number))


def _holds(file: Path, wanted: str | None) -> bool:
    """Whether a file says what it should; a link is no file, wherever it leads."""
    if wanted is None:
        return not os.path.lexists(file)
    if file.is_symlink() or not file.is_file() or file.stat().st_size > 100_000:
        return False
    return file.read_bytes().decode(errors="replace").strip() == wanted.strip()


def _command(sandbox: Sequence[str] | None, folder: Path, command: str) -> list[str]:
    if sandbox is None:
        return ["/bin/sh", "-c", command]
    return [*sandbox, "--bind", str(folder), "/work", "--chdir", "/work", "/bin/sh", "-c", command]


def _sandbox() -> Sequence[str] | None:
    """How bubblewrap is called, where it is there and may make a world of its own."""
    program = shutil.which("bwrap")
    if program is None:
        return None
    walls = (
        *(program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *("--ro-bind", "/usr", "/usr", "--ro-bind-try", "/bin", "/bin"),
        *("--ro-bind-try", "/lib", "/lib", "--ro-bind-try", "/lib64", "/lib64"),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
        *("--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/work"),
        *("--setenv", "LANG", "C.UTF-8"),
    )
    tried = subprocess.run([*walls, "/bin/sh", "-c", "true"], capture_output=True, check=False)
    return walls if tried.returncode == 0 else None


def _end(group: int) -> None:
    """Kill what a command has left behind."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
