"""Ranks for tests: real processes by torchrun, over what learns or over an echo.

Run by torchrun (`python -m rank_runs`), every rank is an echo: it says what it was told.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from local_gpu.config import LocalConfig
from local_gpu.parts import Ask, Facts
from local_gpu.ranks.rank import live
from local_gpu.ranks.world import World
from tinker_claw.errors import ContextLengthError, StepError
from tinker_claw.types import Adam, LossPass, StepReport, TokenLogprobs


class Echo:
    """Implements `Learning` without a model. A folder's name says what is to happen."""

    def __init__(self, config: LocalConfig, world: World) -> None:
        if config.model == "missing" and world.rank == 1:
            raise ContextLengthError(1, 2, 3)
        if config.model == "broken" and world.rank == 1:
            raise KeyError("no such layer")
        self._config = config
        self._world = world
        self.facts = Facts(f"{config.name}", world.size, world.most(world.rank))

    def step(self, passes: Sequence[LossPass], adam: Adam) -> StepReport:
        flat = torch.full((3,), float(self._world.rank + 1))
        self._world.sum(flat)
        told = self._world.agree("rank 1 says no" if self._refuses(adam) else None)
        if told is not None:
            raise StepError(told)
        return StepReport((float(flat[0]),), (), adam.learning_rate, len(passes))

    def score(self, adapter: Path | None, asks: Sequence[Ask]) -> list[TokenLogprobs]:
        return self._world.share(self._world.gather((self._world.rank, os.getpid(), adapter)))  # type: ignore[return-value]

    def write_adapter(self, folder: Path) -> None:
        folder.write_text(f"{self._world.rank}")

    def export_adapter(self, folder: Path) -> None:
        if self._world.rank == 1:
            raise ZeroDivisionError("rank 1 broke")
        self._world.gather(None)  # which rank 1 never reaches

    def write_state(self, folder: Path) -> None:
        if self._world.rank == 0:
            raise OSError(28, "No space left on device", str(folder))

    def read_state(self, folder: Path) -> None:
        if folder.name == "hang":
            time.sleep(600 * (self._world.rank == 1))
            self._world.gather(None)

    def close(self) -> None:
        print(f"rank {self._world.rank} closes")

    def _refuses(self, adam: Adam) -> bool:
        return adam.learning_rate == 7 and self._world.rank == 1


if __name__ == "__main__":
    sys.exit(live(Echo))
