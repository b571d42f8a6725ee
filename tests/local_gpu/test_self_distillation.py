"""`sdpo` and `sdft`: the gradient of a step against formulas in float64, over full logits.

What the teacher gives is computed a second time, too: by the base without an adapter, behind the
words of the method. Over all of the vocabulary and without a bound the formula is the papers' own,
KL(student || teacher) (arXiv 2601.20802, 2601.19897); with the settings as they are, the one of
docs/methods.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from local_gpu.trainer import LocalTrainer
from tests.local_gpu.learners import Gradient, apart
from tests.local_gpu.test_loss_gradients import gradient
from tests.local_gpu.test_one_pass import grads
from tests.local_gpu.test_paper import cosine
from tests.support.backends import VOCABULARY, start_local
from tests.support.local_reference import full_logprobs, reference, warmed
from tinker_claw.config.settings import Gateway, Training
from tinker_claw.methods import BatchItem, build
from tinker_claw.methods.base import Evidence, Method
from tinker_claw.types import (
    HintScores,
    NextState,
    Sample,
    SamplingParams,
    StopReason,
    TokenLogprobs,
    Verdict,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
METHODS = pytest.mark.parametrize("name", ["sdpo", "sdft"])
LENGTHS = (12, 7, 1, 9)
RATIOS = (1.0, 1.7, 0.5, 1.15, 0.9, 2.6)
"""Far from the bounds 0.8, 1.28 and 2, so that rounding does not decide."""
REJECTED = Evidence(
    Verdict((-1,), -1), (), NextState("user", "No, shorter, please."), "A short one."
)


class Taught(NamedTuple):
    """A sample, and the prompt of its teacher."""

    sample: Sample
    told: tuple[int, ...]


def words_of(method: Method) -> tuple[int, ...]:
    """What the method tells the teacher of a rejected reply, as tokens of the tiny model."""
    assert method.teaching is not None
    (text,) = method.teaching.tells(REJECTED)
    return tuple(ord(sign) % VOCABULARY for sign in method.teaching.words.format(hint=text))


async def drawn(trainer: LocalTrainer, method: Method, k: int) -> list[Taught]:
    """Rejected replies of the weights that are trained, scored as the learner has them scored."""
    sampler, base = await trainer.publish(), await trainer.base()
    found: list[Taught] = []
    for number, length in enumerate(LENGTHS):
        prompt = tuple((number * 13 + i * i) % VOCABULARY for i in range(10 + number))
        params = SamplingParams(length, seed=number, student_topk=k)
        (cut,) = await sampler.sample(prompt, params)
        done = replace(cut, stop_reason=StopReason.STOP)
        told = (*prompt, *words_of(method))
        scores = await base.logprobs(
            told + done.tokens, start=len(told), targets=done.topk_ids, top_k=k
        )
        teacher = HintScores(
            "",
            scores.logprobs,
            targets=scores.targets,
            topk_ids=scores.topk_ids,
            topk_logprobs=scores.topk_logprobs,
        )
        sample = Sample(number, number, 0, 0, 0, prompt, done, -1.0, teacher)
        found.append(Taught(sample, told))
    return found


def rows_of(model: Any, prompt: Sequence[int], reply: Sequence[int]) -> Tensor:
    """[T, vocabulary] logprobs of a reply's positions."""
    return full_logprobs(model, (*prompt, *reply))[len(prompt) - 1 :]


def both(model: Any, one: Taught) -> tuple[Tensor, Tensor]:
    """The student's logprobs, with gradients, and the teacher's, (T, vocabulary) each."""
    with torch.no_grad(), model.disable_adapter():
        teacher = rows_of(model, one.told, one.sample.completion.tokens)
    return rows_of(model, one.sample.prompt, one.sample.completion.tokens), teacher


def papers_loss(model: Any, batch: Sequence[Taught]) -> Tensor:
    """KL(student || teacher) at every position: the mean over a reply, over the batch."""
    total = torch.zeros((), dtype=torch.float64)
    for one in batch:
        student, teacher = both(model, one)
        total = total + (student.exp() * (student - teacher)).sum(-1).mean() / len(batch)
    return total


def our_loss(model: Any, items: Sequence[BatchItem], batch: Sequence[Taught]) -> Tensor:
    """The formulas of docs/methods.md, as a loss whose ratios are those of the model itself."""
    total = torch.zeros((), dtype=torch.float64)
    bound = math.log(1.28)
    for item, one in zip(items, batch, strict=True):
        done = item.sample.completion
        student, teacher = both(model, one)
        own = torch.tensor(done.topk_ids)
        before = torch.tensor(done.topk_logprobs, dtype=torch.float64)
        gain = before.softmax(-1) * (teacher.gather(1, own) - before).clamp(-1, 1)
        ratio = (student.gather(1, own) - before).exp()
        kept = torch.where(ratio.detach() > 2, 0.0, gain)
        loss = -torch.min(kept * ratio, kept * ratio.clamp(0.8, 1.28)).sum(-1)
        # The teacher's own, of which the student proposed none of those that count.
        best = teacher.topk(own.shape[1]).indices
        new = ~(best[:, :, None] == own[:, None]).any(-1)
        least = before.min(-1, keepdim=True).values
        pull = teacher.gather(1, best)
        pull = pull.exp() * (pull - least).clamp(0, 1) * new
        now = student.gather(1, best)
        if item.current is not None:
            pull = torch.where(now.detach() <= least + bound, pull, 0.0)
        loss = loss - (pull * now).sum(-1)
        total = total + loss.sum() / (Gateway().max_reply_tokens * len(items))
    return total


def as_of(model: Any, one: Taught, *, stale: bool) -> BatchItem:
    """The sample as this very model's own, or as that of an older version, scored by this one."""
    sample = one.sample
    if not stale:
        return BatchItem(sample)
    done = sample.completion
    student = rows_of(model, sample.prompt, done.tokens).detach()
    own = student.gather(1, torch.tensor(done.topk_ids))
    moved = torch.tensor(RATIOS, dtype=torch.float64).log()
    shifts = moved[torch.arange(own.numel()).reshape(own.shape) % len(moved)]
    before = tuple(map(tuple, (own - shifts).tolist()))
    ids = done.topk_ids
    if sample.teacher is not None:
        ids = tuple(a + b for a, b in zip(ids, sample.teacher.topk_ids, strict=True))
    now = student.gather(1, torch.tensor(ids))
    chosen = student.gather(1, torch.tensor(done.tokens)[:, None])[:, 0].tolist()
    current = TokenLogprobs(
        len(sample.prompt), tuple(chosen), targets=tuple(map(tuple, now.tolist()))
    )
    aged = replace(sample, completion=replace(done, topk_logprobs=before))
    return BatchItem(aged, current=current)


async def trained(
    folder: Path, name: str, cfg: Training, *, stale: bool = False
) -> tuple[Gradient, Any, list[BatchItem], list[Taught]]:
    """Gradient of a step, the model in float64 that it was taken with, and the batch."""
    trainer, method = await warmed(await start_local(folder)), build(name)
    try:
        batch = await drawn(trainer, method, cfg.opd_topk)
        await trainer.export_adapter(folder / "now")
        exact = reference(folder / "model", folder / "now", torch.float64)
        items = [as_of(exact, one, stale=stale) for one in batch]
        prepared = method.prepare(items, cfg)
        assert [one.loss for one in prepared.passes] == ["cross_entropy"], "no reward is trained"
        found, _ = await gradient(trainer, folder, prepared.passes)
    finally:
        await trainer.aclose()
    return found, exact, items, batch


@METHODS
async def test_over_the_whole_vocabulary_and_unbounded_it_is_the_papers_gradient(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_claw.methods.passes.DISTILLED_NATS", 0.0)
    cfg = Training(opd_topk=VOCABULARY, recipe="paper")
    found, exact, _, batch = await trained(tmp_path, name, cfg)
    wanted = grads(exact, papers_loss(exact, batch))
    assert cosine(found, wanted) == pytest.approx(1.0, abs=1e-6)
    assert apart(found, wanted) < 1e-5


@METHODS
@pytest.mark.parametrize("stale", [False, True])
async def test_as_it_is_set_it_has_the_documented_gradient(
    tmp_path: Path, name: str, stale: bool
) -> None:
    found, exact, items, batch = await trained(tmp_path, name, Training(), stale=stale)
    wanted = grads(exact, our_loss(exact, items, batch))
    assert cosine(found, wanted) == pytest.approx(1.0, abs=1e-6)
    assert apart(found, wanted) < 1e-5
    assert cosine(found, grads(exact, papers_loss(exact, batch))) < 0.99
