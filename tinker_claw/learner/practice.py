"""Practise a lesson: train the policy to answer untold as the frozen base answers when told.

Context distillation by supervised steps (C. Snell et al., Learning by Distilling Context,
arXiv 2209.15189): the base, told the lesson, answers the owner's own past first messages. Replies
that follow the lesson are trained behind the same prompts without it. Two of eight samples of a
step are anchors: requests for the opposite, and replies that do what they ask. docs/lessons.md has
the figures.

Whether a reply follows a wish the base says itself, by the probability of its answer. A reply does
if that is above the middle between the usual replies with the wish and without it: a small model is
sure of nothing, and surer of what follows.

Rule: a run is one step of the ledger, from one version to the next, however many optimizer steps it
takes; nobody is answered by what lies between. Its check only refuses: the owner's verdicts say
whether the lesson is learned.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from random import Random
from statistics import fmean, median
from typing import Any

from tinker_claw.evidence import Rate
from tinker_claw.learner.gate import Gate
from tinker_claw.learner.lesson_replies import FirstMessage, LessonReplies, LessonReply
from tinker_claw.learner.parts import LoopParts, TrainedWeights
from tinker_claw.ledger.lessons import Lesson, State
from tinker_claw.ledger.steps import Void, VoidStepError
from tinker_claw.methods.passes import imitation
from tinker_claw.policy import Sampler
from tinker_claw.telemetry import log
from tinker_claw.types import Charge, Datum, LossPass, StepReport, Usage
from tinker_claw.wishes import lesson_text

STEPS = (4, 6, 8)
"""Optimizer steps of a run after which the policy is checked; the first that passes ends it."""
BATCH = 8
"""Replies of an optimizer step."""
ANCHORS = 2
"""Anchors among them."""
RATE, BETA1 = 0.4, 0.5
"""Share of the live learning rate, and Adam's beta1: with .9 the first gradients carry too far."""
FEWEST, MOST = 9, 24
"""Fewest and most prompts of a run, the newest; a third of them is held out for the check."""
DRAWN = 32
"""Replies of the told base that are sampled, several to a prompt."""
FEWEST_ACCEPTED = 6
"""Fewest replies of the told base that follow the lesson."""
APART = 0.65
"""Share of pairs in which a told reply must follow the lesson better than an untold one. Chance is
.5, with a standard error of .1 over 16 and 16 replies."""
CHECKED = 12
"""Replies of each kind in a check."""
CONTRARY = 4
"""Most distinct sentences that ask for the opposite."""
FEWER = 0.15
"""By how much the share that follows the lesson may be below the told base's."""
FEWER_ENDS = 1
"""By how many of `CHECKED` fewer replies than the told base's may end by themselves."""
OBEYED = 0.75
"""Share of the told base's obeyed contrary requests that the policy must obey."""
QUESTION = 500
"""Tokens of the question whether a reply follows the lesson, without that reply."""
RUNS, DAYS = 3, 30
"""Most runs of a lesson in so many days."""
JUDGED = 6
"""Fewest untold first replies, judged by the owner, after which a lesson is learned."""
MOST_JUDGED = 12
"""Most of them, after which one that is not learned is told again."""
BY_CHANCE = 0.05
"""Least probability of so many rejections, if the owner rejected as often as when it was told;
below it the lesson is told again. A base that follows a told wish in .7 of its replies is rejected
twice in four sessions in a third of cases, so two rejections alone say little."""
_LEAST_TOLD = Rate(3, 4)
"""What telling is taken to have reached where its verdicts are forgotten."""


@dataclass(frozen=True, slots=True)
class PracticePlan:
    """Lesson and prompts of a run, and its expected cost."""

    lesson: Lesson
    text: str
    """What the base is told: the lesson, behind those that the weights already have."""
    practised: Sequence[FirstMessage]
    """Past first messages, without lessons in their prompts."""
    held_out: Sequence[FirstMessage]
    """More of them, for the check."""
    usage: Usage
    """Tokens that it bills at most, without judge and canaries, if replies are as long as those to
    these messages were."""

    @property
    def prompts(self) -> Iterator[tuple[str, int]]:
        """The turns on which it rests, each with its purpose, as `steps.begin` stores them."""
        if self.lesson.turn_id is not None:
            yield "source", self.lesson.turn_id
        named = ("practised", self.practised), ("checked", self.held_out)
        for purpose, messages in named:
            yield from ((purpose, message.turn.id) for message in messages)


def is_learned(accepted: Sequence[bool], when_told: Rate) -> bool | None:
    """Return whether untold replies are accepted about as often as told ones were; None: it cannot
    be told yet.

    Args:
        accepted: whether the owner accepted each untold first reply, oldest first.
        when_told: of first replies that were told the lesson, those that were accepted.
    """
    if not when_told.of:
        when_told = _LEAST_TOLD
    share, n = (when_told.good + 0.5) / (when_told.of + 1), len(accepted)  # Jeffreys
    rejections = accepted.count(False)
    by_chance = sum(
        math.comb(n, k) * (1 - share) ** k * share ** (n - k) for k in range(rejections, n + 1)
    )
    if rejections > 1 and by_chance < BY_CHANCE:
        return False
    if n >= JUDGED and n - rejections >= (share - FEWER) * n:
        return True
    return False if n >= MOST_JUDGED else None


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Counts over the replies of a check."""

    of: int
    follow: int
    """Replies that follow the lesson."""
    end: int
    """Replies that end by themselves."""
    contrary: int
    """Replies to requests for the opposite."""
    obey: int
    """Those that do what is asked."""


class Practice:
    """Practice of one policy."""

    def __init__(self, parts: LoopParts, replies: LessonReplies, gate: Gate | None) -> None:
        self._parts = parts
        self._replies = replies
        self._gate = gate
        self._waits_for_money: int | None = None

    # What is to be done

    def due(self) -> PracticePlan | None:
        """Return the next run; None: nothing is to be practised now."""
        plans = (self._plan(lesson) for lesson in self._parts.ledger.practice.due())
        return next((plan for plan in plans if plan and self._affords(plan)), None)

    def _plan(self, lesson: Lesson) -> PracticePlan | None:
        table = self._parts.ledger.practice
        runs, newest = table.runs(lesson, since=time.time() - DAYS * 86_400)
        turn_ids = table.first_turns(lesson.user)
        if runs >= RUNS or sum(turn > newest for turn in turn_ids) < FEWEST:
            return None
        have = (State.PROVISIONAL, State.LEARNED)
        lessons = self._parts.ledger.lessons.of_user(lesson.user)
        learned = [other for other in lessons if other.state in have]
        text = lesson_text(other.text for other in [*reversed(learned), lesson])
        messages = self._replies.fitting(turn_ids[:MOST], text)
        if len(messages) < FEWEST:
            return None
        held_out = messages[2::3]
        practised = [message for message in messages if message not in held_out]
        prompt = sum(len(message.prompt) for message in messages) // len(messages)
        reply = sum(len(message.turn.completion.tokens) for message in messages) // len(messages)
        usage = run_usage(len(messages), prompt, reply)
        return PracticePlan(lesson, text, practised, held_out, usage)

    def _affords(self, plan: PracticePlan) -> bool:
        """Return whether the budget has room for a run, and say so once where it has not."""
        spending, lesson = self._parts.spending, plan.lesson.id
        if spending.affords(plan.usage):
            return True
        if self._waits_for_money != lesson:
            self._waits_for_money = lesson
            log.warning("practice.over_budget", lesson=lesson, **spending.figures(plan.usage))
        return False

    def settle(self) -> bool:
        """Learn from the owner's verdicts on untold replies; return whether the newest version of
        the ledger is an earlier one again, whose weights are to be loaded."""
        ledger, newest = self._parts.ledger, self._parts.policy.newest.version.id
        for trial in ledger.practice.provisional(MOST_JUDGED):
            learned = is_learned(trial.accepted, trial.when_told)
            if learned is False:
                before = ledger.versions.get(trial.before) if trial.after == newest else None
                ledger.practice.unlearn(trial.lesson.id, before)
                back = {} if before is None else {"back_to": before.id}
                log.warning("practice.rejected", lesson=trial.lesson.id, **back)
                return before is not None
            if learned:
                ledger.practice.confirm(trial.lesson)
                log.info("practice.learned", lesson=trial.lesson.id, version=trial.after)
        return False

    # A run

    async def run(
        self,
        plan: PracticePlan,
        rng: Random,
        train: Callable[[LossPass], Awaitable[StepReport]],
        closed_on_failure: Callable[[Sampler], AbstractContextManager[None]],
        check_wanted: Callable[[], None],
        charge: Charge,
    ) -> TrainedWeights:
        """Train until the untold policy passes the check.

        Args:
            train: takes an optimizer step.
            closed_on_failure: closes a sampler if what is done inside fails.
            check_wanted: raises where something else comes first; called between the parts.
            charge: takes what a service bills for it.

        Raises:
            VoidStepError: it did not pass the check, or the base does not follow the lesson.
        """
        costs = self._parts.spending.figures(plan.usage)
        log.info("practice.started", lesson=plan.lesson.id, prompts=len(plan.practised), **costs)
        examples = await self._examples(plan, charge)
        check_wanted()
        told_base = await self._behaviour(plan, examples, self._parts.base, charge, plan.text)
        picked = _shuffled(examples.following, rng)
        held = _shuffled(examples.anchors, rng) if examples.anchors else picked
        refused = ""
        for number in range(1, STEPS[-1] + 1):
            followed = [next(picked) for _ in range(BATCH - ANCHORS)]
            anchors = [next(held) for _ in range(ANCHORS)]
            check_wanted()
            report = await train(_loss([followed, anchors], soft=self._replies.soft))
            if number not in STEPS:
                continue
            published_at, sampler = time.monotonic(), await self._parts.trainer.publish()
            try:
                with closed_on_failure(sampler):
                    gate_figures = await self._gate.ask(sampler, charge) if self._gate else {}
                    figures = await self._checked(plan, sampler, examples, told_base, charge)
            except VoidStepError as error:  # the live rate and its moments are not to blame
                refused = str(error)
                continue
            figures |= {"lesson": plan.lesson.id, "accepted": len(examples.following)}
            metrics = {
                "losses": list(report.losses),
                "grad_norm": report.grad_norm,
                "samples": BATCH,
                "tokens": report.tokens,
                "practice": {"optimizer_steps": number, **figures},
            }
            return TrainedWeights(sampler, metrics | gate_figures, published_at)
        raise VoidStepError(Void.UNLEARNED, refused)

    async def _examples(self, plan: PracticePlan, charge: Charge) -> _Examples:
        """Return what is trained.

        Raises:
            VoidStepError: too few replies of the told base follow the lesson.
        """
        base, replies, wish = self._parts.base, self._replies, plan.lesson.text
        drawn = list(islice(cycle(plan.practised), DRAWN))
        told_replies = await replies.scored(wish, base, drawn, plan.text, charge)
        untold_replies = await replies.scored(wish, base, plan.practised, None, charge)
        bound = (_middle(told_replies) + _middle(untold_replies)) / 2
        following = [reply for reply in told_replies if reply.score > bound and reply.ended]
        if len(following) < FEWEST_ACCEPTED or _ranked(told_replies, untold_replies) < APART:
            raise VoidStepError(
                Void.UNLEARNED,
                f"told the lesson, the base follows it in {len(following)} of {len(told_replies)} "
                f"replies, and untold in {_count_above(bound, untold_replies)} of "
                f"{len(untold_replies)}: too little to learn from",
            )
        opposites = await self._opposites(plan, bound, charge)
        against = replies.against(plan.practised, opposites)
        anchors = await self._not_following(wish, bound, base, against, charge, plan.text)
        # A base that is told may not obey: then one that is not told.
        obeyed = {reply.message.turn.id for reply in anchors}
        others = [message for message in against if message.turn.id not in obeyed]
        anchors += await self._not_following(wish, bound, base, others, charge)
        return _Examples(bound, following, anchors, opposites)

    async def _opposites(self, plan: PracticePlan, bound: float, charge: Charge) -> list[str]:
        """Return sentences that ask for the opposite of a lesson: of those that the base writes the
        ones after which its untold replies follow the lesson least.

        A small model often repeats the wish in place of its opposite.
        """
        replies, wish = self._replies, plan.lesson.text
        sentences = await replies.opposites(wish, 2 * CONTRARY, charge)
        against = replies.against(plan.practised, sentences)
        scores = defaultdict[str, list[float]](list)
        for reply in await replies.scored(wish, self._parts.base, against, None, charge):
            scores[reply.message.opposite].append(reply.score)
        means = {sentence: fmean(each) for sentence, each in scores.items()}
        apart = [sentence for sentence, mean in means.items() if mean <= bound]
        apart.sort(key=means.__getitem__)
        return apart[:CONTRARY]

    async def _not_following(
        self,
        wish: str,
        bound: float,
        sampler: Sampler,
        messages: Sequence[FirstMessage],
        charge: Charge,
        text: str | None = None,
    ) -> list[LessonReply]:
        """Return the replies of these weights that do not follow a wish."""
        sampled = await self._replies.scored(wish, sampler, messages, text, charge)
        return [reply for reply in sampled if reply.score <= bound]

    async def _checked(
        self,
        plan: PracticePlan,
        candidate: Sampler,
        examples: _Examples,
        told_base: Behaviour,
        charge: Charge,
    ) -> dict[str, Any]:
        """Return the figures of a version that passes.

        Raises:
            VoidStepError: it does not; says why.
        """
        behaviour = await self._behaviour(plan, examples, candidate, charge)
        if reason := lacks(behaviour, told_base):
            raise VoidStepError(Void.UNLEARNED, reason)
        base_counts = asdict(told_base)
        of_base = {f"{name}_told": base_counts[name] for name in ("follow", "end", "obey")}
        return asdict(behaviour) | of_base

    async def _behaviour(
        self,
        plan: PracticePlan,
        examples: _Examples,
        sampler: Sampler,
        charge: Charge,
        text: str | None = None,
    ) -> Behaviour:
        """Count what these weights do, told a text or nothing."""
        wish, bound = plan.lesson.text, examples.bound
        tests = list(islice(cycle(plan.held_out), CHECKED))
        sampled = await self._replies.scored(wish, sampler, tests, text, charge)
        against = self._replies.against(tests, examples.opposites)
        obeying = await self._not_following(wish, bound, sampler, against, charge, text)
        return Behaviour(
            of=len(sampled),
            follow=_count_above(bound, sampled),
            end=sum(reply.ended for reply in sampled),
            contrary=len(against),
            obey=len(obeying),
        )


@dataclass(frozen=True, slots=True)
class _Examples:
    """Replies that a run trains, all behind prompts without the lesson."""

    bound: float
    """Score above which a reply follows the wish."""
    following: list[LessonReply]
    """Replies of the told base that follow it."""
    anchors: list[LessonReply]
    """Replies to requests for the opposite that do not follow it."""
    opposites: list[str]
    """These requests."""


def _middle(replies: Sequence[LessonReply]) -> float:
    return median(reply.score for reply in replies)


def _ranked(high: Sequence[LessonReply], low: Sequence[LessonReply]) -> float:
    """Return the share of pairs in which the first's score is above the second's (Mann and
    Whitney's U)."""
    return fmean((a.score > b.score) + 0.5 * (a.score == b.score) for a in high for b in low)


def _count_above(bound: float, replies: Sequence[LessonReply]) -> int:
    return sum(reply.score > bound for reply in replies)


def lacks(policy: Behaviour, base: Behaviour) -> str | None:
    """Return what the untold policy lacks beside the told base; None: it passes."""
    if policy.follow < base.follow - FEWER * base.of:
        return (
            f"{policy.follow} of {policy.of} replies follow the lesson without being told it; the "
            f"base, told, does in {base.follow}"
        )
    if policy.end < base.end - FEWER_ENDS:
        return (
            f"{policy.end} of {policy.of} replies end by themselves; of the told base {base.end} do"
        )
    if policy.obey < OBEYED * base.obey:
        return (
            f"{policy.obey} of {policy.contrary} requests for the opposite are obeyed; of the told "
            f"base's {base.obey} are"
        )
    return None


def _shuffled(replies: Sequence[LessonReply], rng: Random) -> Iterator[LessonReply]:
    """Yield all replies in random order, again and again."""
    while True:
        yield from rng.sample(replies, len(replies))


def _loss(groups: Sequence[Sequence[LessonReply]], *, soft: bool) -> LossPass:
    """Return the cross entropy of replies behind their prompts without the lesson.

    A group's tokens share the weight of its replies: else long anchors outweighed short replies.

    Args:
        soft: the targets are the sampler's candidates with their probabilities, which is a forward
            KL divergence over these; False: the sampled tokens.
    """
    replies = sum(map(len, groups))
    datums = list[Datum]()
    for group in groups:
        scale = len(group) / replies / sum(len(reply.completion.tokens) for reply in group)
        for reply in group:
            done = reply.completion
            topk = (done.topk_ids, done.topk_logprobs) if soft else ((), ())
            datums.append(imitation(reply.message.prompt, done.tokens, *topk, scale))
    return LossPass("cross_entropy", tuple(datums))


def run_usage(messages: int, prompt: int, reply: int) -> Usage:
    """Return what a run of all its optimizer steps and checks bills, with prompts and replies as
    long as those of these messages in the mean."""
    sampled = DRAWN + 3 * messages + 2 * CHECKED * (1 + len(STEPS))
    return Usage(
        prefill=sampled * (prompt + QUESTION + reply),  # sampled, and asked about
        sampled=sampled * (reply + 2),
        trained=STEPS[-1] * BATCH * (prompt + reply - 1),
    )
