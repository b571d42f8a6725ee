"""Ranks for tests: real processes, over a learner without a model that tells about itself."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from local_gpu.config import LocalConfig
from local_gpu.halves import Facts, ScoreAsk
from local_gpu.learn.world import OutOfStep, World
from local_gpu.ranks.remote import RankedLearning
from tinker_claw.errors import ContextLengthError, StepError
from tinker_claw.types import Adam, LossPass, StepReport, TokenLogprobs

PATIENCE_S = 300.0
"""Seconds for slow events on a busy machine; a failing test waits for as long."""


class Echo:
    """Implements `Learning` without a model."""

    def __init__(self, config: LocalConfig, world: World) -> None:
        self._world = world
        self._tokens = config.micro_batch_tokens
        self.facts = Facts(config.model, world.size, 0)
        print(f"an echo of rank {world.rank}")
        if config.model == "missing" and world.rank == 1:
            raise ContextLengthError(1, 2, 3)

    def step(self, passes: Sequence[LossPass], adam: Adam, model: str) -> StepReport:
        """Add up the ranks' numbers, counted from 1."""
        flat = torch.full((3,), float(self._world.rank + 1))
        self._world.sum(flat)
        refuses = adam.learning_rate == 7 and self._world.rank == 1
        if any(self._world.gather(refuses)):
            raise StepError("rank 1 says no")
        most = float(max(self._world.gather(self._world.rank)))
        return StepReport((float(flat[0]),), (), most, self._tokens or 0)

    def score(self, adapter: Path | None, asks: Sequence[ScoreAsk]) -> list[TokenLogprobs]:
        pids: list[Any] = self._world.gather(os.getpid())
        return pids

    def write_adapter(self, folder: Path, model: str) -> None:
        if self._world.rank == 0:
            raise FileNotFoundError(2, "No such file or directory", str(folder))

    def export_adapter(self, folder: Path, model: str) -> None:
        """Fail on one rank in the middle of a call, as a pass without enough memory does."""
        if self._world.rank == 1:
            raise OutOfStep("left in the middle", budget=7 if folder.name == "full" else None)
        self._world.sum(torch.ones(1))  # which rank 1 never reaches

    def discard(self, model: str) -> None:
        """Make different calls on two ranks."""
        if self._world.rank == 1:
            self._world.gather(None)

    def write_state(self, folder: Path, model: str) -> None:
        """Run a long command."""
        self._world.gather(time.sleep(600) if self._world.rank == 1 else None)

    def read_state(self, folder: Path, model: str) -> None: ...

    def read_adapter(self, folder: Path, model: str) -> None: ...

    def close(self) -> None: ...


def config(folder: Path, ranks: int, **settings: Any) -> LocalConfig:
    defaults: dict[str, Any] = {"rank": 4, "alpha": 8, "threads": 1, "device": "cpu"}
    return LocalConfig(root=folder, ranks=ranks, **(defaults | settings))


@contextmanager
def echoes(folder: Path, ranks: int = 2, **settings: Any) -> Iterator[RankedLearning]:
    """Ranks that only echo."""
    wanted = config(folder, ranks, **({"model": "echo"} | settings))
    learning = RankedLearning(wanted, build=Echo)
    try:
        yield learning
    finally:
        learning.close()


def rank_pids(root: Path) -> list[int]:
    """Ids of the rank processes that live and have this root, in rank order."""
    log = (root / "logs" / "ranks.log").read_text()
    ids = {rank: int(pid) for rank, pid in re.findall(r"Rank (\d+) of .* is process (\d+)", log)}
    return [pid for _, pid in sorted(ids.items()) if alive(pid)]


def alive(pid: int) -> bool:
    """Whether a process lives; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(pids: Sequence[int], seconds: float = PATIENCE_S) -> bool:
    """Whether all processes end within this time."""
    until = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, pids))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _control(folder: Path, ranks: str) -> None:
    """Run a control process that prints its ranks, and waits for its end."""
    with echoes(folder, int(ranks)) as learning:
        try:
            print(*learning.score(None, ()), flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            print(learning.step((), Adam(1.0)).losses[0], flush=True)
        time.sleep(600)


if __name__ == "__main__":
    _control(Path(sys.argv[1]), sys.argv[2])
