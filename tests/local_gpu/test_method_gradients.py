"""Methods through the trainer: the gradient of a step against formulas in float64.

`--recipe paper` is compared with OpenClaw-RL (arXiv 2603.10165): the verdict is the advantage of
every token; distillation goes over the student's top-k, weighted by softmax, with a bound on the
difference of logprobs; each of the two losses has a clip of its own; the mean over a reply's
tokens, then over the batch. A hinted sample is trained in one pass, and compared with two.

`sdpo` and `sdft`: over all of the vocabulary and without a bound the formula is the papers' own,
KL(student || teacher) (arXiv 2601.20802, 2601.19897); with the settings as they are, the one of
docs/methods.md. The teacher is the base without an adapter, behind the words of the method.
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
from tests.support.backends import VOCABULARY, start_local
from tests.support.local_reference import full_logprobs, reference, warmed
from tinker_claw.config.settings import Gateway, Training
from tinker_claw.methods import BatchItem, build
from tinker_claw.methods.advantages import RATIOS as BOUNDS
from tinker_claw.methods.base import Evidence
from tinker_claw.methods.passes import Advantages, candidates, corrected
from tinker_claw.types import (
    HintScores,
    LossPass,
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
RATIOS = (1.0, 1.7, 0.5, 1.15, 0.9, 2.6)
"""Far from the bounds 0.8, 1.28 and 2, so that rounding does not decide."""
SHIFTS = torch.tensor(RATIOS, dtype=torch.float64).log()
CFG = Training()
HINT = (9, 4, 17, 30)
# With and without a hint, of every verdict and of different lengths.
MIXED = ((1.0, False, 12), (-1.0, True, 7), (-1.0, False, 9), (None, True, 5), (-1.0, True, 8))
REJECTED = tuple((-1.0, True, length) for length in (12, 7, 1, 9))


class Taught(NamedTuple):
    """A sample, and the prompt of its teacher."""

    sample: Sample
    teacher_prompt: tuple[int, ...]


async def drawn(
    trainer: LocalTrainer, cases: Sequence[Any], hint: tuple[int, ...], k: int, *, own: bool = False
) -> list[Taught]:
    """Replies of the weights that are trained, scored by the base behind a hint.

    Args:
        own: whether the teacher's own candidates are scored, too.
    """
    sampler, base = await trainer.publish(), await trainer.base()
    samples: list[Taught] = []
    for number, (reward, hinted, length) in enumerate(cases):
        prompt = tuple((number * 13 + i * i) % VOCABULARY for i in range(10 + number))
        params = SamplingParams(length, seed=number, student_topk=k)
        (cut,) = await sampler.sample(prompt, params)
        done = replace(cut, stop_reason=StopReason.STOP)  # one that is cut is not reinforced
        behind = (*prompt, *hint)
        scores = await base.logprobs(
            behind + done.tokens, start=len(behind), targets=done.topk_ids, top_k=k
        )
        teacher = HintScores("", scores.logprobs, targets=scores.targets)
        if own:
            logprobs = scores.topk_logprobs
            teacher = replace(teacher, topk_ids=scores.topk_ids, topk_logprobs=logprobs)
        teaches = teacher if hinted else None
        samples.append(
            Taught(Sample(number, number, 0, 0, 0, prompt, done, reward, teaches), behind)
        )
    return samples


def doubles(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rows_of(model: Any, prompt: Sequence[int], reply: Sequence[int]) -> Tensor:
    """[T, vocabulary] logprobs of a reply's positions."""
    return full_logprobs(model, (*prompt, *reply))[len(prompt) - 1 :]


def student(model: Any, sample: Sample) -> tuple[Tensor, Tensor]:
    """Logprobs over the vocabulary, and of the reply's own tokens."""
    rows = rows_of(model, sample.prompt, sample.completion.tokens)
    return rows, rows.gather(1, torch.tensor(sample.completion.tokens)[:, None])[:, 0]


def clipped(advantage: Tensor, ratio: Tensor) -> Tensor:
    return -torch.min(advantage * ratio, advantage * ratio.clamp(*BOUNDS))


def grads(model: Any, loss: Tensor) -> Gradient:
    model.zero_grad()
    loss.backward()
    named = ((n.replace(".default.", "."), p.grad) for n, p in model.named_parameters())
    return {name: grad.clone() for name, grad in named if grad is not None}


def cosine(first: Gradient, second: Gradient) -> float:
    a, b = (torch.cat([g[name].flatten() for name in first]) for g in (first, second))
    return float(a @ b / (a.norm() * b.norm()))


# The paper's recipe


def papers_loss(model: Any, samples: Sequence[Sample], rewards: float, hints: float) -> Tensor:
    """sum over the batch of mean_t (w_RL L_RL + w_OPD L_OPD), divided by its size."""
    total = doubles(0.0)
    for sample in samples:
        done = sample.completion
        rows, own = student(model, sample)
        reward = doubles(sample.reward or 0.0)
        loss = rewards * clipped(reward, (own - doubles(done.logprobs)).exp())
        if sample.teacher:
            before = doubles(done.topk_logprobs)
            gain = before.softmax(-1) * (doubles(sample.teacher.targets) - before).clamp(-1, 1)
            at = rows.gather(1, torch.tensor(done.topk_ids))
            loss = loss + hints * clipped(gain, (at - before).exp()).sum(-1)
        total = total + loss.mean() / len(samples)
    return total


@pytest.mark.parametrize(
    ("method", "rewards", "hints"), [("binary", 1, 0), ("opd", 0, 1), ("combine", 1, 1)]
)
async def test_the_papers_recipe_has_the_papers_gradient(
    tmp_path: Path, method: str, rewards: float, hints: float
) -> None:
    trainer = await warmed(await start_local(tmp_path))
    try:
        samples = [taught.sample for taught in await drawn(trainer, MIXED, HINT, 4)]
        computed = dict[str, Gradient]()
        for recipe in ("paper", "default"):
            items = [BatchItem(sample) for sample in samples]
            cfg = Training.model_validate({"recipe": recipe})
            state = await trainer.save_state(recipe)
            prepared = build(method).prepare(items, cfg)
            computed[recipe], _ = await gradient(trainer, tmp_path, prepared.passes)
            await trainer.load_state(state)
        exact = reference(tmp_path / "model", tmp_path / "before", torch.float64)
        wanted = grads(exact, papers_loss(exact, samples, rewards, hints))
    finally:
        await trainer.aclose()
    assert cosine(computed["paper"], wanted) == pytest.approx(1.0, abs=1e-6)
    if rewards:
        assert cosine(computed["default"], wanted) < 0.99


# A hinted sample in one pass


def one_pass(model: Any, passes: Sequence[LossPass]) -> Tensor:
    total = doubles(0.0)
    for each in passes:
        for datum in each.datums:
            rows = full_logprobs(model, datum.tokens)[datum.start - 1 :]
            if each.loss == "ppo":
                own = rows.gather(1, torch.tensor(datum.tokens[datum.start :])[:, None])[:, 0]
                ratio = (own - doubles(datum.logprobs)).exp()
                total = total + clipped(doubles(datum.advantages), ratio).sum()
            else:
                at = rows.gather(1, torch.tensor(datum.targets))
                total = total - (at * doubles(datum.weights)).sum()
    return total


def two_passes(model: Any, items: Sequence[BatchItem], raw: Sequence[Advantages]) -> Tensor:
    total = doubles(0.0)
    for item, advantages in zip(items, raw, strict=True):
        sample, done = item.sample, item.sample.completion
        rows, own = student(model, sample)
        ratio = (own - doubles(done.logprobs)).exp()
        loss = clipped(doubles(advantages.tokens), ratio).sum()
        if advantages.candidates:
            at = rows.gather(1, torch.tensor(candidates(sample)))
            loss = loss - (at * doubles(advantages.candidates)).sum()
        total = total + loss / (Gateway().max_reply_tokens * len(items))
    return total


def scored(model: Any, sample: Sample, stale: bool) -> BatchItem:
    """Score a sample with this very model, as its own reply or as one of an older version."""
    done = sample.completion
    rows, own = (rows.detach() for rows in student(model, sample))
    if not stale:
        return BatchItem(replace(sample, completion=replace(done, logprobs=tuple(own.tolist()))))
    old = own - SHIFTS[torch.arange(len(own)) % len(SHIFTS)]
    table = tuple(map(tuple, rows.gather(1, torch.tensor(done.topk_ids)).tolist()))
    now = TokenLogprobs(len(sample.prompt), tuple(own.tolist()), targets=table)
    aged = replace(sample, completion=replace(done, logprobs=tuple(old.tolist())))
    return BatchItem(aged, current=now)


@pytest.mark.parametrize("stale", [False, True])
async def test_one_pass_has_the_gradient_of_two(tmp_path: Path, stale: bool) -> None:
    trainer, method = await warmed(await start_local(tmp_path)), build("combine")
    try:
        samples = [taught.sample for taught in await drawn(trainer, MIXED, HINT, 4)]
        await trainer.export_adapter(tmp_path / "now")
        exact = reference(tmp_path / "model", tmp_path / "now", torch.float64)
        items = [scored(exact, sample, stale) for sample in samples]
        prepared = method.prepare(items, CFG)
        computed, _ = await gradient(trainer, tmp_path, prepared.passes)
    finally:
        await trainer.aclose()
    raw, _ = method.advantages(items, CFG, None)
    each = [corrected(*pair) for pair in zip(items, raw, strict=True)]
    wanted = grads(exact, two_passes(exact, items, each))
    assert apart(grads(exact, one_pass(exact, prepared.passes)), wanted) < 1e-10
    assert apart(computed, wanted) < 1e-5
    hinted = sum(sample.teacher is not None for sample in samples)
    assert [len(each.datums) for each in prepared.passes] == [len(samples) - hinted, hinted]


# Self-distillation


def both(model: Any, taught: Taught) -> tuple[Tensor, Tensor]:
    """The student's logprobs, with gradients, and the teacher's, (T, vocabulary) each."""
    with torch.no_grad(), model.disable_adapter():
        teacher = rows_of(model, taught.teacher_prompt, taught.sample.completion.tokens)
    return student(model, taught.sample)[0], teacher


def divergence(model: Any, batch: Sequence[Taught]) -> Tensor:
    """KL(student || teacher) at every position: the mean over a reply, over the batch."""
    total = doubles(0.0)
    for taught in batch:
        own, teacher = both(model, taught)
        total = total + (own.exp() * (own - teacher)).sum(-1).mean() / len(batch)
    return total


def documented(model: Any, items: Sequence[BatchItem], batch: Sequence[Taught]) -> Tensor:
    """The formulas of docs/methods.md, as a loss whose ratios are those of the model itself."""
    total = doubles(0.0)
    bound = math.log(1.28)
    for item, taught in zip(items, batch, strict=True):
        done = item.sample.completion
        rows, teacher = both(model, taught)
        own = torch.tensor(done.topk_ids)
        before = doubles(done.topk_logprobs)
        gain = before.softmax(-1) * (teacher.gather(1, own) - before).clamp(-1, 1)
        ratio = (rows.gather(1, own) - before).exp()
        kept = torch.where(ratio.detach() > 2, 0.0, gain)
        loss = clipped(kept, ratio).sum(-1)
        # The teacher's own, of which the student proposed none of those that count.
        best = teacher.topk(own.shape[1]).indices
        new = ~(best[:, :, None] == own[:, None]).any(-1)
        least = before.min(-1, keepdim=True).values
        pull = teacher.gather(1, best)
        pull = pull.exp() * (pull - least).clamp(0, 1) * new
        now = rows.gather(1, best)
        if item.current is not None:
            pull = torch.where(now.detach() <= least + bound, pull, 0.0)
        loss = loss - (pull * now).sum(-1)
        total = total + loss.sum() / (Gateway().max_reply_tokens * len(items))
    return total


def aged(model: Any, sample: Sample) -> BatchItem:
    """The sample as that of an older version, scored by this model."""
    done, teacher = sample.completion, sample.teacher
    assert teacher is not None
    rows, own = (rows.detach() for rows in student(model, sample))
    at = rows.gather(1, torch.tensor(done.topk_ids))
    before = at - SHIFTS[torch.arange(at.numel()).reshape(at.shape) % len(SHIFTS)]
    ids = [a + b for a, b in zip(done.topk_ids, teacher.topk_ids, strict=True)]
    now = rows.gather(1, torch.tensor(ids)).tolist()
    current = TokenLogprobs(len(sample.prompt), tuple(own.tolist()), targets=tuple(map(tuple, now)))
    older = replace(done, topk_logprobs=tuple(map(tuple, before.tolist())))
    return BatchItem(replace(sample, completion=older), current=current)


async def trained(
    folder: Path, name: str, cfg: Training, *, stale: bool = False
) -> tuple[Gradient, Any, list[BatchItem], list[Taught]]:
    """Gradient of a step, the model in float64 that it was taken with, and the batch."""
    trainer, method = await warmed(await start_local(folder)), build(name)
    assert method.teaching is not None
    correction = NextState("user", "No, shorter, please.")
    (text,) = method.teaching.tells(Evidence(Verdict((-1,), -1), (), correction, "A short one."))
    words = method.teaching.words.format(hint=text)
    hint = tuple(ord(sign) % VOCABULARY for sign in words)
    try:
        batch = await drawn(trainer, REJECTED, hint, cfg.opd_topk, own=True)
        await trainer.export_adapter(folder / "now")
        exact = reference(folder / "model", folder / "now", torch.float64)
        items = [
            aged(exact, taught.sample) if stale else BatchItem(taught.sample) for taught in batch
        ]
        prepared = method.prepare(items, cfg)
        assert [each.loss for each in prepared.passes] == ["cross_entropy"], "no reward is trained"
        computed, _ = await gradient(trainer, folder, prepared.passes)
    finally:
        await trainer.aclose()
    return computed, exact, items, batch


METHODS = pytest.mark.parametrize("name", ["sdpo", "sdft"])


@METHODS
async def test_over_the_whole_vocabulary_and_unbounded_it_is_the_papers_gradient(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_claw.methods.passes.DISTILLED_NATS", 0.0)
    cfg = Training(opd_topk=VOCABULARY, recipe="paper")
    computed, exact, _, batch = await trained(tmp_path, name, cfg)
    assert apart(computed, grads(exact, divergence(exact, batch))) < 1e-5


@METHODS
@pytest.mark.parametrize("stale", [False, True])
async def test_as_it_is_set_it_has_the_documented_gradient(
    tmp_path: Path, name: str, stale: bool
) -> None:
    computed, exact, items, batch = await trained(tmp_path, name, CFG, stale=stale)
    assert apart(computed, grads(exact, documented(exact, items, batch))) < 1e-5
    assert cosine(computed, grads(exact, divergence(exact, batch))) < 0.99
