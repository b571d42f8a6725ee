"""`--recipe paper`: the gradient of a step against the formulas of OpenClaw-RL (arXiv 2603.10165).

The formulas are written a second time here, over full logits in float64: the verdict is the
advantage of every token; distillation goes over the student's top-k, weighted by softmax, with a
bound on the difference of logprobs; each of the two losses has a clip of its own; the mean over a
reply's tokens, then over the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.local_gpu.learners import Gradient
from tests.local_gpu.test_loss_gradients import gradient
from tests.support.backends import start_local
from tests.support.local_reference import full_logprobs, reference, warmed
from tinker_claw.config.settings import Training
from tinker_claw.methods import BatchItem, build
from tinker_claw.types import HintScores, Sample, SamplingParams, StopReason

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
K, CLIP = 4, 1.0
HINT = (9, 4, 17, 30)
# With and without a hint, of every verdict and of different lengths.
CASES = ((1.0, False, 12), (-1.0, True, 7), (-1.0, False, 9), (None, True, 5), (-1.0, True, 8))


def clipped(advantage: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    return -torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.28))


def papers_loss(model: Any, samples: Sequence[Sample], rewards: float, hints: float) -> Any:
    """sum over the batch of mean_t (w_RL L_RL + w_OPD L_OPD), divided by its size."""
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        done, start = sample.completion, len(sample.prompt)
        rows = full_logprobs(model, sample.prompt + done.tokens)[start - 1 :]
        own = rows.gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
        old = torch.tensor(done.logprobs, dtype=torch.float64)
        reward = torch.tensor(sample.reward or 0.0, dtype=torch.float64)
        loss = rewards * clipped(reward, (own - old).exp())
        if sample.teacher:
            student = torch.tensor(done.topk_logprobs, dtype=torch.float64)
            told = torch.tensor(sample.teacher.targets, dtype=torch.float64)
            gain = student.softmax(-1) * (told - student).clamp(-CLIP, CLIP)
            at = rows.gather(1, torch.tensor(done.topk_ids))
            loss = loss + hints * clipped(gain, (at - student).exp()).sum(-1)
        total = total + loss.mean() / len(samples)
    return total


async def drawn(trainer: Any) -> list[Sample]:
    """Replies of the weights that are trained, with scores of the base under a longer prompt."""
    sampler, base = await trainer.publish(), await trainer.base()
    samples = []
    for number, (reward, hinted, length) in enumerate(CASES):
        prompt = tuple((number * 13 + i * i) % 64 for i in range(10 + number))
        params = SamplingParams(length, seed=number, student_topk=K)
        (cut,) = await sampler.sample(prompt, params)
        done = replace(cut, stop_reason=StopReason.STOP)  # one that is cut is not reinforced
        told = (*prompt, *HINT)
        scores = await base.logprobs(
            told + done.tokens, start=len(told), targets=done.topk_ids, top_k=K
        )
        teacher = HintScores("", scores.logprobs, targets=scores.targets) if hinted else None
        samples.append(Sample(number, number, 0, 0, 0, prompt, done, reward, teacher))
    return samples


def cosine(one: Gradient, other: Gradient) -> float:
    assert one.keys() == other.keys()
    a, b = (torch.cat([g[name].flatten() for name in sorted(g)]) for g in (one, other))
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize(
    ("method", "rewards", "hints"), [("binary", 1, 0), ("opd", 0, 1), ("combine", 1, 1)]
)
async def test_the_papers_recipe_has_the_papers_gradient(
    tmp_path: Path, method: str, rewards: float, hints: float
) -> None:
    trainer = await warmed(await start_local(tmp_path))
    try:
        samples = await drawn(trainer)
        found = dict[str, Gradient]()
        for recipe in ("paper", "default"):
            items = [BatchItem(sample) for sample in samples]
            cfg = Training.model_validate({"recipe": recipe})
            state = await trainer.save_state(recipe)
            prepared = build(method).prepare(items, cfg)
            found[recipe], _ = await gradient(trainer, tmp_path, prepared.passes)
            await trainer.load_state(state)
        exact = reference(tmp_path / "model", tmp_path / "before", torch.float64)
        papers_loss(exact, samples, rewards, hints).backward()
    finally:
        await trainer.aclose()
    named = ((n.replace(".default.", "."), p.grad) for n, p in exact.named_parameters())
    wanted = {name: grad for name, grad in named if grad is not None}
    assert cosine(found["paper"], wanted) == pytest.approx(1.0, abs=1e-6)
    if rewards:
        assert cosine(found["default"], wanted) < 0.99
