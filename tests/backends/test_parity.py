"""The same batch through --backend local and through the SDK and our stand-in: the same numbers.

Both ends are ours, so agreement alone proves little: what each loss is, is checked elsewhere
against full-logit autograd. Here it is that the wire adds nothing and loses nothing.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.backends import VOCABULARY, start_local, start_tinker, tiny_model
from tinker_claw.config.settings import Training
from tinker_claw.learner.diagnostics import agreement, step_metrics
from tinker_claw.methods import build
from tinker_claw.methods.base import Method
from tinker_claw.methods.passes import BatchItem
from tinker_claw.policy import Sampler, Trainer
from tinker_claw.types import (
    Adam,
    HintScores,
    Sample,
    SamplingParams,
    StepReport,
    TokenLogprobs,
    Vote,
)

ADAM = Adam(learning_rate=2e-3)
UNCLIPPED = Adam(learning_rate=2e-3, grad_clip_norm=0.0)
K = 4


def float32(values: tuple[float, ...]) -> tuple[float, ...]:
    """Values rounded to float32, as both ends see them."""
    return tuple(np.asarray(values, np.float32).tolist())


async def batch(sampler: Sampler) -> list[BatchItem]:
    """Sixteen samples: good, bad and hinted ones, replies of different lengths, a few stale."""
    rng = random.Random(3)
    items: list[BatchItem] = []
    for number in range(16):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randrange(5, 60)))
        params = SamplingParams(max_tokens=rng.randrange(3, 20), seed=number, student_topk=K)
        (done,) = await sampler.sample(prompt, params)
        hinted = number % 3 == 0
        reward: Vote | None = None if number % 6 == 0 else rng.choice((-1, 1))
        told = tuple(
            float32(tuple(b + rng.uniform(-2, 2) for b in row)) for row in done.topk_logprobs
        )
        teacher = HintScores(
            hint="shorter",
            logprobs=float32(tuple(q + rng.uniform(-2, 2) for q in done.logprobs)),
            targets=told,
        )
        current = TokenLogprobs(
            start=len(prompt),
            logprobs=float32(tuple(q + rng.uniform(-0.4, 0.4) for q in done.logprobs)),
            targets=tuple(
                float32(tuple(b + rng.uniform(-0.4, 0.4) for b in row))
                for row in done.topk_logprobs
            ),
        )
        sample = Sample(
            id=number,
            turn_id=number,
            session_id=0,
            policy_version=0,
            policy_step=0,
            prompt=prompt,
            completion=done,
            reward=reward,
            teacher=teacher if hinted else None,
        )
        stale = number % 4 == 3
        items.append(BatchItem(sample, current=current if stale else None))
    return items


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Trainer, Trainer]]:
    """Both backends over one model, their adapters drawn from one seed."""
    tiny_model(tmp_path / "model")
    local = await start_local(tmp_path, rank=4, alpha=32)
    remote = await start_tinker(tmp_path, rank=4, alpha=32)
    yield local, remote
    await remote.aclose()
    await local.aclose()


def usable(method: Method, items: list[BatchItem]) -> list[BatchItem]:
    """Items that the method admits."""
    return [
        item
        for item in items
        if (item.sample.reward is not None and method.reward_weight)
        or (item.sample.teacher is not None and method.distill_weight)
    ]


async def adapter(trainer: Trainer, folder: Path) -> dict[str, np.ndarray]:
    await trainer.export_adapter(folder)
    return load_file(folder / "adapter_model.safetensors")


def moments(root: Path) -> dict[str, np.ndarray]:
    """Adam's first moment after the one step, from the newest saved state."""
    (file,) = root.rglob("optimizer.safetensors")
    return {n: t for n, t in load_file(file).items() if n.endswith(".exp_avg")}


def same_report(one: StepReport, other: StepReport) -> None:
    assert other.losses == pytest.approx(one.losses, rel=1e-5, abs=1e-7)
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert other.tokens == one.tokens
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        for row, other_row in zip(mine, theirs, strict=True):
            assert other_row == pytest.approx(row, abs=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "combine",  # its passes are those of all
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("binary", "opd", "sdpo", "sdft")),
    ],
)
async def test_gradients_adapters_and_metrics_are_the_same(
    pair: tuple[Trainer, Trainer], name: str, tmp_path: Path
) -> None:
    local, method = pair[0], build(name)
    items = usable(method, await batch(await local.publish()))
    cfg = Training(opd_topk=K)
    prepared = method.prepare(items, cfg)
    passes = prepared.passes
    assert len(passes) == bool(method.reward_weight) + bool(method.distill_weight)
    start = await adapter(local, tmp_path / "start")
    for trainer in pair:
        await trainer.train_step(passes, UNCLIPPED)
        await trainer.save_state("after one")
    gradients = [moments(tmp_path / root) for root in ("run", "served")]
    assert {n.rsplit("base_model.model.", 1)[-1] for n in gradients[0]} == {
        n.rsplit("base_model.model.", 1)[-1] for n in gradients[1]
    }
    flat = [np.concatenate([g[n].ravel() for n in sorted(g)]) for g in gradients]
    size = np.linalg.norm(flat[0])
    assert size > 0
    assert np.linalg.norm(flat[1] - flat[0]) / size < 1e-6

    for _ in range(2):
        reports = [await trainer.train_step(passes, ADAM) for trainer in pair]
        same_report(*reports)
        one, other = (
            step_metrics(prepared, report, 0, agreement(prepared, report, 0)) for report in reports
        )
        assert other.pop("losses") == pytest.approx(one.pop("losses"), rel=1e-5, abs=1e-7)
        assert [k for k, v in other.items() if v is None] == [
            k for k, v in one.items() if v is None
        ]
        numbers = {name: value for name, value in one.items() if value is not None}
        assert {k: other[k] for k in numbers} == pytest.approx(numbers, rel=1e-5, abs=1e-5)
    ends = [await adapter(t, tmp_path / name) for t, name in zip(pair, ("l", "r"), strict=True)]
    assert ends[0].keys() == ends[1].keys() == start.keys()
    moved = max(float(np.abs(ends[0][n] - start[n]).max()) for n in start)
    assert moved > 1e-3
    assert max(float(np.abs(ends[0][n] - ends[1][n]).max()) for n in start) < 1e-5


async def test_samplers_say_the_same(pair: tuple[Trainer, Trainer]) -> None:
    prompt = tuple(range(10, 40))
    params = SamplingParams(max_tokens=20, seed=7, student_topk=K)
    samplers = [await trainer.publish() for trainer in pair]
    (mine,), (theirs,) = [await sampler.sample(prompt, params) for sampler in samplers]
    assert mine.tokens == theirs.tokens
    assert theirs.logprobs == pytest.approx(mine.logprobs, abs=1e-6)
    assert theirs.topk_ids == mine.topk_ids
    tokens = prompt + mine.tokens
    for targets in (None, mine.topk_ids):
        one, other = [
            await sampler.logprobs(tokens, start=len(prompt), targets=targets, top_k=3)
            for sampler in samplers
        ]
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-6)
        assert other.topk_ids == one.topk_ids
        for row, other_row in zip(one.targets, other.targets, strict=True):
            assert other_row == pytest.approx(row, abs=1e-6)
