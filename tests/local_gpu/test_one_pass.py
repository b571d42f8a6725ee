"""A hinted sample is trained in one pass: its gradient against that of two, ppo and cross_entropy.

Both are written out in float64 over full logits; what the local trainer makes of the one pass is
compared with it, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.local_gpu.learners import Gradient, apart
from tests.local_gpu.test_loss_gradients import RATIOS, gradient
from tests.local_gpu.test_paper import drawn
from tests.support.backends import start_local
from tests.support.local_reference import full_logprobs, reference, warmed
from tinker_claw.config.settings import Gateway, Training
from tinker_claw.methods import BatchItem, build
from tinker_claw.methods.advantages import RATIOS as BOUNDS
from tinker_claw.methods.passes import Advantages, candidates, corrected
from tinker_claw.types import LossPass, TokenLogprobs

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
CFG = Training()


def one_pass(model: Any, passes: Sequence[LossPass]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for one in passes:
        for datum in one.datums:
            rows = full_logprobs(model, datum.tokens)[datum.start - 1 :]
            if one.loss == "ppo":
                total = total + ppo(
                    rows, datum.tokens[datum.start :], datum.logprobs, datum.advantages
                )
            else:
                weights = torch.tensor(datum.weights, dtype=torch.float64)
                total = total - (rows.gather(1, torch.tensor(datum.targets)) * weights).sum()
    return total


def two_passes(model: Any, items: Sequence[BatchItem], found: Sequence[Advantages]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for item, advantages in zip(items, found, strict=True):
        sample, done = item.sample, item.sample.completion
        scale = 1 / (Gateway().max_reply_tokens * len(items))
        rows = full_logprobs(model, sample.prompt + done.tokens)[len(sample.prompt) - 1 :]
        total = total + scale * ppo(rows, done.tokens, done.logprobs, advantages.tokens)
        if advantages.candidates:
            weights = torch.tensor(advantages.candidates, dtype=torch.float64)
            at = rows.gather(1, torch.tensor(candidates(sample)))
            total = total - scale * (at * weights).sum()
    return total


def ppo(
    rows: torch.Tensor, tokens: Sequence[int], old: Sequence[float], advantages: Sequence[float]
) -> torch.Tensor:
    own = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    ratio = (own - torch.tensor(old, dtype=torch.float64)).exp()
    a = torch.tensor(advantages, dtype=torch.float64)
    return -torch.min(a * ratio, a * ratio.clamp(*BOUNDS)).sum()


def grads(model: Any, loss: torch.Tensor) -> Gradient:
    model.zero_grad()
    loss.backward()
    named = ((n.replace(".default.", "."), p.grad) for n, p in model.named_parameters())
    return {name: grad.clone() for name, grad in named if grad is not None}


def scored(model: Any, item: BatchItem, stale: bool) -> BatchItem:
    """Score an item with this very model, as its own reply or as one of an older version."""
    sample, done = item.sample, item.sample.completion
    rows = full_logprobs(model, sample.prompt + done.tokens)[len(sample.prompt) - 1 :].detach()
    own = rows.gather(1, torch.tensor(done.tokens)[:, None])[:, 0].tolist()
    if not stale:
        return BatchItem(replace(sample, completion=replace(done, logprobs=tuple(own))))
    logs = [math.log(ratio) for ratio in RATIOS]
    old = tuple(z - logs[n % len(logs)] for n, z in enumerate(own))
    table = tuple(map(tuple, rows.gather(1, torch.tensor(done.topk_ids)).tolist()))
    now = TokenLogprobs(len(sample.prompt), tuple(own), targets=table)
    return BatchItem(replace(sample, completion=replace(done, logprobs=old)), current=now)


@pytest.mark.parametrize("stale", [False, True])
async def test_one_pass_has_the_gradient_of_two(tmp_path: Path, stale: bool) -> None:
    trainer, method = await warmed(await start_local(tmp_path)), build("combine")
    try:
        samples = await drawn(trainer)
        await trainer.export_adapter(tmp_path / "now")
        exact = reference(tmp_path / "model", tmp_path / "now", torch.float64)
        items = [scored(exact, BatchItem(sample), stale) for sample in samples]
        prepared = method.prepare(items, CFG)
        computed, _ = await gradient(trainer, tmp_path, prepared.passes)
    finally:
        await trainer.aclose()
    found, _ = method.advantages(items, CFG, None)
    each = [corrected(item, one) for item, one in zip(items, found, strict=True)]
    wanted = grads(exact, two_passes(exact, items, each))
    assert apart(grads(exact, one_pass(exact, prepared.passes)), wanted) < 1e-10
    assert apart(computed, wanted) < 1e-5
    hinted = sum(sample.teacher is not None for sample in samples)
    assert [len(one.datums) for one in prepared.passes] == [len(samples) - hinted, hinted]
