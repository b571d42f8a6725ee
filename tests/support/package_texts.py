"""Texts in the packages of agents, read from their source, as they write them into messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

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
