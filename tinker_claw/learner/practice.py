"""Practise a lesson: make the policy answer untold as the base does that is told.

On-policy distillation without the user: the untold policy answers the owner's own past first
messages, the frozen base that is told the lesson scores the replies, and an optimizer step moves
the policy there.

Rule: a run is one step of the ledger, from one version to the next, however many optimizer steps it
takes; nobody is answered by what lies between. Its check can only refuse: whether the lesson is
learned is for its owner's verdicts to say.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random
from statistics import fmean
from typing import Any

from tinker_claw.errors import RefusedError, UnlearnedError
from tinker_claw.learner.gate import Gate
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.scoring import HintScorer, batch_items, side_by_side
from tinker_claw.ledger.lessons import Lesson, State
from tinker_claw.methods.advantages import topk_advantages
from tinker_claw.methods.base import OPD
from tinker_claw.methods.passes import Prepared
from tinker_claw.policy import Policy, Sampler
from tinker_claw.telemetry import log
from tinker_claw.types import HintScores, Sample, StepReport, Turn, Usage

STEPS = (3, 16)
"""Fewest and most optimizer steps of a run."""
BATCH = 8
"""Replies of an optimizer step."""
FEWEST = 3
"""Fewest prompts for the first run; each run that did not last doubles it, and the next waits for
as many new ones as it rested on."""
NEWEST = 16
"""Newest prompts that are used."""
HELD_OUT = 8
"""Prompts from which a third is not trained, and checked."""
CHECKED = 16
"""Replies on either side of the check."""
NEAR, OF_FIRST, ALIKE = 0.01, 0.15, 0.0025
"""A run ends when the divergence of two optimizer steps, in the mean, is below `NEAR` nats a token,
and at most this share of the first's or `ALIKE`."""
LEARNED = 0.02
"""Most nats a token between untold policy and told base, either way, for a version to pass. What is
nearer has not always learned: that its owner finds out. At .005 a wish for structure never passed,
whose versions at .009 to .02 its owner accepted."""
ODD = 0.05
"""Most nats a token that one reply counts for in the check: one of 16 in the old way must not
decide, and two must."""
JUDGED = 4
"""Untold first replies, judged by the owner, after which a lesson is learned."""
REJECTED = 2
"""Rejections among them that bring the telling back."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run practises, and what it may cost."""

    lesson: Lesson
    text: str
    """What the base is told: the lesson, behind those that the weights already have."""
    practised: Sequence[Turn]
    """Past first messages, without lessons in their prompts."""
    held_out: Sequence[Turn]
    """More of them, for the check; (): there are too few."""
    usage: Usage
    """Tokens that it bills at most, without lesson and canaries, if replies are as long as theirs
    were."""

    @property
    def prompts(self) -> Iterator[tuple[str, int]]:
        """The turns on which it rests, each with its purpose, as `steps.begin` stores them."""
        if self.lesson.turn_id is not None:
            yield "source", self.lesson.turn_id
        named = ("practised", self.practised), ("checked", self.held_out)
        for purpose, turns in named:
            yield from ((purpose, turn.id) for turn in turns)


@dataclass(frozen=True, slots=True)
class Made:
    """What a step has made that may be committed."""

    sampler: Sampler
    prepared: Prepared
    report: StepReport
    """That of the last optimizer step, as is `prepared`."""
    figures: dict[str, Any]
    """More metrics of the step."""
    publishing: float
    """When its version was published, by the monotonic clock."""


class Practice:
    """Practice of one policy."""

    def __init__(
        self,
        parts: LoopParts,
        scorer: HintScorer,
        gate: Gate | None,
        *,
        score_fresh: bool = False,
    ) -> None:
        """Set up practice.

        Args:
            score_fresh: see `Capabilities`.
        """
        self._parts = parts
        self._scorer = scorer
        self._gate = gate
        self._score_fresh = score_fresh
        self._waits_for_money: int | None = None

    # What is to be done

    def due(self) -> Plan | None:
        """Return the next run; None: nothing is to be practised now."""
        found = (self._plan(lesson) for lesson in self._parts.ledger.practice.due())
        return next((plan for plan in found if plan and self._affords(plan)), None)

    def _plan(self, lesson: Lesson) -> Plan | None:
        ledger = self._parts.ledger
        asked = ledger.practice.asked(lesson.user)
        rested, newest = ledger.practice.rested_on(lesson)
        fresh = [turn for turn in asked if turn > newest]
        if len(asked) < FEWEST * 2 ** ledger.practice.runs(lesson) or len(fresh) < rested:
            return None
        have = (State.PROVISIONAL, State.LEARNED)
        learned = [one for one in ledger.lessons.of_user(lesson.user) if one.state in have]
        text = " ".join(one.text for one in (*reversed(learned), lesson))
        turns = self._fitting(text, asked)
        if len(turns) < FEWEST:
            return None
        held_out = turns[2::3] if len(turns) >= HELD_OUT else []
        practised = [turn for turn in turns if turn not in held_out]
        return Plan(lesson, text, practised, held_out, _usage(turns))

    def _fitting(self, text: str, turn_ids: Sequence[int]) -> list[Turn]:
        """Return the newest turns in whose prompts a text has room, without what they were told."""
        found = [_without_lessons(self._parts.ledger.turns.get(turn)) for turn in turn_ids[:NEWEST]]
        fits = self._scorer.fitting
        return [turn for turn in found if not isinstance(fits(turn, (text,)), str)]

    def _affords(self, plan: Plan) -> bool:
        """Return whether the budget has room for a run, and say so once where it has not."""
        spending, lesson = self._parts.spending, plan.lesson.id
        if spending.affords(plan.usage):
            return True
        if self._waits_for_money != lesson:
            self._waits_for_money = lesson
            log.warning("practice.too_dear", lesson=lesson, **spending.figures(plan.usage))
        return False

    def settle(self) -> bool:
        """Learn from the owner's verdicts on untold replies; return whether the newest version of
        the ledger is an earlier one again, whose weights are to be loaded."""
        ledger, newest = self._parts.ledger, self._parts.policy.newest.version.id
        for one in ledger.practice.provisional(JUDGED):
            if one.accepted.count(False) >= REJECTED:
                before = ledger.steps.version(one.before) if one.after == newest else None
                ledger.steps.unlearn(one.lesson.id, before)
                back = {} if before is None else {"back_to": before.id}
                log.warning("practice.rejected", lesson=one.lesson.id, **back)
                return before is not None
            if len(one.accepted) == JUDGED:
                ledger.practice.confirm(one.lesson)
                log.info("practice.learned", lesson=one.lesson.id, version=one.after)
        return False

    # A run

    async def run(
        self,
        plan: Plan,
        rng: Random,
        train: Callable[[Prepared], Awaitable[StepReport]],
        close: Callable[[Sampler], None],
    ) -> Made:
        """Practise until the untold policy answers like the told base, and check that.

        Args:
            train: takes an optimizer step, or raises where something else comes first.
            close: closes a sampler that is not needed any more.

        Raises:
            UnlearnedError: it did not pass the check.
        """
        before = self._parts.policy.newest
        apart, sampler, again = list[float](), before.sampler, False
        try:
            while True:
                now = Policy(before.version, sampler)
                prepared, divergence = await self._prepared(plan, rng, now)
                apart.append(divergence)
                report = await train(prepared)
                publishing = time.monotonic()
                old, sampler = sampler, await self._parts.trainer.publish()
                if old is not before.sampler:
                    close(old)
                last = len(apart) == STEPS[1]
                if not (last or _is_near(apart)):
                    continue
                try:
                    figures = await self._checked(plan, sampler)
                    break
                except UnlearnedError:  # the steps that are left may do it, once
                    if last or again:
                        raise
                    again = True
        except BaseException:
            if sampler is not before.sampler:
                close(sampler)
            raise
        told = {"lesson": plan.lesson.id, "optimizer_steps": len(apart), "before": apart[0]}
        asked = {"gate": figures.pop("gate")} if "gate" in figures else {}
        return Made(sampler, prepared, report, {"practice": told | figures} | asked, publishing)

    async def _prepared(self, plan: Plan, rng: Random, now: Policy) -> tuple[Prepared, float]:
        """Return what an optimizer step trains on, and the divergence from the told base.

        Raises:
            UnlearnedError: the base says the same untold.
        """
        cfg, version = self._parts.training, now.version
        picked = rng.choices(plan.practised, k=BATCH)
        replies = await self._replies(now.sampler, picked)
        scores = await side_by_side([self._scorer.teach(turn, (plan.text,)) for turn in replies])
        samples = [
            Sample(
                id=number,
                turn_id=turn.id,
                session_id=turn.session_id,
                policy_version=version.id,
                policy_step=version.step,
                prompt=turn.prompt,
                completion=turn.completion,
                reward=None,
                teacher=score,
                user=plan.lesson.user,
            )
            for number, (turn, score) in enumerate(zip(replies, scores, strict=True))
        ]
        items = await batch_items(samples, now, cfg, score_fresh=self._score_fresh)
        prepared = OPD.prepare(items, cfg, None, self._parts.reply_tokens)
        if not prepared.passes:
            raise UnlearnedError("the base with the lesson answers like the policy without it")
        return prepared, fmean(_apart(replies, scores))

    async def _replies(self, sampler: Sampler, turns: Sequence[Turn]) -> list[Turn]:
        """Return these turns with new replies by these weights."""
        k, most = self._parts.training.opd_topk, self._parts.reply_tokens

        async def reply(turn: Turn) -> Turn:
            asked = turn.completion.params
            params = replace(
                asked,
                max_tokens=min(most, asked.max_tokens),
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                seed=None,
                student_topk=k,
                stop=(),
                person=False,
            )
            (done,) = await sampler.sample(turn.prompt, params)
            return replace(turn, completion=done)

        return await side_by_side([reply(turn) for turn in turns])

    async def _checked(self, plan: Plan, candidate: Sampler) -> dict[str, Any]:
        """Return the figures of a version that passes.

        Raises:
            UnlearnedError: it does not, or the gate refuses it; says why.
        """
        try:
            asked = await self._gate.ask(candidate) if self._gate else {}
        except RefusedError as error:  # the live rate and its moments are not to blame
            raise UnlearnedError(str(error)) from error
        turns = list(islice(cycle(plan.held_out or plan.practised), CHECKED))
        sides = [await one(plan.text, turns, candidate) for one in (self._untold, self._told)]
        after = max(fmean(side) for side in sides)
        if after >= LEARNED:
            raise UnlearnedError(
                f"replies without the lesson are {after:.4f} nats a token from what it asks for; "
                f"it should be less than {LEARNED:g}"
            )
        prompts, held = len({turn.id for turn in turns}), bool(plan.held_out)
        return {"after": after, "prompts": prompts, "held_out": held} | asked

    async def _untold(self, text: str, turns: Sequence[Turn], of: Sampler) -> list[float]:
        """Return by how much each untold reply is likelier than the told base finds it."""
        replies = await self._replies(of, turns)
        scores = [self._scorer.teach(turn, (text,)) for turn in replies]
        return _odd(replies, await side_by_side(scores))

    async def _told(self, text: str, turns: Sequence[Turn], of: Sampler) -> list[float]:
        """Return by how much each reply of the told base is likelier than the untold policy finds
        it."""
        hinted = [self._scorer.hinted(turn, text) for turn in turns]
        replies = await self._replies(self._parts.base, hinted)
        told = [replace(t, completion=r.completion) for t, r in zip(turns, replies, strict=True)]
        return _odd(told, await side_by_side([self._scorer.by(of, turn) for turn in told]))


def _without_lessons(turn: Turn) -> Turn:
    """Return a turn without the lessons in its prompt."""
    if (told := turn.told) is None or turn.hint_at is None:
        return turn
    prompt = told.without(turn.prompt)
    hint_at = turn.hint_at + len(prompt) - len(turn.prompt)
    return replace(turn, prompt=prompt, hint_at=hint_at, told=None)


def _is_near(apart: Sequence[float]) -> bool:
    """Return whether optimizer steps with these divergences may be enough."""
    lately = sum(apart[-2:]) / 2
    enough = max(OF_FIRST * apart[0], ALIKE)
    return len(apart) >= STEPS[0] and lately < NEAR and lately <= enough


def _apart(replies: Sequence[Turn], scores: Sequence[HintScores]) -> list[float]:
    """Return the divergence of each reply from other weights that scored it, in nats a token:
    KL(sampler || scorer) over the sampler's candidates, or the sampled tokens where it has none."""
    found = list[float]()
    for turn, score in zip(replies, scores, strict=True):
        done = turn.completion
        if score.targets:
            rows = zip(score.targets, done.topk_logprobs, strict=True)
            nats = [-sum(topk_advantages(other, own, 0.0)) for other, own in rows]
        else:
            nats = [own - other for own, other in zip(done.logprobs, score.logprobs, strict=True)]
        found.append(fmean(nats))
    return found


def _odd(replies: Sequence[Turn], scores: Sequence[HintScores]) -> list[float]:
    return [min(ODD, one) for one in _apart(replies, scores)]


def _usage(turns: Sequence[Turn]) -> Usage:
    """Return what a run of all its optimizer steps and two checks bills, with prompts and replies
    as long as those of these turns in the mean."""
    prompt = sum(len(turn.prompt) for turn in turns) // len(turns)
    reply = sum(len(turn.completion.tokens) for turn in turns) // len(turns)
    sampled = STEPS[1] * BATCH + 2 * 2 * CHECKED
    return Usage(
        prefill=sampled * (2 * prompt + reply),  # each reply is sampled, and scored once
        sampled=sampled * (reply + 1),
        trained=STEPS[1] * BATCH * (prompt + reply - 1),
    )
