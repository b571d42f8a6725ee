"""A rank whose device fails stickily: from one of its passes on, every call fails.

Run in the place of `local_gpu.ranks`; the product's own functions are wrapped from outside. `SICK`
names a folder with `words` (what the device says, behind the name of the error's class), `well` (how
many passes go well before) and `ill` (how many processes are, from the first on). Each process of rank 0 writes
its id into `lives`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from local_gpu.learning.masters import Masters
from local_gpu.learning.passes import Body
from local_gpu.ranks.__main__ import build
from local_gpu.ranks.rank import live


def prescribe(folder: Path, error: Exception, *, well: int, ill: int) -> dict[str, str]:
    """The environment for ranks of this module."""
    folder.mkdir()
    (folder / "words").write_text(f"{type(error).__name__}\n{error}")
    (folder / "well").write_text(str(well))
    (folder / "ill").write_text(str(ill))
    (folder / "lives").touch()
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    return {"SICK": str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def lives(folder: Path) -> list[int]:
    """The processes so far, in order."""
    return [int(pid) for pid in (folder / "lives").read_text().split()]


def _fall_ill(folder: Path) -> None:
    name, _, words = (folder / "words").read_text().partition("\n")
    kind: Any = getattr(torch, name, RuntimeError)
    left = int((folder / "well").read_text())

    def wrap(call: Callable[..., Any], *, begins: bool) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                raise kind(words)
            left -= begins
            return call(*args, **kwargs)

        return wrapped

    for owner, names in ((Body, ("hidden",)), (Masters, ("zero", "load", "adapter"))):
        for name in names:
            setattr(owner, name, wrap(getattr(owner, name), begins=owner is Body))


if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        sick = Path(os.environ["SICK"])
        with (sick / "lives").open("a") as file:
            file.write(f"{os.getpid()}\n")
        if len(lives(sick)) <= int((sick / "ill").read_text()):
            _fall_ill(sick)
    sys.exit(live(build))
