"""Small repositories with a bug and failing tests, to be fixed in a shell.

Rule: a program does not grade itself. The changed program evaluates the cases of the tests, and
hidden ones, in a fresh sandbox, which holds no test, and the results are compared outside it. So
neither tests that were changed, nor a module that loads itself, nor an early exit, nor whatever is
printed can pass.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import shutil
import stat
import textwrap
import tomllib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from examples.tracks import TrackError
from examples.tracks.sandbox import COMMAND_S, PROGRAMS, SHELL, Shell, Walls, folder, run, walls_for
from examples.tracks.track import Track

REPOSITORIES = Path(__file__).parent / "repositories"
TESTS = "test_all.py"
_RAISES = "raises "
_LARGEST, _MOST = 1_000_000, 100
"""Most bytes and files of a repository that is graded."""
_LONGEST = 4000
"""Most characters of a result."""
_WORK = r"""
import ast, json, os, sys
asked = json.load(sys.stdin)
told = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
sys.path.insert(0, "program")
results = []
for case in asked["cases"]:
    *first, last = ast.parse(case).body
    names = {}
    try:
        exec(asked["imports"], names)
        exec(compile(ast.Module(first, []), "case", "exec"), names)
        results.append(repr(eval(compile(ast.Expression(last.value), "case", "eval"), names)))
    except Exception as error:
        results.append("raises " + type(error).__name__)
told.write("\n" + json.dumps(results))
told.flush()
os._exit(0)
"""
"""Program that evaluates the cases in the sandbox. What the repository prints is discarded."""


@dataclass(frozen=True, slots=True)
class Case:
    """A test: code and the result it must have."""

    code: str
    """Lines of code; the last one has a value."""
    wanted: str
    """Wanted value, as Python writes it, or `raises` and the name of an error."""

    def holds(self, result: object) -> bool:
        if not isinstance(result, str) or len(result) > _LONGEST:
            return False
        if self.wanted.startswith(_RAISES) or result.startswith(_RAISES):
            return result == self.wanted
        try:
            return bool(ast.literal_eval(result) == ast.literal_eval(self.wanted))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return False

    def test(self, number: int) -> str:
        """Render as a method of a unittest class."""
        *first, last = self.code.splitlines()
        if self.wanted.startswith(_RAISES):
            opens = f"with self.assertRaises({self.wanted.removeprefix(_RAISES)}):"
            lines = [opens, *(f"    {line}" for line in self.code.splitlines())]
        else:
            lines = [*first, f"self.assertEqual({last}, {self.wanted})"]
        return f"    def test_{number}(self):\n" + textwrap.indent("\n".join(lines), " " * 8)


@dataclass(frozen=True, slots=True)
class Repository:
    """A correct program and its possible bugs: a file of `repositories/`."""

    name: str
    about: str
    imports: str
    files: Mapping[str, str]
    visible: Sequence[Case]
    """Tests that the repository contains."""
    hidden: Sequence[Case]
    """Further cases that a correct program passes."""
    bugs: Sequence[Mapping[str, str]]
    held_out: bool

    @classmethod
    def read(cls, path: Path) -> Repository:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        return cls(
            name=path.stem,
            about=table["about"],
            imports=table["imports"],
            files={name: text.lstrip() for name, text in table["files"].items()},
            visible=[Case(*pair) for pair in table["visible"]],
            hidden=[Case(*pair) for pair in table["hidden"]],
            bugs=table["bugs"],
            held_out=table.get("held_out", False),
        )

    def tests(self) -> str:
        methods = "\n\n".join(case.test(number) for number, case in enumerate(self.visible, 1))
        return (
            f"import unittest\n\n{self.imports}\n\n\n"
            f"class Test(unittest.TestCase):\n{methods}\n\n\n"
            'if __name__ == "__main__":\n    unittest.main()\n'
        )


@dataclass(frozen=True, slots=True)
class Bug:
    """A task: a repository with one bug."""

    repository: Repository
    number: int
    sandbox: Walls
    limit_s: float = COMMAND_S

    @property
    def name(self) -> str:
        return f"{self.repository.name} {self.number}"

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        report = self.repository.bugs[self.number]["report"]
        return (
            {
                "role": "user",
                "content": "There is a bug in the program in this folder. "
                f"{report} Find and mend it. python3 {TESTS} runs the tests.",
            },
        )

    def files(self) -> dict[str, str]:
        """Files of the repository as the model finds it."""
        bug = self.repository.bugs[self.number]
        files = dict(self.repository.files)
        files[bug["file"]] = files[bug["file"]].replace(bug["right"], bug["wrong"], 1)
        return {
            **files,
            TESTS: self.repository.tests(),
            "README.md": f"# {self.repository.name}\n\n{self.repository.about}\n",
        }

    @asynccontextmanager
    async def attempt(self) -> AsyncGenerator[Checkout]:
        async with folder(self.files()) as path:
            yield Checkout(path, self.sandbox, self.limit_s, self)


@dataclass(frozen=True, slots=True)
class Checkout(Shell):
    """An attempt in a checkout of the repository."""

    bug: Bug

    async def solved(self, answer: str) -> bool:
        try:
            program = await asyncio.to_thread(_program, self.path)
        except (OSError, RecursionError):
            return False  # unreadable files, or too deep to be reached
        if program is None:
            return False
        repository = self.bug.repository
        cases = [*repository.visible, *repository.hidden]
        work = {"imports": repository.imports, "cases": [case.code for case in cases]}
        async with folder({"work.py": _WORK}) as fresh:
            for name, content in program.items():
                path = fresh / "program" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            ended = await run(
                self.sandbox,
                fresh,
                "exec python3 -I -B work.py 2>/dev/null",
                stdin=json.dumps(work).encode(),
                limit_s=self.limit_s,
            )
        results = _results(ended.output)
        return len(results) == len(cases) and all(map(Case.holds, cases, results))


@dataclass(frozen=True, slots=True)
class Swe:
    """Environment with every bug of every repository. Some repositories are held out."""

    seed: int
    sandbox: Walls

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (SHELL,)

    @classmethod
    def of(cls, track: Track) -> Swe:
        if shutil.which("python3", path=PROGRAMS) is None:
            raise TrackError(f"There is no python3 in {PROGRAMS}. Install the package python3.")
        return cls(track.seed, walls_for(track.model))

    def task(self, number: int) -> Bug:
        return self._drawn(number, held_out=False)

    def held_out(self, number: int) -> Bug:
        return self._drawn(number, held_out=True)

    def _drawn(self, number: int, *, held_out: bool) -> Bug:
        """Draw bugs: all of them in the order of the seed, again and again."""
        bugs = [
            Bug(repository, bug, self.sandbox)
            for repository in repositories()
            for bug in range(len(repository.bugs))
            if repository.held_out == held_out
        ]
        Random(f"{self.seed} {held_out}").shuffle(bugs)
        return bugs[number % len(bugs)]


@cache
def repositories() -> Sequence[Repository]:
    """Shipped repositories, in the order of their names."""
    return [Repository.read(path) for path in sorted(REPOSITORIES.glob("*.toml"))]


def _program(root: Path) -> dict[str, bytes] | None:
    """Read a repository's files without its tests; None: they are too large or too many.

    Anything but a regular file, such as a link, is left out.
    """
    contents: dict[str, bytes] = {}
    size = 0
    for where, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = Path(where) / name
            if name == TESTS or not stat.S_ISREG(path.lstat().st_mode):
                continue
            size += path.lstat().st_size
            if size > _LARGEST or len(contents) == _MOST:
                return None
            contents[str(path.relative_to(root))] = path.read_bytes()
    return contents


def _results(output: bytes) -> Sequence[object]:
    """Results from the last line of the output, if it is a list."""
    try:
        results = json.loads(output.rpartition(b"\n")[2])
    except (ValueError, RecursionError):
        return ()
    return results if isinstance(results, list) else ()
