"""Refuse names that say nothing, docstrings that begin with a question, repeated class names.

    python -m tests.lab.plain_words        part of `make check`

CONTRIBUTING.md says how names and docstrings are written; this holds what a parser can see.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("tinker_claw", "local_gpu", "examples", "benchmarks")
UNIQUE_CLASSES_IN: Final = ("tinker_claw", "local_gpu")
NAMES: Final = {
    "told",
    "found",
    "said",
    "known",
    "noted",
    "made",
    "gone",
    "given",
    "taken",
    "shown",
    "meant",
    "asked",
    "heard",
    "thing",
    "things",
    "one",
    "ones",
    "stuff",
}
"""Names that say neither what a value is nor what it is for."""
DOCUMENTED: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
QUESTION: Final = re.compile(r"(Whether|Where|What|How|Why|When)\b")


def violations(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield the names and docstrings of one module that say nothing, each with its place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES:
            yield f"{path}:{node.lineno}: the name {node.id} does not say what it holds"
        if isinstance(node, ast.arg) and node.arg in NAMES:
            yield f"{path}:{node.lineno}: the parameter {node.arg} does not say what it is"
        if isinstance(node, DOCUMENTED) and QUESTION.match(ast.get_docstring(node) or ""):
            line = getattr(node, "lineno", 1)
            yield f"{path}:{line}: begin this docstring with an imperative or a noun phrase"


def repeated_classes(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield each name that two public classes share, with its places."""
    places = defaultdict[str, list[str]](list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    for name, several in places.items():
        if len(several) > 1:
            yield f"{', '.join(several)}: more than one class is named {name}"


def main() -> int:
    """Print every violation; return the exit status."""
    trees = {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    classes = {path: tree for path, tree in trees.items() if path.startswith(UNIQUE_CLASSES_IN)}
    messages = [line for path, tree in trees.items() for line in violations(path, tree)]
    messages += repeated_classes(classes)
    print("\n".join(messages), end="\n" if messages else "")
    return bool(messages)


if __name__ == "__main__":
    sys.exit(main())
