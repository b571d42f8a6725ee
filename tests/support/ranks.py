"""Ranks for tests: real processes, that echo, learn together, run out of memory, or fall ill.

`FULL` says where memory is full beyond some number of rows: in the forward pass of the second
layer, or in its backward pass. Rank 1 has less room than rank 0.

`build_ill` is given to ranks whose device fails for good, from one of their passes on; the
product's own functions are wrapped from outside. `SICK` names a folder: `words` has the class of
the error and what the device says, `well` how many passes go well before, `ill` how many processes
fall ill, the first ones, and `lives` the ids of all.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from local_gpu.config import LocalConfig
from local_gpu.halves import Facts, Learning, ScoreAsk
from local_gpu.learn.learning import LearningCore
from local_gpu.learn.masters import Masters
from local_gpu.learn.world import OutOfStep, World
from local_gpu.model.files import SavedState, write_state
from local_gpu.model.load import open_base
from local_gpu.model.lora import LoraShape, fresh_adapter
from local_gpu.ranks.rank import build_learner
from local_gpu.ranks.remote import RankedLearning
from local_gpu.tree.body import Body
from tests.support.local_reference import entropy_datum, rl_datum, sequence
from tests.support.waits import alive
from tinker_claw.errors import ContextLengthError, StepError
from tinker_claw.types import Adam, LossPass, StepReport, TokenLogprobs

PATIENCE_S = 300.0
"""Seconds for slow events on a busy machine; a failing test waits for as long."""


class Echo:
    """Implements `Learning` without a model."""

    def __init__(self, config: LocalConfig, world: World) -> None:
        self._world = world
        self._tokens = config.micro_batch_tokens
        self.facts = Facts(world.size, 0)
        print(f"an echo of rank {world.rank}")
        if config.model == "missing" and world.rank == 1:
            raise ContextLengthError(1, 2, 3)

    def step(self, passes: Sequence[LossPass], adam: Adam) -> StepReport:
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

    def write_adapter(self, folder: Path) -> None:
        if self._world.rank == 0:
            raise FileNotFoundError(2, "No such file or directory", str(folder))

    def export_adapter(self, folder: Path) -> None:
        """Fail on one rank in the middle of a call, as a pass without enough memory does."""
        if self._world.rank == 1:
            raise OutOfStep("left in the middle", budget=7 if folder.name == "full" else None)
        self._world.sum(torch.ones(1))  # which rank 1 never reaches

    def write_probe(self, folder: Path, size: float) -> None:
        """Make different calls on two ranks."""
        if self._world.rank == 1:
            self._world.gather(None)

    def write_state(self, folder: Path) -> None:
        """Run a long command."""
        self._world.gather(time.sleep(600) if self._world.rank == 1 else None)

    def read_state(self, folder: Path, moments: bool = True) -> None: ...

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


ADAM = Adam(learning_rate=0.01, grad_clip_norm=0.0, eps=0.01)
"""Adam with an eps against rounding: with a tiny one, a gradient of nothing but rounding would make
a whole step."""
PASSES = (
    LossPass("ppo", tuple(rl_datum(20 + 17 * i, 8 + i, i + 1) for i in range(5))),
    LossPass("cross_entropy", (entropy_datum(33, 20, 9), entropy_datum(70, 50, 4))),
)
"""Passes with seven datums of unequal lengths, several passes for every rank at 90 tokens."""


def one_process(model: Path, root: Path, **settings: Any) -> LearningCore:
    base = open_base(str(model), device="cpu", dtype="auto", threads=1)
    return LearningCore(config(root, 1, model=str(model), **settings), base)


def write_warm(model: Path, folder: Path) -> None:
    """Write a state without moments whose B is not zero, so that A has gradients."""
    base = open_base(str(model), device="cpu", dtype="auto", threads=1)
    shape = LoraShape(4, 8)
    draw = torch.Generator().manual_seed(7)
    fresh = fresh_adapter(base, shape, 0)
    warm = {n: t + 0.02 * torch.randn(t.shape, generator=draw) for n, t in fresh.items()}
    write_state(folder, base, shape, SavedState(warm, {}, 0))


def moments(learning: Learning, folder: Path) -> dict[str, torch.Tensor]:
    learning.write_state(folder)
    return load_file(folder / "optimizer.safetensors")


def gradient(learning: Learning, folder: Path) -> dict[str, torch.Tensor]:
    """Gradient of a first step, unclipped: Adam's first moment is a fixed share of it."""
    return {n: t for n, t in moments(learning, folder).items() if n.endswith(".exp_avg")}


def weights(learning: Learning, folder: Path) -> dict[str, torch.Tensor]:
    learning.write_adapter(folder)
    return load_file(folder / "adapter_model.safetensors")


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest difference, in units of the largest value."""
    assert ours.keys() == theirs.keys()
    scale = max(float(t.abs().max()) for t in theirs.values())
    return max(float((ours[n] - theirs[n]).abs().max()) for n in ours) / scale


def same_report(ours: StepReport, theirs: StepReport) -> None:
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert list(mine) == [pytest.approx(row, abs=1e-5) for row in other]
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
    assert ours.tokens == theirs.tokens


def asks(facts: Facts, count: int = 5) -> list[ScoreAsk]:
    return [ScoreAsk.of(facts, sequence(12 + 9 * i, 3 + i), 6, None, i % 3) for i in range(count)]


def same_scores(ours: Sequence[TokenLogprobs], theirs: Sequence[TokenLogprobs]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert mine.topk_ids == other.topk_ids
        for row, expected in zip(mine.topk_logprobs, other.topk_logprobs, strict=True):
            assert row == pytest.approx(expected, abs=1e-5)


def learn_the_same(one: Learning, many: Learning, folder: Path) -> None:
    """Compare the first step's gradient to 1e-6, the adapter after three to 1e-5, and every
    reported number."""
    same_report(many.step(PASSES, ADAM), one.step(PASSES, ADAM))
    assert apart(gradient(many, folder / "many"), gradient(one, folder / "one")) < 1e-6
    for _ in range(2):
        same_report(many.step(PASSES, ADAM), one.step(PASSES, ADAM))
    assert apart(weights(many, folder / "many3"), weights(one, folder / "one3")) < 1e-5


def score_the_same(one: Learning, many: Learning, folder: Path) -> None:
    """Compare scores under the base, the learning adapter, one published earlier, and the base
    again."""
    for name in ("early", "late"):
        many.write_adapter(folder / name)
        many.step(PASSES, ADAM)
    wanted = asks(one.facts)
    seen: list[Sequence[TokenLogprobs]] = []
    for adapter in (None, folder / "late", folder / "early", None):
        seen.append(many.score(adapter, wanted))
        same_scores(seen[-1], one.score(adapter, wanted))
    assert seen[0] == seen[3]
    assert len({answer[0].logprobs for answer in seen}) == 3  # else nothing was compared


ROOM = (150, 60)
"""Rows that fit, by rank."""


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        ctx.rank = rank
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        check("backward", ctx.rank, grad.shape[1])
        return grad, None


def check(where: str, rank: int, rows: int) -> None:
    if rows > ROOM[rank]:
        print(f"rank {rank} is full, {where}: {rows} rows", flush=True)
        raise torch.OutOfMemoryError("CUDA out of memory, say")


def build_full(config: LocalConfig, world: World) -> LearningCore:
    """Build a learner with little memory."""
    built, where = build_learner(config, world), os.environ["FULL"]
    layer: Any = built._policy.module.base_model.layers[1]

    def look(_: Any, args: tuple[Tensor, ...]) -> Any:
        if where == "forward":
            check(where, world.rank, args[0].shape[1])
        if where == "backward" and args[0].requires_grad:
            return (_Backward.apply(args[0], world.rank), *args[1:])
        return None

    layer.mlp.register_forward_pre_hook(look)
    return built


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


if __name__ == "__main__":
    _control(Path(sys.argv[1]), sys.argv[2])
