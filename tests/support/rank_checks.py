"""Checks that processes that learn together give the same results as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from local_gpu.halves import Facts, Learning, ScoreAsk
from local_gpu.learn.learning import LearningCore
from local_gpu.model.files import SavedState, write_state
from local_gpu.model.load import open_base
from local_gpu.model.lora import LoraShape, fresh_adapter
from tests.support.local_reference import entropy_datum, rl_datum, sequence
from tests.support.rank_runs import config
from tinker_claw.types import Adam, LossPass, StepReport, TokenLogprobs

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
