"""Scores that a method needs beyond the sampler's: teacher, current policy, reference.

Rule: a score is for exactly the sampled tokens, or it is an error; nothing is padded with zeros.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from tinker_claw.config.settings import Training
from tinker_claw.errors import (
    AlignmentError,
    BackendError,
    ClawError,
    OutageError,
    RequestError,
)
from tinker_claw.learner.parts import LoopParts
from tinker_claw.ledger.samples import TEACHES_NOTHING
from tinker_claw.methods.base import HINT
from tinker_claw.methods.passes import UNTOLD_SHARE, BatchItem, candidates
from tinker_claw.methods.teachability import EVERY, Teachability, reply_gain, teachability
from tinker_claw.policy import Policy, Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.telemetry import log
from tinker_claw.types import HintScores, Sample, TokenLogprobs, Turn, moved

_UNFIT: Final = "what its teacher would be told does not fit"
_AHEAD: Final = 6
"""Rejected replies measured ahead of the first accepted one to compare with."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One turn's questions for the teacher."""

    turn: Turn
    user: str
    told: tuple[str, ...]
    """Texts of which the teacher is told one."""
    own: bool
    """Whether this reply is measured: a rejected one that shows how well such texts teach."""
    accepted: Turn | None
    """A reply that the user accepted, with the prompt of the first try."""
    told_then: str | None
    """The text that belongs to that prompt; None: those of this turn."""
    free: frozenset[int]
    """Ids of turns that the base sampled, so that their own logprobs are the untold teacher's."""


_T = TypeVar("_T")


class HintScorer:
    """Scores a reply under a prompt with the teacher's text inserted, and measures now and then how
    well that teaches (methods/teachability.py)."""

    def __init__(self, parts: LoopParts, renderer: Renderer, *, context_tokens: int) -> None:
        self._parts = parts
        self._renderer = renderer
        self._teaching = parts.method.teaching or HINT
        self._context_tokens = context_tokens
        self._cfg = parts.training
        self._rewards = parts.method.reward > 0
        self._in_hand = set[int]()
        """Ids of accepted replies that are being scored."""

    def plan(self, turn: Turn, told: Sequence[str], *, rejected: bool) -> Plan | str:
        """Return the questions about a turn, or why nothing is asked.

        Args:
            rejected: whether the user rejected it.
        """
        most, gains = self._teaching.most, self._parts.ledger.gains
        short = [self._renderer.shorten(text, most) for text in told]
        if not self._teaching.cuts:
            short = [text for text in short if text in told]
        if not short:
            return f"{_UNFIT}: it has more than {most} tokens"
        texts = tuple(text for text in short if self._has_room(turn, text))
        if not texts:
            return f"{_UNFIT}: with it the prompt is longer than the context"
        user = gains.user_of(turn.session_id)
        known, many = self.known(user), len(texts) > 1
        own, found = False, None
        if self._cfg.recipe == "paper":
            return Plan(turn, user, texts, own, found, None, frozenset())
        if many or known.teaches is None or turn.id % EVERY == 0:
            own = rejected and gains.opening(turn.id) == turn.id
            own = own and (many or known.rejected <= known.accepted + _AHEAD)
            found = gains.accepted(user, again=many)
        if known.weight(rewards=self._rewards) == 0 and not own and found is None:
            return TEACHES_NOTHING
        if found is None or found.turn_id in self._in_hand:
            return Plan(turn, user, texts, own, None, None, self._sampled_by_base(turn))
        reply, first = (self._parts.ledger.turns.get(n) for n in (found.turn_id, found.opening))
        free = self._sampled_by_base(turn, *([reply] if reply.id == first.id else []))
        reply = replace(reply, prompt=first.prompt, hint_at=first.hint_at, images=first.images)
        then = found.told and self._renderer.shorten(found.told, most)
        fits = all(self._has_room(reply, text) for text in ([then] if then else texts))
        return Plan(turn, user, texts, own, reply if fits else None, then, free)

    def known(self, user: str) -> Teachability:
        """Measure how well hints on a user's turns teach."""
        return teachability(self._parts.ledger.gains.of(user))

    async def teach(self, plan: Plan) -> HintScores | None:
        """Return scores under the text that teaches best, as far as measured; None: such texts
        teach nothing.

        Raises:
            AlignmentError: the scores do not fit the tokens.
            BackendError: the teacher failed.
        """
        before = self.known(plan.user)
        scored = await self.under(plan.turn, plan.told)
        best = max(range(len(scored)), key=lambda n: scored[n].overlap)
        try:
            own, other = await self._gains(plan, scored)
        except OutageError:
            raise
        except (AlignmentError, BackendError, RequestError) as error:
            log.warning("teachability.unmeasured", turn=plan.turn.id, error=str(error))
            own, other = [], []
        if own and len(other) == len(own):
            best = max(range(len(own)), key=lambda n: (other[n] - own[n], scored[n].overlap))
        gains = {plan.turn.id: own[best]} if own else {}
        if other and plan.accepted is not None:
            gains[plan.accepted.id] = other[min(best, len(other) - 1)]
        if gains:
            self._parts.ledger.gains.add(plan.user, gains)
        after = self.known(plan.user)
        weight = 1.0 if self._cfg.recipe == "paper" else after.weight(rewards=self._rewards)
        if after.teaches != before.teaches:
            log.info("teachability", user=plan.user, weight=weight, known=str(after))
        if gains and weight != before.weight(rewards=self._rewards):
            self._parts.ledger.samples.weigh(plan.user, weight, rewards_count=self._rewards)
        return replace(scored[best], weight=weight) if weight else None

    async def under(self, turn: Turn, texts: Sequence[str]) -> list[HintScores]:
        """Return scores of a reply under each text."""
        return [await self._under(turn, text) for text in texts]

    async def _gains(
        self, plan: Plan, scored: Sequence[HintScores]
    ) -> tuple[list[float], list[float]]:
        """Return the gains of the turn's own reply under each text, and of the accepted one under
        each, or under its own text; [] where they are not to be measured."""
        clip, own, other = self._cfg.opd_clip, list[float](), list[float]()
        if plan.own:
            untold = await self._untold(plan.turn, plan)
            own = [reply_gain(scores.logprobs, untold, clip) for scores in scored]
        reply = plan.accepted
        if reply is not None and reply.id not in self._in_hand:  # others may have planned it, too
            self._in_hand.add(reply.id)
            try:
                untold = await self._untold(reply, plan)
                texts = plan.told if plan.told_then is None else (plan.told_then,)
                for text in texts:
                    scores = await self._plain(self._hinted(reply, text))
                    other.append(reply_gain(scores, untold, clip))
            finally:
                self._in_hand.discard(reply.id)
        return own, other

    async def _untold(self, turn: Turn, plan: Plan) -> Sequence[float]:
        return turn.completion.logprobs if turn.id in plan.free else await self._plain(turn)

    async def _plain(self, turn: Turn) -> Sequence[float]:
        return (await _scores(self._parts.base, turn)).logprobs

    async def _under(self, turn: Turn, hint: str) -> HintScores:
        hinted, done = self._hinted(turn, hint), turn.completion
        topk = self._cfg.opd_mode == "topk" and len(done.topk_ids) > 0
        own_candidates = topk and self._cfg.recipe != "paper"
        scores = await _scores(
            self._parts.base,
            hinted,
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
        if turn.hint_at is None:
            raise AlignmentError(f"turn {turn.id}: the prompt has no place for a hint")
        prompt = self._renderer.splice(turn.prompt, turn.hint_at, text, self._teaching.words)
        images = moved(turn.images, turn.hint_at, len(prompt) - len(turn.prompt))
        return replace(turn, prompt=prompt, images=images)

    def _has_room(self, turn: Turn, text: str) -> bool:
        told = self._renderer.hint_tokens(text, self._teaching.words)
        parts = turn.prompt, told, turn.completion.tokens
        return sum(map(len, parts)) <= self._context_tokens

    def _sampled_by_base(self, *turns: Turn) -> frozenset[int]:
        """Return the turns that the teacher, the frozen base, sampled, under whatever version."""
        version = self._parts.ledger.steps.version
        return frozenset(
            turn.id for turn in turns if (by := version(turn.policy_version)) and by.step == 0
        )


async def batch_items(
    samples: Sequence[Sample],
    policy: Policy,
    base: Sampler,
    cfg: Training,
    *,
    score_fresh: bool = False,
    common: frozenset[int] = frozenset(),
) -> list[BatchItem]:
    """Add to each sample the scores that depend on the current weights.

    A sample of the serving version needs no scores of it (rho = 1), so none are computed, unless
    `score_fresh`, where its sampler uses other numerics than the trainer. All scores are requested
    at once, so that a backend can compute shared prefixes once.

    Args:
        common: lessons whose accepted replies are also scored without them in the prompt.
    """
    measured = _measured(samples, common, cfg)

    async def item(sample: Sample) -> BatchItem:
        newest = policy.sampler
        targets = candidates(sample) if cfg.opd_mode == "topk" and sample.teacher else ()
        wanted = score_fresh or sample.policy_version != policy.version.id
        untold = sample.untold if sample.id in measured else None
        return BatchItem(
            sample=sample,
            current=await _scores(newest, sample, targets) if wanted else None,
            reference=(await _scores(base, sample)).logprobs if cfg.kl_beta else None,
            untold=await _scores(newest, untold, sample.completion.topk_ids) if untold else None,
        )

    return await side_by_side([item(sample) for sample in samples])


def _measured(samples: Sequence[Sample], common: frozenset[int], cfg: Training) -> frozenset[int]:
    """Return the ids of the newest accepted told replies, which are also scored untold."""
    told = (
        s.id
        for s in samples
        if s.told and s.told.lessons and common.issuperset(s.told.lessons)
        if (s.reward or 0) > 0 and not s.cut
    )
    return frozenset(sorted(told, reverse=True)[: math.ceil(UNTOLD_SHARE * cfg.batch_size)])


async def score_all(samples: Sequence[Sample], sampler: Sampler) -> list[TokenLogprobs]:
    """Score the sampled tokens of each sample under this sampler."""
    return await side_by_side([_scores(sampler, sample) for sample in samples])


async def side_by_side(work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return all results in order, or raise the first failure, once all have ended."""
    done = list[_T]()
    for result in await outcomes(work):
        if isinstance(result, ClawError):
            raise result
        done.append(result)
    return done


async def outcomes(work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T | ClawError]:
    """Return each result or its failure, in order, once all have ended."""

    async def one(doing: Coroutine[Any, Any, _T]) -> _T | ClawError:
        try:
            return await doing
        except ClawError as error:  # the group would wrap it
            return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(doing)) for doing in work]
    return [task.result() for task in tasks]


async def _scores(
    sampler: Sampler,
    reply: Turn | Sample,
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
