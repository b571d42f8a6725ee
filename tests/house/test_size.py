"""The ratchet: a change that lets a package grow says so by raising its number here."""

from __future__ import annotations

import ast
import io
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = {
    "tinker_claw": 183_390,
    "tinker_claw/*": 11_190,
    "tinker_claw/app": 6_470,
    "tinker_claw/backends": 15_050,
    "tinker_claw/billing": 2_520,
    "tinker_claw/cli": 16_130,
    "tinker_claw/config": 6_040,
    "tinker_claw/conversation": 14_170,
    "tinker_claw/formats": 14_670,
    "tinker_claw/gateway": 16_590,
    "tinker_claw/judge": 5_510,
    "tinker_claw/learner": 20_240,
    "tinker_claw/ledger": 23_150,
    "tinker_claw/methods": 4_980,
    "tinker_claw/page": 5_710,
    "tinker_claw/privacy": 3_950,
    "tinker_claw/render": 14_040,
    "tinker_claw/sinks": 3_050,
    "local_gpu": 87_230,
}
_NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING, tokenize.ENDMARKER),
    *(tokenize.INDENT, tokenize.DEDENT),
}


def tokens(text: str) -> int:
    """Python tokens, without comments, docstrings and what lays them out."""
    said = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(one.type not in _NOT_CODE and one.start[0] not in said for one in found)


def size(package: str) -> int:
    """Tokens of a package with its subpackages; for `name/*` of its own modules alone."""
    folder = ROOT / package.removesuffix("/*")
    files = folder.glob("*.py") if package.endswith("*") else folder.rglob("*.py")
    return sum(map(tokens_of, files))


@cache
def tokens_of(file: Path) -> int:
    return tokens(file.read_text())


@pytest.mark.parametrize("package", MOST)
def test_no_package_grows_unsaid(package: str) -> None:
    found = size(package)
    assert found <= MOST[package], f"{package} has {found} tokens: make it smaller, or say so here"


def test_every_room_has_its_number() -> None:
    rooms = {f"tinker_claw/{path.parent.name}" for path in ROOT.glob("tinker_claw/*/__init__.py")}
    assert rooms | {"tinker_claw", "tinker_claw/*", "local_gpu"} == set(MOST)


def test_neither_comments_nor_line_breaks_count() -> None:
    long = '"""Title."""\n\n# why\ndef f(\n    a,\n    b,\n):\n    """Doc."""\n    return a\n'
    assert tokens(long) == tokens("def f(a, b,): return a") == 11
