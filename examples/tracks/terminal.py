"""Small jobs in a shell: a folder with files, a sentence that says what to do, and a checker.

Rule: what a model types runs in a sandbox, and only the last contents of the folder count, however
they came there.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from examples.tracks.sandbox import COMMAND_S, SHELL, Shell, Walls, folder, walls_for
from examples.tracks.track import Track

_WORDS = ("pear", "plum", "kite", "mug", "shell", "stamp", "bead", "key", "box", "lamp", "rope")


@dataclass(frozen=True, slots=True)
class Job:
    """A task in a folder."""

    name: str
    wish: str
    before: Mapping[str, str]
    """Files of the folder, by name."""
    after: Mapping[str, str | None]
    """Contents that files must have in the end, ignoring surrounding blanks; None: no such file."""
    sandbox: Walls
    limit_s: float = COMMAND_S

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        return ({"role": "user", "content": self.wish},)

    @asynccontextmanager
    async def attempt(self) -> AsyncGenerator[Folder]:
        async with folder(self.before) as path:
            yield Folder(path, self.sandbox, self.limit_s, self)


@dataclass(frozen=True, slots=True)
class Folder(Shell):
    """An attempt in a folder."""

    job: Job

    async def solved(self, answer: str) -> bool:
        return all(_holds(self.path / file, text) for file, text in self.job.after.items())


@dataclass(frozen=True, slots=True)
class Terminal:
    """Environment with six kinds of jobs, with other names and words each time."""

    seed: int
    sandbox: Walls

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (SHELL,)

    @classmethod
    def of(cls, track: Track) -> Terminal:
        return cls(track.seed, walls_for(track.model))

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
    temporary = [f"{word}.tmp" for word in rng.sample(_WORDS, 2)]
    kept = _file(rng)
    before = {name: _lines(rng, 1) for name in [*temporary, kept]}
    return "Delete all files whose names end in .tmp.", before, dict.fromkeys(temporary)


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
    """Return whether a file has the wanted content; a link does not count as a file."""
    if wanted is None:
        return not os.path.lexists(file)
    try:
        if file.is_symlink() or not file.is_file() or file.stat().st_size > 100_000:
            return False
        return file.read_bytes().decode(errors="replace").strip() == wanted.strip()
    except OSError:
        return False  # it is unreadable
