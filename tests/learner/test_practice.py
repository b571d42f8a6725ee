"""Practice of lessons over a real ledger: when it is due, what it rests on, and how it ends."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tests.learner.test_rollback import undoing
from tests.support.fakes import FakeSampler, FakeTrainer
from tests.support.learning import BETTER, LESSON, OPPOSITE, Splicer, World, world
from tests.support.ledger import COMPLETION, new_turn, sample_counts, sql
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.prices import Price
from tinker_claw.config.settings import Budget
from tinker_claw.evidence import Rate
from tinker_claw.judge.prompts import Schema
from tinker_claw.learner import practice
from tinker_claw.learner.gate import Gate
from tinker_claw.learner.practice import Behaviour, lacks
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.lessons import Lesson, State
from tinker_claw.ledger.prune import from_turn
from tinker_claw.ledger.steps import Void, VoidStepError
from tinker_claw.policy import Sampler
from tinker_claw.types import (
    Adam,
    Charge,
    LessonBlock,
    LossPass,
    Message,
    NextState,
    SamplingParams,
    StepReport,
    TokenChunk,
    TokenLogprobs,
    Tokens,
    Usage,
    Wish,
    uncharged,
)
from tinker_claw.wishes import lesson_text

SOLVE = "Solve 3x + 7 = 22."
PLAIN = "Write plain sentences."
STOP = 8
FOLLOWS, IGNORES, OBEYS, ENDLESS = (70, STOP), (50, STOP), (60, STOP), (70,) * 8
REQUEST = Splicer().hint_tokens(OPPOSITE, " {hint}")
"""Ids of the request for the opposite, in a prompt."""
Behaviour_ = Callable[[Tokens], Tokens]


class Behaves(FakeSampler):
    """A sampler whose reply depends on the prompt."""

    def __init__(self, ref: str, reply: Behaviour_, *, bills: bool = False) -> None:
        super().__init__(IGNORES, ref=ref, bills=bills)
        self._reply = reply

    def stream(
        self, prompt: Tokens, params: SamplingParams, charge: Charge = uncharged
    ) -> AsyncGenerator[TokenChunk, None]:
        self.say(self._reply(prompt))
        return super().stream(prompt, params, charge)

    async def logprobs(
        self,
        tokens: Tokens,
        *,
        start: int,
        targets: Any = None,
        charge: Charge = uncharged,
        **more: Any,
    ) -> TokenLogprobs:
        """Say whether a reply follows the wish of a question."""
        if targets is None or len(tokens) - start != 1:
            return await super().logprobs(
                tokens, start=start, targets=targets, charge=charge, **more
            )
        sure = 0.5 if FOLLOWS[0] in tokens else 0.1
        self._bill(charge, Usage(prefill=len(tokens), sampled=1))
        return TokenLogprobs(start, (0.0,), targets=((sure, -sure),))


def told_base(prompt: Tokens) -> Tokens:
    """Follow the lesson when told it, and obey a request for the opposite."""
    if REQUEST[0] in prompt:
        return OBEYS
    return FOLLOWS if prompt[: len(LESSON)] == LESSON else IGNORES


class Learns(FakeTrainer):
    """A trainer whose policy follows the lesson untold after so many optimizer steps."""

    def __init__(
        self, after: int = 4, *, base: Behaviour_ = told_base, learned: Tokens = FOLLOWS
    ) -> None:
        super().__init__()
        self.after = after
        self._base = base
        self._learned = learned
        self.rates = list[Adam]()
        self.go_on, self.stepping = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def base(self) -> Sampler:
        if "base" not in self.samplers:
            self.samplers["base"] = Behaves("base", self._base, bills=self.bills)
        return self.samplers["base"]

    async def train_step(
        self, passes: Sequence[LossPass], adam: Adam, charge: Charge = uncharged
    ) -> StepReport:
        self.rates.append(adam)
        self.stepping.set()
        await self.go_on.wait()
        return await super().train_step(passes, adam, charge)

    async def publish(self) -> Sampler:
        sampler, steps = await super().publish(), self.weights

        def reply(prompt: Tokens) -> Tokens:
            if steps < self.after:
                return OBEYS if REQUEST[0] in prompt else IGNORES
            return OBEYS if REQUEST[0] in prompt and self._learned != ENDLESS else self._learned

        self.samplers[sampler.ref] = Behaves(sampler.ref, reply, bills=self.bills)
        return self.samplers[sampler.ref]


class Writes:
    """A model that asks for the opposite."""

    def __init__(self, *sentences: str) -> None:
        self._sentences = sentences or (OPPOSITE,)

    async def answers(
        self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
    ) -> list[str]:
        return list(islice(cycle(self._sentences), n))


@dataclass
class Owner:
    """A user who asks, is told lessons, and judges."""

    w: World
    name: str = "me"
    sessions: int = 0
    said: list[int] = field(default_factory=list)
    """Their first turns."""

    @property
    def ledger(self) -> Ledger:
        return self.w.ledger

    @property
    def practice(self) -> practice.Practice:
        practice = self.w.learner._practice
        assert practice is not None
        return practice

    @property
    def lesson(self) -> Lesson:
        return self.ledger.lessons.of_user(self.name)[-1]

    def asks(
        self,
        value: int | None = 1,
        *,
        told: Sequence[int] = (),
        wish: Wish | None = None,
        about: str = SOLVE,
        role: str = "user",
        prompt: tuple[int, ...] = (1, 2, 3, 4),
        **changes: Any,
    ) -> int:
        """Hold a session: a first message, and what follows its reply."""
        self.sessions += 1
        session = self.ledger.turns.session(self.name, f"{self.name} {self.sessions}")
        self.ledger.lessons.begin(session, told)
        prompt = (*LESSON, *prompt) if told else prompt
        turn = new_turn(
            self.ledger,
            session_id=session,
            request_text=about,
            policy_version=self.w.policy.current.version.id,
            prompt=prompt,
            completion=replace(COMPLETION, params=SamplingParams(8, stop_tokens=(STOP,))),
            hint_at=5 if told else 3,
            told=LessonBlock(tuple(told), 0, len(LESSON)) if told else None,
            **changes,
        )
        number = self.ledger.turns.add(turn)
        self.ledger.turns.add_next_state(number, NextState(cast("Any", role), "and then?"))
        if value is not None:
            self.ledger.judgements.add(
                number,
                value=cast("Any", value),
                ballots=(),
                hints=(),
                wish=wish,
            )
        self.said.append(number)
        return number

    def wishes(self, text: str = PLAIN, **more: Any) -> int:
        """Reject a reply, and say what shall last; return the lesson."""
        self.asks(-1, wish=Wish(text, "always"), **more)
        newest = self.ledger.lessons.of_user(self.name)[0]
        if newest.state is State.CANDIDATE:
            self.ledger.lessons.rule("keep", None, newest.id)
        return newest.id

    def is_pleased(self, times: int = 2, **more: Any) -> None:
        """Accept told replies."""
        lesson = self.ledger.lessons.of_user(self.name)[0].id
        for _ in range(times):
            self.asks(told=(lesson,), **more)

    def has_asked(self, times: int = 9, **more: Any) -> None:
        """Ask first messages that nobody judges."""
        for _ in range(times):
            self.asks(None, **more)

    def steps(self) -> list[dict[str, Any]]:
        return [dict(row) for row in sql(self.ledger).rows("SELECT * FROM steps")]

    def prompts(self, step: int = 1) -> dict[str, list[int]]:
        rows = sql(self.ledger).rows(
            "SELECT purpose, turn_id FROM step_prompts WHERE step_id = ? ORDER BY 2", step
        )
        found: dict[str, list[int]] = {}
        for purpose, turn in rows:
            found.setdefault(purpose, []).append(turn)
        return found


@asynccontextmanager
async def owner(
    path: Path, trainer: FakeTrainer | None = None, *, asked: int = 9, **more: Any
) -> AsyncGenerator[Owner]:
    """A world in which the learner runs when told to, and nobody is asked to judge."""
    trainer = trainer or Learns()
    more = {"endpoint": Writes()} | more
    async with world(path, trainer=trainer, running=False, practice="on", **more) as w:
        o = Owner(w)
        o.has_asked(asked)
        yield o


@asynccontextmanager
async def learning(o: Owner) -> AsyncGenerator[None]:
    task = asyncio.create_task(o.w.learner.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def practised(o: Owner) -> None:
    """Let the learner run until a practice has ended."""
    async with learning(o):
        await o.w.until(lambda: any(one["status"] != "intent" for one in o.steps()))
        await o.w.until(lambda: o.w.health.learner.state == "waiting")


@asynccontextmanager
async def after_practice(
    path: Path, trainer: FakeTrainer | None = None, **more: Any
) -> AsyncGenerator[Owner]:
    """The world after a lesson has been wished for, accepted and practised."""
    async with owner(path, trainer, **more) as o:
        o.wishes()
        o.is_pleased()
        await practised(o)
        yield o


async def test_an_accepted_lesson_is_practised_as_one_step(tmp_path: Path) -> None:
    """It trains told replies untold beside anchors, with moments of its own."""
    trainer = Learns(after=6)
    async with after_practice(tmp_path, trainer) as o:
        (step,) = o.steps()
        assert (step["status"], step["parent"], step["version"]) == ("committed", 0, 1)
        assert step["lesson"] == o.lesson.id
        assert o.lesson.state is State.PROVISIONAL
        prompts = o.prompts()
        assert sorted(prompts["practised"] + prompts["checked"]) == o.said
        assert len(prompts["checked"]) == len(o.said) // 3
        version = o.w.policy.current.version
        assert (version.id, version.step) == (1, 1)
        assert trainer.states[version.state_ref or ""] == 6, "the first check that passes ends it"
        figures = json.loads(step["metrics"])["practice"]
        assert (figures["follow"], figures["follow_told"], figures["of"]) == (12, 12, 12)
        assert (figures["obey"], figures["contrary"], figures["end"]) == (12, 12, 12)
        for (only,) in trainer.steps:
            assert only.loss == "cross_entropy"
            kept = [d for d in only.datums if d.tokens == (1, 2, 3, 4, *FOLLOWS)]
            assert (len(kept), len(only.datums)) == (6, 8)
            assert kept[0].targets[0] == tuple(range(70, 74)), "the told base's candidates"
        assert {adam.beta1 for adam in trainer.rates} == {practice.BETA1}
        assert {adam.learning_rate for adam in trainer.rates} == {practice.RATE * 1e-3}
        assert trainer.kept_moments == [False, False], "before it, and before the next live step"
        assert not o.w.learner.recovery.suspect
    trainer.suspect = False
    async with owner(tmp_path, trainer):
        assert trainer.kept_moments[-1] is False, "nor after a restart"


def heard_untold(prompt: Tokens) -> Tokens:
    """Follow the lesson when told it, whatever is asked."""
    return FOLLOWS if prompt[: len(LESSON)] == LESSON else told_base(prompt)


def repeats(prompt: Tokens) -> Tokens:
    """Follow the lesson when asked for the opposite."""
    return FOLLOWS if REQUEST[0] in prompt else told_base(prompt)


def repeats_one(prompt: Tokens) -> Tokens:
    return FOLLOWS if BETTER[-1] in prompt else told_base(prompt)


def ends_now_and_then(prompt: Tokens) -> Tokens:
    reply = told_base(prompt)
    return ENDLESS if reply == FOLLOWS and 5 in prompt else reply


UNTOLD, ANCHOR = (1, 2, 3, 4, *FOLLOWS), (1, 2, 3, *REQUEST, 4, *OBEYS)


@pytest.mark.parametrize(
    ("base", "requests", "trained"),
    [
        (heard_untold, (OPPOSITE,), {UNTOLD, ANCHOR}),  # anchors come from the untold base
        (repeats_one, ("Once better.", OPPOSITE), {UNTOLD, ANCHOR}),
        (repeats, (OPPOSITE,), {UNTOLD}),
        (ends_now_and_then, (OPPOSITE,), {UNTOLD, ANCHOR, (1, 2, 5, *REQUEST, 4, *OBEYS)}),
    ],
)
async def test_examples_follow_the_lesson_or_a_request_for_the_opposite_and_end(
    tmp_path: Path, base: Behaviour_, requests: tuple[str, ...], trained: set[Tokens]
) -> None:
    trainer = Learns(base=base)
    async with owner(tmp_path, trainer, asked=6, endpoint=Writes(*requests)) as o:
        o.has_asked(6, prompt=(1, 2, 5, 4) if base is ends_now_and_then else (1, 2, 3, 4))
        o.wishes()
        o.is_pleased()
        await practised(o)
        assert {d.tokens for (only,) in trainer.steps for d in only.datums} == trained
        assert o.lesson.state is State.PROVISIONAL


async def test_long_anchors_weigh_no_more_than_their_share_of_the_replies(tmp_path: Path) -> None:
    def at_length(prompt: Tokens) -> Tokens:
        return (*OBEYS[:1] * 7, STOP) if REQUEST[0] in prompt else told_base(prompt)

    trainer = Learns(base=at_length)
    async with after_practice(tmp_path, trainer):
        weights = dict[int, float]()
        for datum in trainer.steps[0][0].datums:
            length = len(datum.tokens) - datum.start
            weights[length] = weights.get(length, 0.0) + sum(row[0] for row in datum.weights)
        kept, anchors = weights[len(FOLLOWS)], weights[8]
        assert kept / anchors == pytest.approx(
            (practice.BATCH - practice.ANCHORS) / practice.ANCHORS
        )


TOLD = Behaviour(of=12, follow=11, end=12, obey=8, contrary=12)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, None),
        ({"follow": 10, "end": 11, "obey": 6}, None),
        ({"follow": 9}, "follow the lesson"),
        ({"end": 10}, "end by themselves"),
        ({"obey": 5}, "opposite"),
    ],
)
def test_a_check_compares_behaviour_with_the_told_base(
    changes: dict[str, int], word: str | None
) -> None:
    reason = lacks(replace(TOLD, **changes), TOLD)
    assert (word is None) == (reason is None)
    assert (word or "") in (reason or "")


class Refuses(Gate):
    async def ask(self, candidate: Sampler, charge: Charge = uncharged) -> dict[str, Any]:
        raise VoidStepError(Void.REFUSED, "as told")


@pytest.mark.parametrize(
    ("base", "gate", "optimizer_steps"),
    [(lambda prompt: IGNORES, None, 0), (told_base, Refuses, practice.STEPS[-1])],
    ids=["the base does not follow it", "the gate refuses each version"],
)
async def test_a_run_that_comes_to_nothing(
    tmp_path: Path, base: Behaviour_, gate: type[Gate] | None, optimizer_steps: int
) -> None:
    trainer = Learns(base=base)
    refuses = functools.partial(gate, canaries=()) if gate else None
    async with after_practice(tmp_path, trainer, gate=refuses) as o:
        assert o.steps()[0]["void"] == Void.UNLEARNED
        assert len(trainer.rates) == optimizer_steps


@pytest.mark.parametrize("learned", [ENDLESS, IGNORES])
async def test_a_run_that_passes_no_check_changes_nothing(tmp_path: Path, learned: Tokens) -> None:
    trainer = Learns(learned=learned)
    async with owner(tmp_path, trainer) as o:
        o.wishes()
        o.is_pleased()
        o.ledger.samples.add(o.asks(None), 1, None)
        await practised(o)
        (step,) = o.steps()
        assert (step["status"], step["void"]) == ("void", Void.UNLEARNED)
        assert (o.lesson.state, o.w.policy.newest.version.id) == (State.TOLD, 0)
        assert trainer.weights == 0
        assert len(trainer.steps) == practice.STEPS[-1]
        assert sample_counts(o.ledger)["queued"] == 1
        closed = [one.closed for ref, one in trainer.samplers.items() if ref != "base"]
        assert closed.count(True) == len(practice.STEPS)


async def test_a_lesson_is_practised_three_times_a_month_at_most(tmp_path: Path) -> None:
    async with owner(tmp_path, Learns(learned=IGNORES), asked=0) as o:
        o.wishes()
        o.is_pleased()
        for runs in (1, 2, 3):
            o.has_asked(practice.FEWEST - (4 if runs == 1 else 1))
            assert runs == 1 or o.practice.due() is None, "the same prompts say the same"
            o.has_asked(1)
            async with learning(o):
                await o.w.until(lambda: len(o.steps()) == runs)  # noqa: B023 - run at once
                await o.w.until(lambda: o.w.health.learner.state == "waiting")
        o.has_asked(practice.FEWEST)
        assert o.practice.due() is None
        sql(o.ledger).write(
            "UPDATE steps SET created_at = created_at - ?", practice.DAYS * 86_400 + 1
        )
        assert o.practice.due() is not None


@pytest.mark.parametrize(
    "so_far",
    ["once", "rejected since", "half rejected", "by tools", "few prompts", "dropped", "untold"],
)
async def test_nothing_is_practised_before_its_owner_accepted_it(
    tmp_path: Path, so_far: str
) -> None:
    async with owner(tmp_path) as o:
        lesson = o.wishes()
        match so_far:
            case "once":
                o.is_pleased(1)
            case "rejected since":
                o.is_pleased(2)
                o.asks(-1, told=(lesson,))
                o.asks(-1, told=(lesson,))
            case "half rejected":  # untold it would be followed as seldom
                for _ in range(4):
                    o.asks(-1, told=(lesson,))
                o.is_pleased(4)
            case "by tools":
                o.is_pleased(2, role="tool")
            case "few prompts":
                o.is_pleased(2)
                sql(o.ledger).write("UPDATE turns SET hint_at = NULL WHERE id <= 4")
            case "dropped":
                o.is_pleased(2)
                o.ledger.lessons.rule("drop", None, lesson)
            case _:
                o.asks()
                o.asks()
        assert o.practice.due() is None
        if so_far == "half rejected":
            o.is_pleased(1)
            assert o.practice.due() is not None


async def test_prompts_are_the_owners_newest_and_none_is_private(tmp_path: Path) -> None:
    async with owner(tmp_path, asked=30) as o:
        o.wishes()
        o.is_pleased()
        Owner(o.w, "somebody else").asks()
        private = o.asks(untrained_because="test")
        sql(o.ledger).write(
            "UPDATE sessions SET private = 1 "
            "WHERE id = (SELECT session_id FROM turns WHERE id = ?)",
            private,
        )
        await practised(o)
        used = o.prompts()
        assert sorted(used["practised"] + used["checked"]) == o.said[:-1][-practice.MOST :]
        assert len(used["checked"]) == practice.MOST // 3


async def test_untold_replies_that_its_owner_accepts_make_a_lesson_learned(tmp_path: Path) -> None:
    async with after_practice(tmp_path) as o:
        for _ in range(practice.JUDGED - 1):
            o.asks()
        o.asks(role="tool")
        assert not o.practice.settle()
        assert o.lesson.state is State.PROVISIONAL, "five by the owner"
        o.asks(-1)
        o.practice.settle()
        assert o.lesson.state is State.LEARNED, "one rejection of six"


@pytest.mark.parametrize(
    ("accepted", "learned"),
    [
        ("A", None),
        ("RR", False),
        ("ARRA", None),  # two of four come by chance in one of eight
        ("ARRR", False),
        ("AAAAA", None),
        ("AAAAAR", True),
        ("AAAARR", None),
        ("AAAARRAA", True),
        ("RAARAAARAAR", None),
        ("RAARAAARAARA", False),  # twelve, and less than .15 below what telling reached
    ],
)
def test_untold_replies_are_measured_by_told_ones(accepted: str, learned: bool | None) -> None:
    verdicts = [letter == "A" for letter in accepted]
    assert practice.is_learned(verdicts, Rate(7, 8)) is learned


def test_one_rejection_alone_undoes_no_practice() -> None:
    assert practice.is_learned([False], Rate(24, 24)) is None
    assert practice.is_learned([False, False], Rate(24, 24)) is False


def test_half_rejected_is_not_learned_where_the_told_verdicts_are_forgotten() -> None:
    assert practice.is_learned([False, True] * 3, Rate()) is None


@pytest.mark.parametrize(
    ("untold", "least", "most"), [(0.7, 0.75, 1.0), (0.35, 0.0, 0.3), (0.0, 0.0, 0.0)]
)
def test_how_often_a_practice_is_taken_for_learned(
    untold: float, least: float, most: float
) -> None:
    """Telling reaches .7, as on a model of 1.5 billion parameters. It was judged eight times; if
    half were rejected, nothing is practised."""
    rng, taken, runs = Random(0), 0, 1000
    for _ in range(runs):
        when_told = Rate()
        while when_told.good <= 4:
            when_told = Rate(sum(rng.random() < 0.7 for _ in range(8)), 8)
        verdicts = [rng.random() < untold for _ in range(practice.MOST_JUDGED)]
        decisions = (
            practice.is_learned(verdicts[:n], when_told) for n in range(1, len(verdicts) + 1)
        )
        taken += next(decision for decision in decisions if decision is not None)
    assert least * runs <= taken <= most * runs


@pytest.mark.parametrize("live", [False, True])
async def test_two_rejections_bring_the_telling_back_and_the_version_unless_a_live_step_came(
    tmp_path: Path, live: bool
) -> None:
    async with after_practice(tmp_path) as o:
        weights = o.w.trainer.weights
        if live:
            for value in (1, -1, 1, -1):
                o.ledger.samples.add(o.asks(None), value, None)
        o.asks(-1)
        o.asks(-1)
        async with learning(o):
            await o.w.until(lambda: o.lesson.state is State.TOLD)
            await o.w.until(lambda: o.w.health.learner.state == "waiting")
        version = o.w.policy.current.version
        if live:
            assert (version.id, version.parent, o.w.trainer.weights) == (2, 1, weights + 1)
        else:
            assert (version.id, version.parent, o.w.trainer.weights) == (2, 0, 0)


async def test_a_rejection_that_repeats_the_lesson_is_one_of_two(tmp_path: Path) -> None:
    async with after_practice(tmp_path) as o:
        o.wishes()
        assert not o.practice.settle()
        assert o.lesson.state is State.PROVISIONAL
        o.wishes()
        assert o.practice.settle(), "back to the version before"
        assert o.lesson.state is State.TOLD


async def test_live_samples_wait_and_go_first_afterwards(tmp_path: Path) -> None:
    trainer = Learns()
    async with owner(tmp_path, trainer) as o:
        o.wishes()
        o.is_pleased()
        trainer.go_on.clear()
        async with learning(o):
            await trainer.stepping.wait()
            assert o.w.policy.current.version.id == 0
            for value in (1, -1, 1, -1):
                o.ledger.samples.add(o.asks(None), value, None)
            lesson = o.wishes("Answer in metres.")
            for _ in range(2):
                o.asks(told=(lesson,))
            o.w.learner.wake()
            trainer.go_on.set()
            await o.w.version(3)
        assert [one["lesson"] is None for one in o.steps()] == [False, True, False]
        assert sample_counts(o.ledger)["trained"] == 4


@pytest.mark.parametrize("what", ["dropped", "forgotten", "prompt forgotten", "rolled back"])
async def test_a_practice_ends_for_its_owners_word(tmp_path: Path, what: str) -> None:
    trainer = Learns()
    async with owner(tmp_path, trainer) as o:
        lesson = o.wishes()
        o.is_pleased()
        trainer.go_on.clear()
        async with learning(o):
            await trainer.stepping.wait()
            if what == "dropped":
                o.ledger.lessons.rule("drop", None, lesson)
                trainer.go_on.set()
            else:
                turn = o.said[9] if what == "forgotten" else o.said[1]
                work = (
                    undoing(o.w).roll_back(0)
                    if what == "rolled back"
                    else undoing(o.w).forget(from_turn(turn))
                )
                async with asyncio.TaskGroup() as group:
                    group.create_task(work)
                    await asyncio.sleep(0.05)
                    trainer.go_on.set()
            await o.w.until(lambda: o.steps()[0]["status"] == "void")
            assert o.steps()[0]["void"] == Void.WITHDRAWN
            if what in ("rolled back", "prompt forgotten"):  # it begins again
                await o.w.until(lambda: o.lesson.state is State.PROVISIONAL)
                used = o.prompts(o.steps()[-1]["id"])
                forgotten = o.said[1] in used["practised"] + used["checked"]
                assert forgotten == (what == "rolled back")
            else:
                await o.w.until(lambda: o.w.health.learner.state == "waiting")
                assert [one["status"] for one in o.steps()] == ["void"]
                assert trainer.weights == 0


async def test_undoing_a_practice_tells_its_lesson_again(tmp_path: Path) -> None:
    async with after_practice(tmp_path) as o:
        for turn in (o.said[0], o.said[-1]):  # forgetting a prompt names the step
            what = from_turn(turn)(sql(o.ledger))
            assert [(one.step, one.version, one.before) for one in what.steps] == [(1, 1, 0)]
            assert what.roll_back_to == 0
        assert o.ledger.lessons.practised(1) == {o.lesson.id}
        await undoing(o.w).roll_back(1)
        assert o.lesson.state is State.PROVISIONAL
        await undoing(o.w).roll_back(0)
        assert o.lesson.state is State.TOLD


def budget_of(usd: float) -> Callable[[Ledger, Any], Spending]:
    price = Price(prefill=1.0, cached=1.0, sample=1.0, train=1.0)
    return lambda ledger, telemetry: Spending(price, ledger.spend, telemetry, budget=Budget(usd))


async def test_a_run_that_the_budget_cannot_pay_is_not_begun(tmp_path: Path) -> None:
    async with owner(tmp_path, spending=budget_of(1e-3)) as o:
        o.wishes()
        o.is_pleased()
        with capture_logs() as events:
            for _ in range(2):
                assert o.practice.due() is None
        (event,) = [event for event in events if event["event"] == "practice.over_budget"]
        assert event["usd"] > 1e-3


async def test_a_run_is_billed_to_its_step_and_estimated_before(tmp_path: Path) -> None:
    trainer = Learns()
    trainer.bills = True
    async with owner(tmp_path, trainer, spending=budget_of(1.0)) as o:
        trainer.samplers["base"].bills = True
        o.wishes()
        o.is_pleased()
        plan = o.practice.due()
        assert plan is not None
        await practised(o)
        billed = o.ledger.spend.total(purpose="train").usage
        steps = sql(o.ledger).column("SELECT DISTINCT step_id FROM spend")
        assert steps == [1]
        assert billed != Usage()
        for name in ("prefill", "sampled", "trained"):
            assert getattr(billed, name) <= getattr(plan.usage, name), name


async def test_what_is_learned_already_is_told_to_the_base_of_the_next_practice(
    tmp_path: Path,
) -> None:
    async with after_practice(tmp_path) as o:
        lesson = o.wishes("Answer in metres.")
        for _ in range(2):
            o.asks(told=(lesson,))
        plan = o.practice.due()
        assert plan is not None
        assert plan.text == lesson_text([PLAIN, "Answer in metres."])
