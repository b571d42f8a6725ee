"""Scores that a method needs beyond the sampler's: teacher, current policy, reference.

Rule: a score is for exactly the sampled tokens, or it is an error; nothing is padded with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tinker_claw.config.settings import Training
from tinker_claw.errors import AlignmentError
from tinker_claw.learner.parts import LoopParts
from tinker_claw.methods.base import HINT
from tinker_claw.methods.passes import BatchItem, candidates
from tinker_claw.policy import Policy, Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.tasks import together
from tinker_claw.turn_state import Reason, TurnRefusal
from tinker_claw.types import (
    Charge,
    Completion,
    HintScores,
    Sample,
    StopReason,
    TokenLogprobs,
    Turn,
    moved,
    uncharged,
)

LEAST_END = 0.05
"""Least probability of the end token at a position at which `ends_apart` looks."""
LEAST_REACHED = 0.5
"""Probability that the teacher must give to the student's candidates there."""
LEAST_KEPT = 0.1
"""Share of the end token's probability that the teacher must give it, where only that is known."""


class HintScorer:
    """Scores a reply under a prompt with the teacher's text inserted."""

    def __init__(self, parts: LoopParts, renderer: Renderer, *, context_tokens: int) -> None:
        self._parts = parts
        self._renderer = renderer
        self._teaching = parts.method.teaching or HINT
        self._context_tokens = context_tokens
        self._cfg = parts.training

    def fitting(self, turn: Turn, texts: Sequence[str]) -> tuple[str, ...] | TurnRefusal:
        """Return the texts of which the teacher can be told one, or why it can be told none."""
        most = self._teaching.most
        shortened = [self._renderer.shorten(text, most) for text in texts]
        short = [text for text in shortened if self._teaching.cuts or text in texts]
        if not short:
            return TurnRefusal(Reason.UNFIT_HINT, f"it has more than {most} tokens")
        room = self._context_tokens - len(turn.completion.tokens)
        fitting = tuple(hint for hint in short if len(self._hinted(turn, hint).prompt) <= room)
        too_long = TurnRefusal(Reason.UNFIT_HINT, "with it the prompt is longer than the context")
        return fitting or too_long

    async def teach(self, turn: Turn, texts: Sequence[str], charge: Charge) -> HintScores | None:
        """Return a reply that the teacher wrote, told the first text; None if it did not end. Or,
        by the method, a reply's scores under the text whose candidates overlap most with its own.

        Raises:
            AlignmentError: the scores do not fit the tokens.
            BackendError: the teacher failed.
        """
        if self._parts.method.writes(self._cfg):
            return await self._written(turn, texts[0], charge)
        return max(
            [await self._under(turn, text, charge) for text in texts],
            key=lambda scores: scores.overlap,
        )

    async def _written(self, turn: Turn, hint: str, charge: Charge) -> HintScores | None:
        hinted = self._hinted(turn, hint)
        most = min(self._parts.reply_tokens, self._context_tokens - len(hinted.prompt))
        params = turn.completion.params.to_learn_from(most, self._cfg.opd_topk)
        params = replace(params, images=hinted.images)
        (done,) = await self._parts.base.sample(hinted.prompt, params, charge=charge)
        if math.isnan(sum(done.logprobs)) or math.isnan(sum(map(sum, done.topk_logprobs))):
            raise AlignmentError(f"turn {turn.id}: a score is not a number")
        return written_reply(hint, done, self._renderer.decode(done.tokens[:-1]))

    async def _under(self, turn: Turn, hint: str, charge: Charge) -> HintScores:
        done = turn.completion
        topk = self._cfg.opd_mode == "topk" and len(done.topk_ids) > 0
        own_candidates = topk and self._cfg.recipe != "paper"
        scores = await _scores(
            self._parts.base,
            self._hinted(turn, hint),
            charge,
            done.topk_ids if topk else (),
            top_k=self._cfg.opd_topk if topk else 0,
        )
        return HintScores(
            hint=hint,
            logprobs=scores.logprobs,
            targets=scores.targets,
            overlap=_overlap(done.topk_ids, scores.topk_ids),
            topk_ids=scores.topk_ids if own_candidates else (),
            topk_logprobs=scores.topk_logprobs if own_candidates else (),
        )

    def _hinted(self, turn: Turn, text: str) -> Turn:
        """Return the turn with the hint in its prompt."""
        assert turn.hint_at is not None  # else there is no text for its teacher
        prompt = self._renderer.splice(turn.prompt, turn.hint_at, text, self._teaching.words)
        images = moved(turn.images, turn.hint_at, len(prompt) - len(turn.prompt))
        return replace(turn, prompt=prompt, images=images)


def written_reply(hint: str, done: Completion, text: str) -> HintScores | None:
    """Return the teacher's own reply; None: it has no text, or its token limit cut it, so it would
    teach text without an end.

    Args:
        text: its text, without the token that ends it.
    """
    if done.stop_reason is not StopReason.STOP or len(done.tokens) < 2:
        return None
    return HintScores(
        hint,
        done.logprobs,
        topk_ids=done.topk_ids,
        topk_logprobs=done.topk_logprobs,
        reply=done.tokens,
        text=text,
    )


async def batch_items(
    samples: Sequence[Sample],
    policy: Policy,
    cfg: Training,
    charge: Charge = uncharged,
    *,
    score_fresh: bool = False,
) -> list[BatchItem]:
    """Add to each sample the scores that depend on the current weights.

    A sample of the serving version needs no scores of it (rho = 1), so none are computed, unless
    `score_fresh`, where its sampler uses other numerics than the trainer. All scores are requested
    at once, so that a backend can compute shared prefixes once.
    """

    async def item(sample: Sample) -> BatchItem:
        if not score_fresh and sample.policy_version == policy.version.id:
            return BatchItem(sample)
        scored = sample.teacher is not None and not sample.teacher.reply
        targets = candidates(sample) if cfg.opd_mode == "topk" and scored else ()
        return BatchItem(sample, await _scores(policy.sampler, sample, charge, targets))

    return await together(map(item, samples))


def ends_apart(reply: Completion, teacher: HintScores) -> bool:
    """Return whether the student may end a reply somewhere where its teacher mostly goes on with
    what the student never says.

    Distillation would lower the end token there, and what it loses would go to the runners-up,
    since the teacher's choice is out of reach: after a few steps replies no longer end.
    """
    if not teacher.targets:
        own, hinted = reply.logprobs[-1], teacher.logprobs[-1]
        ended = reply.stop_reason is StopReason.STOP
        return ended and hinted < own + math.log(LEAST_KEPT)
    stops = reply.params.stop_tokens
    rows = zip(reply.topk_ids, reply.topk_logprobs, teacher.targets, strict=True)
    return any(
        any(v in stops and math.exp(b) >= LEAST_END for v, b in zip(ids, own, strict=True))
        and math.fsum(map(math.exp, hinted)) < LEAST_REACHED
        for ids, own, hinted in rows
    )


async def _scores(
    sampler: Sampler,
    reply: Turn | Sample,
    charge: Charge,
    targets: Sequence[Sequence[int]] = (),
    *,
    top_k: int = 0,
) -> TokenLogprobs:
    """Score the sampled tokens behind their prompt, and the ids in `targets`.

    Raises:
        AlignmentError: the scores do not fit the tokens.
    """
    prompt, done = reply.prompt, reply.completion.tokens
    scores = await sampler.logprobs(
        prompt + done,
        start=len(prompt),
        targets=targets or None,
        top_k=top_k,
        images=reply.images,
        charge=charge,
    )
    what = f"{type(reply).__name__.lower()} {reply.id}"
    if len(scores.logprobs) != len(done) or len(scores.targets) != len(targets):
        raise AlignmentError(
            f"{what}: {len(scores.logprobs)} logprobs and {len(scores.targets)} target rows "
            f"for {len(done)} tokens and {len(targets)} rows"
        )
    # A sum is NaN where one of its terms is. An impossible token's -inf is bounded later.
    if math.isnan(sum(scores.logprobs)) or math.isnan(sum(map(sum, scores.targets))):
        raise AlignmentError(f"{what}: a score is not a number")
    return scores


def _overlap(student: Sequence[Sequence[int]], teacher: Sequence[Sequence[int]]) -> int:
    """Count the candidates that student and teacher share, summed over positions."""
    if not teacher:
        return 0
    return sum(len(set(s) & set(t)) for s, t in zip(student, teacher, strict=True))
