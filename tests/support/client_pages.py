"""Recipes of docs/clients.md, as they stand there."""

from __future__ import annotations

import re
import shlex
import subprocess
import textwrap
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
_BLOCK = re.compile(r"\n\n((?: {4}.*\n|\n(?= {4}))+)")


def _sections() -> dict[str, str]:
    """Return the text of every section, by its title."""
    texts = (section.partition("\n") for section in _PAGE.read_text().split("\n## ")[1:])
    return {title: f"\n{text}\n" for title, _, text in texts}


def with_recipes() -> set[str]:
    """Return the titles of the sections that have blocks of code."""
    return {title for title, text in _sections().items() if _BLOCK.search(text)}


def recipe(client: str, base_url: str, model: str, key: str) -> list[str]:
    """Return the blocks of code in a client's section, for an address, a model and a key.

    Nothing else in them is changed.
    """
    section = _sections()[client]

    def placed(block: str) -> str:
        block = block.replace("http://127.0.0.1:30000", base_url.removesuffix("/v1"))
        return re.sub(r"\bnone\b", key, block.replace("Qwen/Qwen3-8B", model))

    return [placed(textwrap.dedent(found[1])) for found in _BLOCK.finditer(section)]


def variables(script: str) -> dict[str, str]:
    """Return what a shell has exported when a script has ended."""
    shell = ["env", "-i", "bash", "-euc", f"{script}\n/usr/bin/env -0"]
    shown = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    exported = dict(line.split("=", 1) for line in shown.split("\0") if line)
    return {name: value for name, value in exported.items() if name not in ("PWD", "SHLVL", "_")}


def command(block: str) -> list[str]:
    """Return the words of the last command of a block."""
    return shlex.split(block.strip().splitlines()[-1], comments=True)
