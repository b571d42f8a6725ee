"""From samples to loss passes: where advantages, weights and normalisation meet.

Rule: every loss of a backend is a sum over tokens and datums, so all normalisation is put into the
advantages here, and the result does not depend on how a backend splits the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tinker_claw.config.settings import Training
from tinker_claw.errors import AlignmentError
from tinker_claw.methods.advantages import (
    TOOL_SUCCESS,
    group_advantages,
    keep_bounded,
    kl_advantages,
    may_push,
    reward_advantages,
    stale_weight,
    token_advantages,
    topk_advantages,
)
from tinker_claw.types import Datum, LossPass, Sample, TokenLogprobs


class Rewarded(Protocol):
    """What of a sample decides its advantage: see `Sample`."""

    @property
    def reward(self) -> float | None: ...
    @property
    def bucket(self) -> tuple[int, int] | None: ...
    @property
    def tool(self) -> bool: ...
    @property
    def cut(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A sample, and what is known of it at the moment of the step."""

    sample: Sample
    current: TokenLogprobs | None = None
    """Scores of the reply under the newest policy; None: it sampled it, so rho = 1."""
    reference: tuple[float, ...] | None = None
    """[T] base logprobs of the reply; needed when the KL weight is above 0."""


@dataclass(frozen=True, slots=True)
class Weights:
    """How much the two signals count. 0 leaves one out."""

    reward: float
    distill: float


def build_passes(
    items: Sequence[BatchItem], weights: Weights, cfg: Training, reply_tokens: int
) -> list[LossPass]:
    """The passes of one step. `reply_tokens`: what a reply may have at most, for norm = constant.

    Reward, token distillation and KL go as one ppo pass with summed advantages. Top-k distillation
    goes as a cross_entropy pass with signed weights. A datum that carries no gradient is left out.
    """
    topk = cfg.opd_mode == "topk" and weights.distill > 0
    scales = _scales(items, cfg, reply_tokens)
    rewards = reward_parts([item.sample for item in items], cfg)
    ppo: list[Datum] = []
    cross_entropy: list[Datum] = []
    for item, reward, scale in zip(items, rewards, scales, strict=True):
        advantages = _summed(item, weights.reward * reward, 0.0 if topk else weights.distill, cfg)
        if any(advantages):
            ppo.append(_ppo_datum(item.sample, [a * scale for a in advantages]))
        if topk and (teacher := item.sample.teacher) is not None and teacher.weight > 0:
            distill = weights.distill * teacher.weight
            cross_entropy.append(_topk_datum(item, distill * scale, cfg))
    passes: list[LossPass] = []
    if ppo:
        bounds = {"clip_low_threshold": cfg.clip_low, "clip_high_threshold": cfg.clip_high}
        passes.append(LossPass("ppo", tuple(ppo), bounds))
    if cross_entropy:
        passes.append(LossPass("cross_entropy", tuple(cross_entropy)))
    return passes


def reward_parts(samples: Sequence[Rewarded], cfg: Training) -> list[float]:
    """(B,) advantages of a batch from its rewards: those of groups within their groups, the others
    against one another; none pushes a reply up that was cut."""
    alone = [at for at, sample in enumerate(samples) if sample.bucket is None]
    grouped = [at for at, sample in enumerate(samples) if sample.bucket is not None]
    of_alone = reward_advantages(
        [samples[at].reward for at in alone],
        cfg.baseline,
        [TOOL_SUCCESS if _tool_success(samples[at]) else 1.0 for at in alone],
    )
    of_grouped = group_advantages(
        [samples[at].reward for at in grouped], [samples[at].bucket for at in grouped]
    )
    found = dict(zip((*alone, *grouped), (*of_alone, *of_grouped), strict=True))
    return [
        found[at] if may_push(found[at], cut=sample.cut) else 0.0
        for at, sample in enumerate(samples)
    ]


def _tool_success(sample: Rewarded) -> bool:
    return sample.tool and sample.reward is not None and sample.reward > 0


def _scales(items: Sequence[BatchItem], cfg: Training, reply_tokens: int) -> list[float]:
    """1 / (T_i B), or 1 / (T_max B) with norm = constant (Dr. GRPO, arXiv 2503.20783), where T_max
    is the same for every batch."""
    lengths = [len(item.sample.completion.tokens) for item in items]
    per_sample = cfg.norm == "sample"
    return [1.0 / ((n if per_sample else reply_tokens) * len(items)) for n in lengths]


def _summed(item: BatchItem, reward: float, distill: float, cfg: Training) -> list[float]:
    """(T,) advantages of the ppo pass, before normalisation."""
    sample = item.sample
    own = sample.completion.logprobs
    total = [reward] * len(own)
    if distill and sample.teacher is not None:
        hinted = token_advantages(sample.teacher.logprobs, own, cfg.opd_clip)
        weight = distill * sample.teacher.weight
        total = [a + weight * h for a, h in zip(total, hinted, strict=True)]
    if cfg.kl_beta > 0:
        if item.reference is None:
            raise AlignmentError(f"sample {sample.id}: no reference logprobs for the KL term")
        pull = kl_advantages(item.reference, own, cfg.kl_beta)
        total = [a + p for a, p in zip(total, pull, strict=True)]
    if item.current is not None:
        total = keep_bounded(total, item.current.logprobs, own)
    return total


def _ppo_datum(sample: Sample, advantages: Sequence[float]) -> Datum:
    return Datum(
        tokens=sample.prompt + sample.completion.tokens,
        start=len(sample.prompt),
        logprobs=sample.completion.logprobs,
        advantages=tuple(advantages),
    )


def _topk_datum(item: BatchItem, scale: float, cfg: Training) -> Datum:
    """Targets are the student's candidates [T, k]; weights their scaled advantages."""
    sample = item.sample
    teacher = sample.teacher
    if teacher is None or len(teacher.targets) != len(sample.completion.topk_logprobs):
        raise AlignmentError(f"sample {sample.id}: the teacher did not score every position")
    rows: list[tuple[float, ...]] = []
    for position, own in enumerate(sample.completion.topk_logprobs):
        advantages = topk_advantages(teacher.targets[position], own, cfg.opd_clip)
        if item.current is not None:
            advantages = [
                stale_weight(a, now, b, clip_low=cfg.clip_low, clip_high=cfg.clip_high)
                for a, now, b in zip(advantages, item.current.targets[position], own, strict=True)
            ]
        rows.append(tuple(scale * a for a in advantages))
    return Datum(
        tokens=sample.prompt + sample.completion.tokens,
        start=len(sample.prompt),
        targets=sample.completion.topk_ids,
        weights=tuple(rows),
    )
