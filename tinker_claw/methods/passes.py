"""Turn advantages into loss passes: corrections for the current weights, and normalisation.

`Method.prepare` (base.py) calls, in this order: `batch_advantages` compares rewards, one number a
sample; `spread` puts it on the reply's tokens and adds what the teacher says; `corrected` bounds
both where the reply is stale; `loss_passes` makes the datums. The formulas are in advantages.py.

Rule: all normalisation is put into the advantages here, since every loss of a backend is a sum over
tokens and datums. So the result does not depend on how a backend splits the batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinker_claw.config.settings import Training
from tinker_claw.errors import AlignmentError
from tinker_claw.methods.advantages import (
    RATIOS,
    group_advantages,
    keep_bounded,
    reward_advantages,
    spread_reward,
    stale_weight,
    token_advantages,
    topk_advantages,
    unproposed_advantages,
)
from tinker_claw.types import Datum, Images, JudgedBy, LossPass, Sample, TokenLogprobs

DISTILLED_NATS = 1.0
"""Bound on the teacher's logprob minus the student's, in nats, of both recipes; 0: none."""


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A sample with the scores known at the time of the step."""

    sample: Sample
    current: TokenLogprobs | None = None
    """Scores of the reply under the newest policy; None: that policy sampled it, so rho = 1."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of one reply in a step, before normalisation."""

    sample: float
    """Advantage of the whole reply, from its reward."""
    tokens: Sequence[float]
    """(T,) advantage of each sampled token, in the ppo pass."""
    candidates: Sequence[Sequence[float]] = ()
    """[T, K] weights of the ids that `candidates` returns, in the cross_entropy pass; (): the reply
    is not in that pass."""
    written: float = 0.0
    """Weight of the reply that the teacher wrote, in the cross_entropy pass; 0: it wrote none."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch with its advantages, computed once, to be trained and stored."""

    items: Sequence[BatchItem]
    stored: Sequence[tuple[int, float, Sequence[float]]]
    """Id, advantage and (T,) `sampled_advantages` of each sample."""
    passes: Sequence[LossPass]
    state: str | None
    """JSON from which the method continues after this step; None: it has no state."""


def sampled_advantages(sample: Sample, advantages: Advantages) -> Sequence[float]:
    """Return the (T,) advantages of the sampled tokens, including the cross_entropy weight where a
    token is among its own candidates."""
    if not advantages.candidates:
        return advantages.tokens
    rows = zip(candidates(sample), advantages.candidates, strict=True)
    return [
        a + sum(w for v, w in zip(*row, strict=True) if v == token)
        for token, a, row in zip(sample.completion.tokens, advantages.tokens, rows, strict=True)
    ]


def batch_advantages(samples: Sequence[Sample], cfg: Training) -> list[float]:
    """Return the (B,) reward advantages of a batch: grouped samples compared within their groups,
    the others with those of the same judge, so that what one rejects does not praise what another
    has judged."""
    by = defaultdict[JudgedBy | None, list[Sample]](list)
    for sample in samples:
        by[sample.judge if sample.bucket is None else None].append(sample)
    by_id = dict[int, float]()
    for judge, judged in by.items():
        rewards = [member.reward for member in judged]
        if judge is None:  # grouped
            compared = group_advantages(rewards, [member.bucket for member in judged])
        elif cfg.recipe == "paper":
            compared = [reward or 0.0 for reward in rewards]
        else:
            weights, cut = [member.weight for member in judged], [member.cut for member in judged]
            compared = reward_advantages(rewards, weights, cut)
        by_id |= zip([member.id for member in judged], compared, strict=True)
    return [by_id[sample.id] for sample in samples]


def spread(sample: Sample, advantage: float, teacher_weight: float, cfg: Training) -> Advantages:
    """Apply an advantage to every token of its reply, and add the teacher's.

    A reply beside which the teacher wrote a better one is not pushed down.

    Args:
        advantage: of the reply, from its reward, times the weight of rewards.
        teacher_weight: weight of what the teacher says.
    """
    done, teacher, paper = sample.completion, sample.teacher, cfg.recipe == "paper"
    if teacher is not None and teacher.reply and teacher_weight and not paper:
        kept = max(0.0, advantage)
        return Advantages(kept, [kept] * len(done.tokens), written=teacher_weight)
    tokens = [advantage] * len(done.tokens) if paper else spread_reward(advantage, done.logprobs)
    if teacher is None or teacher.reply or not teacher_weight:  # written before a restart
        return Advantages(advantage, tokens)
    if cfg.opd_mode == "token" or not teacher.targets:  # it was sampled with --opd-topk 0
        hinted = token_advantages(teacher.logprobs, done.logprobs, DISTILLED_NATS)
        return Advantages(
            advantage, [a + teacher_weight * h for a, h in zip(tokens, hinted, strict=True)]
        )
    if len(teacher.targets) != len(done.topk_logprobs):
        raise AlignmentError(f"sample {sample.id}: the teacher did not score every position")
    table = list[list[float]]()
    for at, own in enumerate(done.topk_logprobs):
        row = topk_advantages(teacher.targets[at], own, DISTILLED_NATS)
        if teacher.topk_ids:  # 0 for one that is already the student's
            new = unproposed_advantages(teacher.topk_logprobs[at], min(own), DISTILLED_NATS)
            named = zip(teacher.topk_ids[at], new, strict=True)
            row += [0.0 if v in done.topk_ids[at] else a for v, a in named]
        table.append([teacher_weight * weight for weight in row])
    return Advantages(advantage, tokens, table)


def candidates(sample: Sample) -> tuple[tuple[int, ...], ...]:
    """Return the [T, K] candidate ids that distillation may move at each token: the student's, then
    the teacher's, which may coincide."""
    own = sample.completion.topk_ids
    teachers = sample.teacher.topk_ids if sample.teacher else ()
    return tuple(a + b for a, b in zip(own, teachers, strict=True)) if teachers else own


def corrected(item: BatchItem, advantages: Advantages) -> Advantages:
    """Bound the advantages where the reply was rescored under the newest policy."""
    own, tokens, table = item.sample.completion.logprobs, advantages.tokens, advantages.candidates
    if item.current is not None:
        tokens = keep_bounded(tokens, item.current.logprobs, own)
        table = [_bounded(item, item.current, at, row) for at, row in enumerate(table)]
    return replace(advantages, tokens=tokens, candidates=table)


def _bounded(item: BatchItem, current: TokenLogprobs, at: int, row: Sequence[float]) -> list[float]:
    """Return the (K,) weights of the candidates at one position of a stale sample."""
    own, now = item.sample.completion.topk_logprobs[at], current.targets[at]
    weights = [stale_weight(a, c, b) for a, c, b in zip(row, now, own, strict=False)]
    # The student's logprobs of the teacher's candidates are unknown: a bound replaces the ratio.
    most = min(own) + math.log(RATIOS[1])
    new = zip(row[len(own) :], now[len(own) :], strict=True)
    return weights + [a if c <= most else 0.0 for a, c in new]


def loss_passes(
    items: Sequence[BatchItem], per_item: Sequence[Advantages], cfg: Training, reply_tokens: int
) -> list[LossPass]:
    """Build the passes of one step; a datum that carries no gradient is left out.

    A sample with candidates is in the cross_entropy pass only, and its prompt is computed once: its
    sampled tokens are one more candidate, with A rho as their weight. That is the gradient of ppo,
    -A rho grad(log pi) inside the bounds; rho = 1 where the policy that is trained sampled them.

    Each sample is divided by T_max B (Dr. GRPO, arXiv 2503.20783), in the paper's recipe by T_i B.

    Args:
        reply_tokens: T_max, the most tokens of a reply, the same for every batch.
    """
    ppo, cross_entropy = list[Datum](), list[Datum]()
    for item, advantages in zip(items, per_item, strict=True):
        sample, done = item.sample, item.sample.completion
        length = len(done.tokens) if cfg.recipe == "paper" else reply_tokens
        scale = 1.0 / (length * len(items))
        if advantages.candidates:
            cross_entropy.append(_candidates_datum(item, advantages, scale))
        elif any(advantages.tokens):
            moved = tuple(scale * a for a in advantages.tokens)
            ppo.append(
                Datum(
                    sample.prompt + done.tokens,
                    len(sample.prompt),
                    logprobs=done.logprobs,
                    advantages=moved,
                    images=sample.images,
                )
            )
        if advantages.written and (teacher := sample.teacher) is not None:
            cross_entropy.append(
                imitation(
                    sample.prompt,
                    teacher.reply,
                    teacher.topk_ids,
                    teacher.topk_logprobs,
                    scale * advantages.written,
                    sample.images,
                )
            )
    low, high = RATIOS
    bounds = {"clip_low_threshold": low, "clip_high_threshold": high}
    passes = [
        LossPass("ppo", tuple(ppo), bounds),
        LossPass("cross_entropy", tuple(cross_entropy)),
    ]
    return [loss_pass for loss_pass in passes if loss_pass.datums]


def _candidates_datum(item: BatchItem, advantages: Advantages, scale: float) -> Datum:
    """Return the reply with the weights of its candidates, and A rho of its sampled tokens."""
    sample, done = item.sample, item.sample.completion
    weights, targets = advantages.candidates, candidates(sample)
    if any(advantages.tokens):
        own = advantages.tokens
        if item.current is not None:  # 0 where the ratio's bounds cut it off
            rows = zip(own, item.current.logprobs, done.logprobs, strict=True)
            own = [stale_weight(a, now, then) for a, now, then in rows]
        weights = [(*row, a) for row, a in zip(weights, own, strict=True)]
        targets = tuple((*ids, v) for ids, v in zip(targets, done.tokens, strict=True))
    return Datum(
        sample.prompt + done.tokens,
        len(sample.prompt),
        targets=targets,
        weights=tuple(tuple(scale * a for a in row) for row in weights),
        images=sample.images,
    )


def imitation(
    prompt: tuple[int, ...],
    reply: tuple[int, ...],
    topk_ids: tuple[tuple[int, ...], ...],
    topk_logprobs: tuple[tuple[float, ...], ...],
    scale: float,
    images: Images = (),
) -> Datum:
    """Return a teacher's reply behind a prompt without what it was told: a forward KL divergence
    over its candidates, or over the sampled tokens where there are none."""
    rows = tuple(tuple(scale * math.exp(p) for p in row) for row in topk_logprobs)
    weights = rows or ((scale,),) * len(reply)
    return Datum(prompt + reply, len(prompt), targets=topk_ids, weights=weights, images=images)
