"""Programs from PyPI that tests start, and texts in the packages of agents.

Each set is installed once into an environment of its own, as they need packages that the project
does not. Texts are read from their source, as agents write them into messages.
"""

from __future__ import annotations

import ast
import fcntl
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from examples.day.npm import CACHE


def installed(name: str, *packages: str) -> Path:
    """Return the folder of the set's programs, `python` among them; takes a minute the first
    time."""
    folder = CACHE / "-".join([name, *(package.partition("==")[2] for package in packages)])
    folder.mkdir(parents=True, exist_ok=True)
    programs = folder / "venv" / "bin"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not (folder / "installed").exists():
            for command in (
                (sys.executable, "-m", "venv", "--clear", str(folder / "venv")),
                (str(programs / "python"), "-m", "pip", "install", "-q", *packages),
            ):
                subprocess.run(command, check=True, capture_output=True, timeout=900)
            (folder / "installed").touch()
    return programs


FILLED = "42"
"""Stands where a program puts a value."""


def literals(*places: Path) -> Iterator[str]:
    """Yield every text of Python programs, apart from docstrings."""
    files = (f for place in places for f in ([place] if place.is_file() else place.rglob("*.py")))
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        seen = {
            id(statement.value) for statement in ast.walk(tree) if isinstance(statement, ast.Expr)
        }
        for node in ast.walk(tree):
            text = None if id(node) in seen else _text(node)
            if text is not None:
                seen.update(map(id, ast.walk(node)))  # no part of it again
                yield text


def templates(script: str) -> Iterator[str]:
    """Yield every template string that a JavaScript program gives a name."""
    for found in re.finditer(r"\w = `((?:[^`\\]|\\.)*)`", script):
        yield re.sub(r"\$\{[^}]*\}", FILLED, found[1])


def _text(node: ast.AST) -> str | None:
    """Text of an expression, with each value filled in."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) or FILLED for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            texts = _text(left), _text(right)
            return None if texts == (None, None) else "".join(t or FILLED for t in texts)
        case _:
            return None
