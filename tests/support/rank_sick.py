"""A rank whose device fails for good: from one of its passes on, every call fails.

`build_ill` is given to ranks; the product's own functions are wrapped from outside. `SICK` names a
folder: `words` has the class of the error and what the device says, `well` how many passes go well
before, `ill` how many processes fall ill, the first ones, and `lives` the ids of all.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from local_gpu.config import LocalConfig
from local_gpu.learn.learning import LearningCore
from local_gpu.learn.masters import Masters
from local_gpu.learn.world import World
from local_gpu.ranks.rank import build_learner
from local_gpu.tree.body import Body


def prescribe(folder: Path, error: Exception, *, well: int, ill: int) -> dict[str, str]:
    """Environment for ranks of this module."""
    folder.mkdir()
    (folder / "words").write_text(f"{type(error).__name__}\n{error}")
    (folder / "well").write_text(str(well))
    (folder / "ill").write_text(str(ill))
    (folder / "lives").touch()
    return {"SICK": str(folder)}


def lives(folder: Path) -> list[int]:
    """Ids of the processes so far, in order."""
    return [int(pid) for pid in (folder / "lives").read_text().split()]


def _fall_ill(folder: Path) -> None:
    name, _, words = (folder / "words").read_text().partition("\n")
    kind: Any = getattr(torch, name, RuntimeError)
    left = int((folder / "well").read_text())

    def wrap(call: Callable[..., Any], *, is_pass: bool) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= is_pass
            if left < 0:
                raise kind(words)
            return call(*args, **kwargs)

        return wrapped

    Body.hidden = wrap(Body.hidden, is_pass=True)
    for name in ("zero", "load", "adapter"):
        setattr(Masters, name, wrap(getattr(Masters, name), is_pass=False))


def build_ill(config: LocalConfig, world: World) -> LearningCore:
    """Build a learner on a device that is well."""
    built, folder = build_learner(config, world), Path(os.environ["SICK"])
    with (folder / "lives").open("a") as file:
        file.write(f"{os.getpid()}\n")
    if len(lives(folder)) <= int((folder / "ill").read_text()):
        _fall_ill(folder)
    return built
