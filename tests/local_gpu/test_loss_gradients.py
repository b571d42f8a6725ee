"""Every loss of `local_gpu`: its LoRA gradient against autograd through full logits.

The reference forwards peft's whole model, takes log_softmax over the whole vocabulary, and has the
formulas of Tinker's documentation spelled out; in float64, so that what is left is our rounding.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from local_gpu.trainer import LocalTrainer
from tests.local_gpu.learners import Gradient
from tests.support.backends import start_local
from tests.support.local_reference import (
    RL_LOSSES,
    adapter_of,
    entropy_datum,
    full_logprobs,
    reference,
    reference_loss,
    rl_datum,
    warmed,
)
from tinker_claw.types import Adam, Datum, LossPass, StepReport

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

# Far from the bounds, so that rounding does not decide; both signs of A meet each of them.
RATIOS = (1.0, 2.0, 0.5, 1.15, 0.9)
# A step of -rate g / (|g| + eps), here about -2^20 g: beside it the weights vanish, and the
# gradient can be read off what the step leaves.
RATE, EPS = 2.0**60, 2.0**40
READABLE = Adam(RATE, beta1=0.0, beta2=0.0, eps=EPS, grad_clip_norm=0.0)
ROUNDING = 5e-6
"""Relative rounding error of float32: plain autograd in float32 is up to 1.7e-6 off for one
tensor."""


@pytest.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[LocalTrainer]:
    """A warmed trainer: at B = 0 the gradient of A would be 0."""
    trainer = await warmed(await start_local(tmp_path))
    yield trainer
    await trainer.aclose()


async def at_ratios(trainer: LocalTrainer, datum: Datum) -> Datum:
    """The datum with behaviour logprobs such that the ratios are `RATIOS`, again and again."""
    read = await (await trainer.publish()).logprobs(datum.tokens, start=datum.start)
    logs = torch.tensor(RATIOS, dtype=torch.float64).log().tolist()
    shifted = tuple(z - logs[i % len(logs)] for i, z in enumerate(read.logprobs))
    return replace(datum, logprobs=shifted)


async def gradient(
    trainer: LocalTrainer, folder: Path, passes: Sequence[LossPass]
) -> tuple[Gradient, StepReport]:
    """Gradient of a step, computed from the weights that it leaves in place of those in
    `folder`/before."""
    before = await adapter_of(trainer, folder / "before")
    report = await trainer.train_step(passes, READABLE)
    after = await adapter_of(trainer, folder / "after")
    moved = {name: before[name].double() - after[name].double() for name in before}
    return {name: move * EPS / (RATE - move.abs()) for name, move in moved.items()}, report


def reference_step(model: Any, passes: Sequence[LossPass]) -> tuple[Gradient, list[float]]:
    """Reference gradient, and the loss of every pass."""
    losses = []
    for one in passes:
        rows = [full_logprobs(model, d.tokens)[d.start - 1 :] for d in one.datums]
        loss = sum(reference_loss(one.loss, r, d) for r, d in zip(rows, one.datums, strict=True))
        loss.backward()
        losses.append(loss.item())
    named = ((n.replace(".default.", "."), p.grad) for n, p in model.named_parameters())
    return {name: grad for name, grad in named if grad is not None}, losses


async def passes_of(trainer: LocalTrainer, case: str) -> list[LossPass]:
    one, two = [await at_ratios(trainer, rl_datum(*shape)) for shape in ((40, 25, 2), (30, 1, 3))]
    own = tuple(
        Datum(d.tokens, d.start, weights=tuple((a,) for a in d.advantages)) for d in (one, two)
    )
    soft = (entropy_datum(40, 25, 2), entropy_datum(30, 1, 3))
    made = {name: [LossPass(name, (one, two))] for name in RL_LOSSES}
    made["cross_entropy"] = [LossPass("cross_entropy", own)]
    made["cross_entropy at targets"] = [LossPass("cross_entropy", soft)]
    made["ppo and cross_entropy"] = [LossPass("ppo", (one,)), LossPass("cross_entropy", soft)]
    return made[case]


@pytest.mark.parametrize(
    "case",
    [*RL_LOSSES, "cross_entropy", "cross_entropy at targets", "ppo and cross_entropy"],
)
async def test_the_lora_gradient_is_autograds(
    trainer: LocalTrainer, tmp_path: Path, case: str
) -> None:
    passes = await passes_of(trainer, case)
    got, report = await gradient(trainer, tmp_path, passes)
    exact = reference(tmp_path / "model", tmp_path / "before", torch.float64)
    expected, losses = reference_step(exact, passes)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.norm() > 0
        assert (got[name] - tensor).norm() / tensor.norm() < ROUNDING, name
    norm = torch.cat([tensor.flatten() for tensor in expected.values()]).norm().item()
    assert report.grad_norm == pytest.approx(norm, rel=ROUNDING)
    assert report.losses == pytest.approx(losses, abs=1e-5)
    for one, scores in zip(passes, report.logprobs, strict=True):
        for datum, own in zip(one.datums, scores, strict=True):
            rows = full_logprobs(exact, datum.tokens)[datum.start - 1 :]
            picked = rows[torch.arange(len(rows)), torch.tensor(datum.tokens[datum.start :])]
            assert own == pytest.approx(picked.tolist(), abs=1e-5)
