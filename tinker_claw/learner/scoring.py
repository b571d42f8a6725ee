"""Scores that a method needs beyond what was sampled: teacher, current policy, reference.

Rule: a score is for exactly the sampled tokens, or it is an error; nothing is padded with zeros.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from tinker_claw.config.settings import Training
from tinker_claw.errors import AlignmentError, ClawError
from tinker_claw.learner.parts import LoopParts
from tinker_claw.methods.passes import BatchItem, candidates
from tinker_claw.policy import Policy, Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import HINT_TEMPLATE, HintScores, Sample, TokenLogprobs, Turn


class HintScorer:
    """Scores a reply under the prompt into which is spliced what the method tells the teacher."""

    def __init__(self, parts: LoopParts, renderer: Renderer) -> None:
        self._teacher = parts.base if parts.training.teacher == "base" else None
        """None lets the policy of the moment teach."""
        self._renderer = renderer
        teaching = parts.method.teaching
        self._words = teaching.words if teaching else HINT_TEMPLATE
        self._cfg = parts.training

    async def score(self, turn: Turn, hints: Sequence[str], policy: Policy) -> HintScores:
        """Scores under the hint whose teacher shares most candidates with the student.

        Raises:
            AlignmentError: the turn has no place for a hint, or the scores do not fit the tokens.
            BackendError: the teacher failed.
        """
        teacher = self._teacher or policy.sampler
        scored = [await self._under(turn, hint, teacher) for hint in hints]
        return max(scored, key=lambda scores: scores.overlap)

    async def _under(self, turn: Turn, hint: str, teacher: Sampler) -> HintScores:
        if turn.hint_at is None:
            raise AlignmentError(f"turn {turn.id}: the prompt has no place for a hint")
        hint = self._renderer.shorten(hint)
        hinted = self._renderer.splice(turn.prompt, turn.hint_at, hint, self._words)
        done = turn.completion
        topk = self._cfg.opd_mode == "topk"
        scores = await teacher.logprobs(
            hinted + done.tokens,
            start=len(hinted),
            targets=done.topk_ids if topk else None,
            top_k=self._cfg.opd_topk if topk else 0,
        )
        _fits(scores, len(done.tokens), len(done.topk_ids) if topk else 0, f"turn {turn.id}")
        return HintScores(
            hint=hint,
            logprobs=scores.logprobs,
            targets=scores.targets if topk else (),
            overlap=_overlap(done.topk_ids, scores.topk_ids),
            topk_ids=scores.topk_ids if topk else (),
            topk_logprobs=scores.topk_logprobs if topk else (),
        )


async def batch_items(
    samples: Sequence[Sample],
    policy: Policy,
    base: Sampler,
    cfg: Training,
    *,
    score_fresh: bool = False,
) -> list[BatchItem]:
    """Add to each sample what is only known when the step is taken.

    A sample of the serving version needs no scores of it (rho = 1), so none are asked for, unless
    `score_fresh` says that its sampler computed in other numerics than the trainer scores in. All
    scores are asked for at once, so that a backend can compute the prefixes that they share once.
    """

    async def item(sample: Sample) -> BatchItem | ClawError:
        wanted = score_fresh or sample.policy_version != policy.version.id
        try:
            return BatchItem(
                sample=sample,
                current=await _current(sample, policy, cfg) if wanted else None,
                reference=await _reference(sample, base, cfg),
            )
        except ClawError as error:  # the group would wrap it
            return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(item(sample)) for sample in samples]
    items: list[BatchItem] = []
    for task in tasks:
        found = task.result()
        if isinstance(found, ClawError):
            raise found
        items.append(found)
    return items


async def _current(sample: Sample, policy: Policy, cfg: Training) -> TokenLogprobs:
    done = sample.completion
    targets = candidates(sample) if cfg.opd_mode == "topk" and sample.teacher else ()
    scores = await policy.sampler.logprobs(
        sample.prompt + done.tokens,
        start=len(sample.prompt),
        targets=targets or None,
    )
    _fits(scores, len(done.tokens), len(targets), f"sample {sample.id}")
    return scores


async def _reference(sample: Sample, base: Sampler, cfg: Training) -> tuple[float, ...] | None:
    if cfg.kl_beta == 0:
        return None
    scores = await base.logprobs(sample.prompt + sample.completion.tokens, start=len(sample.prompt))
    _fits(scores, len(sample.completion.tokens), 0, f"sample {sample.id}")
    return scores.logprobs


def _fits(scores: TokenLogprobs, tokens: int, targets: int, what: str) -> None:
    if len(scores.logprobs) != tokens or len(scores.targets) != targets:
        raise AlignmentError(
            f"{what}: {len(scores.logprobs)} logprobs and {len(scores.targets)} target rows "
            f"for {tokens} tokens and {targets} rows"
        )
    # A sum is NaN where one of its terms is. An impossible token's -inf is bounded later.
    if math.isnan(sum(scores.logprobs)) or math.isnan(sum(map(sum, scores.targets))):
        raise AlignmentError(f"{what}: a score is not a number")


def _overlap(student: Sequence[Sequence[int]], teacher: Sequence[Sequence[int]]) -> int:
    """Candidates that student and teacher share, summed over positions."""
    if not teacher:
        return 0
    return sum(len(set(s) & set(t)) for s, t in zip(student, teacher, strict=True))
