"""Practice of lessons over a real ledger: when it is due, what it rests on, and how it ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from examples.demo.judge import HINTS_PLAIN
from examples.demo.options import ROOT
from examples.demo.recipe import grammar
from tests.learner.test_rollback import SlowTrainer, undoing
from tests.support.fakes import LOGPROB, FakeSampler, FakeTrainer, Script
from tests.support.learning import World, world
from tests.support.ledger import COMPLETION, new_turn, sample_counts
from tinker_claw.backends.model_files import source
from tinker_claw.backends.open import open_trainer
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.prices import Price
from tinker_claw.config.load import load
from tinker_claw.config.settings import Budget
from tinker_claw.errors import RefusedError
from tinker_claw.learner import practice
from tinker_claw.learner.gate import Gate
from tinker_claw.learner.health import Health
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.scoring import HintScorer, side_by_side
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.lessons import Lesson, State
from tinker_claw.ledger.prune import from_turn
from tinker_claw.ledger.versions import Void
from tinker_claw.methods import build
from tinker_claw.methods.passes import Prepared
from tinker_claw.policy import Policy, PolicyHolder, Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.telemetry import Telemetry
from tinker_claw.types import (
    Adam,
    Completion,
    HintScores,
    Kind,
    NextState,
    PolicyVersion,
    SamplingParams,
    StepReport,
    StopReason,
    Told,
    Turn,
    Usage,
    Wish,
)

SOLVE = "Solve 3x + 7 = 22."
CODE = "Fix my Python script."
PLAIN = "Write plain sentences."
REPLY = (7, 8)
HINTED = (90, 91)
"""Tokens of every hint, as the tests' renderer writes it."""


class Opinions(FakeTrainer):
    """A trainer whose told base finds every reply less likely, by so many nats a token."""

    def __init__(self, *apart: float) -> None:
        super().__init__(script=Script(REPLY))
        self.apart = [*apart]
        """Divergence after so many optimizer steps; the last one stays."""

    async def base(self) -> Sampler:
        if "base" not in self.samplers:
            self.samplers["base"] = _Told(self)
        return self.samplers["base"]


class _Told(FakeSampler):
    def __init__(self, trainer: Opinions) -> None:
        far = trainer.apart
        super().__init__(
            REPLY,
            ref="base",
            opinion=lambda token: LOGPROB - far[min(trainer.weights, len(far) - 1)],
        )


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
        assert self.w.learner._practice is not None
        return self.w.learner._practice

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
        **changes: Any,
    ) -> int:
        """Hold a session: a first message, and what follows its reply."""
        self.sessions += 1
        session = self.ledger.turns.session(self.name, f"{self.name} {self.sessions}")
        self.ledger.lessons.begin(session, told)
        prompt = (1, 2, 3, *HINTED, 4) if told else (1, 2, 3, 4)
        turn = new_turn(
            self.ledger,
            session_id=session,
            request_text=about,
            policy_version=self.w.policy.current.version.id,
            prompt=prompt,
            completion=replace(COMPLETION, params=SamplingParams(max_tokens=8)),
            hint_at=5 if told else 3,
            told=Told(tuple(told), 3, 2) if told else None,
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

    def steps(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.ledger._db.rows("SELECT * FROM steps")]

    def prompts(self, step: int = 1) -> dict[str, list[int]]:
        rows = self.ledger._db.rows(
            "SELECT purpose, turn_id FROM step_prompts WHERE step_id = ? ORDER BY 2", step
        )
        found: dict[str, list[int]] = {}
        for purpose, turn in rows:
            found.setdefault(purpose, []).append(turn)
        return found


@asynccontextmanager
async def owner(
    path: Path, trainer: FakeTrainer | None = None, **more: Any
) -> AsyncGenerator[Owner]:
    """A world in which the learner runs when told to, and nobody is asked to judge."""
    trainer = trainer or Opinions(0.5, 0.0)
    async with world(path, trainer=trainer, running=False, practice="on", **more) as w:
        yield Owner(w)


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


async def test_a_lesson_accepted_twice_told_is_practised_as_one_step(tmp_path: Path) -> None:
    trainer = Opinions(0.5, 0.4, 0.2, 0.0)
    async with owner(tmp_path, trainer) as o:
        o.wishes()
        o.asks(None, about=CODE)
        o.is_pleased()
        await practised(o)
        (step,) = o.steps()
        assert (step["status"], step["parent"], step["version"]) == ("committed", 0, 1)
        assert step["lesson"] == o.lesson.id
        assert o.lesson.state is State.PROVISIONAL
        assert o.prompts() == {"source": o.said[:1], "practised": o.said}, "of all sorts"
        version = o.w.policy.current.version
        assert (version.id, version.step) == (1, 1)
        assert trainer.weights == trainer.states[version.state_ref or ""] == 5
        for passes in trainer.steps:
            datums = [datum for one in passes for datum in one.datums]
            assert len(datums) == practice.BATCH
            assert {datum.tokens for datum in datums} == {(1, 2, 3, 4, *REPLY)}, "untold"
        assert (1, 2, 3, *HINTED, 4, *REPLY) in o.w.base.scored, "the base is told"


@pytest.mark.parametrize(
    "so_far",
    ["once", "rejected since", "by tools", "two prompts", "dropped", "untold"],
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
            case "by tools":
                o.is_pleased(2, role="tool")
            case "two prompts":
                o.is_pleased(2)
                o.ledger._db.write("UPDATE turns SET hint_at = NULL WHERE id = 1")
            case "dropped":
                o.is_pleased(2)
                o.ledger.lessons.rule("drop", None, lesson)
            case _:
                o.asks()
                o.asks()
        assert o.practice.due() is None


async def test_a_lesson_that_is_followed_now_and_then_is_not_practised(tmp_path: Path) -> None:
    """The weights would learn what the base makes of it, three times in four at most."""
    async with owner(tmp_path) as o:
        lesson = o.wishes()
        for _ in range(2):
            o.asks(-1, told=(lesson,))
        o.is_pleased(6)
        assert o.practice.due() is None, "three in four"
        o.is_pleased(1)
        assert o.practice.due() is not None


async def test_no_prompt_is_private_or_another_users(tmp_path: Path) -> None:
    async with owner(tmp_path) as o:
        o.wishes()
        o.is_pleased()
        Owner(o.w, "somebody else").asks()
        private = o.asks(untrained_because="test")
        o.ledger._db.write(
            "UPDATE sessions SET private = 1 "
            "WHERE id = (SELECT session_id FROM turns WHERE id = ?)",
            private,
        )
        await practised(o)
        first, *told = o.said[:3]
        assert o.prompts() == {"source": [first], "practised": [first, *told]}


async def test_a_third_of_eight_prompts_is_held_out_for_the_check(tmp_path: Path) -> None:
    async with owner(tmp_path) as o:
        o.wishes()
        for _ in range(20):
            o.asks(None)
        o.is_pleased()
        await practised(o)
        found = o.prompts()
        newest = o.said[-practice.NEWEST :]
        assert sorted(found["practised"] + found["checked"]) == newest
        assert len(found["checked"]) == practice.NEWEST // 3
        told = o.w.trainer.samplers["base"].prompts
        assert len(told) == practice.CHECKED, "the told base replies for the check alone"


@pytest.mark.parametrize("why", ["divergence", "gate"])
async def test_what_does_not_pass_is_undone_and_tried_again_with_twice_as_many_prompts(
    tmp_path: Path, why: str
) -> None:
    trainer = Opinions(*[0.5, 0.0] if why == "gate" else [0.5])
    async with owner(tmp_path, trainer) as o:
        if why == "gate":
            o.practice._gate = cast("Gate", _Refuses())
        o.wishes()
        o.is_pleased()
        o.ledger.samples.add(o.asks(None), 1, None)
        await practised(o)
        (step,) = o.steps()
        assert (step["status"], step["void"]) == ("void", Void.UNLEARNED)
        assert (o.lesson.state, o.w.policy.newest.version.id) == (State.TOLD, 0)
        assert trainer.weights == 0
        fewest, most = practice.STEPS
        twice_checked = fewest + 1
        assert len(trainer.steps) == (most if why == "divergence" else twice_checked)
        assert sample_counts(o.ledger)["queued"] == 1
        for _ in range(3):
            o.asks(None)
        assert o.practice.due() is None, "seven prompts"
        o.asks(None)
        assert o.practice.due() is not None, "eight"


async def test_a_practice_that_failed_is_not_repeated_on_the_same_prompts(tmp_path: Path) -> None:
    """Else one with many past prompts, of which a run uses the newest, was billed for several."""
    async with owner(tmp_path, Opinions(0.5)) as o:
        o.wishes()
        for _ in range(40):
            o.asks(None)
        o.is_pleased()
        await practised(o)
        assert len(o.steps()) == 1
        for _ in range(practice.NEWEST - 1):
            o.asks(None)
        assert o.practice.due() is None
        o.asks(None)
        assert o.practice.due() is not None


class _Refuses:
    async def ask(self, candidate: Sampler) -> dict[str, Any]:
        raise RefusedError("as told")


async def test_untold_replies_that_its_owner_accepts_make_a_lesson_learned(tmp_path: Path) -> None:
    async with owner(tmp_path) as o:
        o.wishes()
        o.is_pleased()
        await practised(o)
        for _ in range(practice.JUDGED - 1):
            o.asks()
        o.asks(role="tool")
        assert not o.practice.settle()
        assert o.lesson.state is State.PROVISIONAL, "three by the owner"
        o.asks(-1)
        o.practice.settle()
        assert o.lesson.state is State.LEARNED, "one rejection of four"


@pytest.mark.parametrize("live", [False, True])
async def test_two_rejections_bring_the_telling_back_and_the_version_unless_a_live_step_came(
    tmp_path: Path, live: bool
) -> None:
    async with owner(tmp_path) as o:
        o.wishes()
        o.is_pleased()
        await practised(o)
        weights = o.w.trainer.weights
        if live:
            for value in (1, -1, 1, -1):
                o.ledger.samples.add(o.asks(None), value, None)
        o.asks(-1)
        o.asks()
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
    async with owner(tmp_path) as o:
        o.wishes()
        o.is_pleased()
        await practised(o)
        o.wishes()
        assert not o.practice.settle()
        assert o.lesson.state is State.PROVISIONAL
        o.wishes()
        assert o.practice.settle(), "back to the version before"
        assert o.lesson.state is State.TOLD


async def test_live_samples_wait_and_go_first_afterwards(tmp_path: Path) -> None:
    trainer = SlowTrainer()
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
    trainer = SlowTrainer()
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
                turn = o.said[0] if what == "forgotten" else o.said[1]
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
            if what == "rolled back":  # nothing was against it, so it begins again
                await o.w.until(lambda: o.lesson.state is State.PROVISIONAL)
            else:
                await o.w.until(lambda: o.w.health.learner.state == "waiting")
                assert [one["status"] for one in o.steps()] == ["void"]
                assert trainer.weights == 0


async def test_forgetting_a_prompt_names_the_step_that_practised_on_it(tmp_path: Path) -> None:
    async with owner(tmp_path) as o:
        o.wishes()
        o.is_pleased()
        await practised(o)
        for turn in (o.said[0], o.said[-1]):
            what = from_turn(turn)(o.ledger._db)
            assert [(one.step, one.version, one.before) for one in what.steps] == [(1, 1, 0)]
            assert what.roll_back_to == 0


async def test_rolling_back_before_a_practice_tells_its_lesson_again(tmp_path: Path) -> None:
    async with owner(tmp_path) as o:
        o.wishes()
        o.is_pleased()
        await practised(o)
        assert o.ledger.lessons.practised(1) == {o.lesson.id}
        await undoing(o.w).roll_back(1)
        assert o.lesson.state is State.PROVISIONAL
        await undoing(o.w).roll_back(0)
        assert o.lesson.state is State.TOLD


async def test_a_run_that_the_budget_cannot_pay_is_not_begun(tmp_path: Path) -> None:
    price = Price(prefill=1.0, cached=1.0, sample=1.0, train=1.0)
    left = 1e-3

    def poor(ledger: Ledger, telemetry: Any) -> Spending:
        return Spending(price, ledger.spend, telemetry, budget=Budget(left))

    async with owner(tmp_path, spending=poor) as o:
        o.wishes()
        o.is_pleased()
        with capture_logs() as events:
            for _ in range(2):
                assert o.practice.due() is None
        (said,) = [one for one in events if one["event"] == "practice.too_dear"]
        assert said["usd"] > left


async def test_a_run_is_billed_to_its_step_and_estimated_before(tmp_path: Path) -> None:
    trainer = Opinions(0.5, 0.0)
    trainer.bills = True
    price = Price(prefill=1.0, cached=1.0, sample=1.0, train=1.0)

    def rich(ledger: Ledger, telemetry: Any) -> Spending:
        return Spending(price, ledger.spend, telemetry, budget=Budget(1.0))

    async with owner(tmp_path, trainer, spending=rich) as o:
        trainer.samplers["base"].bills = True
        o.wishes()
        o.is_pleased()
        plan = o.practice.due()
        assert plan is not None
        await practised(o)
        billed = o.ledger.spend.total(purpose="train").usage
        steps = o.ledger._db.column("SELECT DISTINCT step_id FROM spend")
        assert steps == [1]
        assert billed != Usage()
        for name in ("prefill", "sampled", "trained"):
            assert getattr(billed, name) <= getattr(plan.usage, name), name


async def test_what_is_learned_already_is_told_to_the_base_of_the_next_practice(
    tmp_path: Path,
) -> None:
    async with owner(tmp_path) as o:
        o.wishes()
        o.is_pleased()
        await practised(o)
        lesson = o.wishes("Answer in metres.")
        for _ in range(2):
            o.asks(told=(lesson,))
        plan = o.practice.due()
        assert plan is not None
        assert plan.text == f"{PLAIN} Answer in metres."


def test_stops_when_near_by_both_bounds() -> None:
    assert not practice._is_near([0.001, 0.001])
    assert practice._is_near([0.1, 0.05, 0.009, 0.005])
    assert not practice._is_near([0.1, 0.05, 0.02, 0.009]), "not below the bound"
    assert not practice._is_near([0.02, 0.01, 0.008, 0.008]), "not far from the first"
    assert practice._is_near([0.003, 0.002, 0.002]), "there was nothing to learn"


def test_divergence_of_a_reply_is_over_the_samplers_candidates_else_its_tokens() -> None:
    """Against KL by hand: two tokens, two candidates each, as likely as 3 to 1 and 1 to 1."""
    own = ((math.log(0.6), math.log(0.2)), (math.log(0.3), math.log(0.3)))
    done = Completion(
        (7, 8), (own[0][0], own[1][0]), ((7, 9), (8, 9)), own, StopReason.STOP, SamplingParams(8)
    )
    turn = replace(TURN, completion=done)
    other = ((math.log(0.3), math.log(0.4)), (math.log(0.3), math.log(0.15)))
    told = HintScores("", (other[0][0], other[1][0]), other)
    by_hand = [0.75 * math.log(2) - 0.25 * math.log(2), 0.5 * math.log(2)]
    assert practice._apart([turn], [told]) == pytest.approx([fmean(by_hand)])
    sampled = replace(told, targets=())
    assert practice._apart([turn], [sampled]) == pytest.approx([math.log(2) / 2])


TURN = Turn(1, 1, 0, Kind.MAIN, 0, (1, 2, 3, 4), COMPLETION, 3, SOLVE, "done")


@pytest.mark.slow
async def test_the_demos_model_does_untold_what_it_was_told(tmp_path: Path) -> None:
    """With its real trainer, renderer and users: four past messages, and an exam on others."""
    settings = load(["--config", str(ROOT / "configs" / "demo.toml"), "--data-dir", str(tmp_path)])
    model, rng = source(settings), Random("practice")
    renderer = Renderer.load(model.tokenizer, model.family)
    params = SamplingParams(max_tokens=72, stop_tokens=renderer.stop_tokens)

    def asks(number: int, problem: grammar.Problem) -> Turn:
        message = {"role": "user", "content": grammar.first_message(problem)}
        prompt = renderer.prompt([message], hint_message=0)
        return replace(
            TURN,
            id=number,
            prompt=tuple(prompt.tokens),
            hint_at=prompt.hint_at,
            completion=replace(COMPLETION, params=params),
        )

    async with open_trainer(settings, model.weights) as trainer:
        first = await trainer.publish()
        base = Policy(PolicyVersion(0, None, 0, "state", first.ref), first)
        ledger = Ledger(tmp_path)
        telemetry = Telemetry(tmp_path / "metrics.jsonl")
        paid = Spending(Price(), ledger.spend, telemetry)
        parts = LoopParts(
            *(ledger, trainer, await trainer.base(), build("combine"), PolicyHolder(base)),
            *(telemetry, Health(), paid, settings.training, params.max_tokens),
        )
        scorer = HintScorer(parts, renderer, context_tokens=512)
        lesson = Lesson(1, "me", "", "", 1, State.TOLD, None, None, 0.0, 0.0)
        turns = [asks(number, grammar.new_problem(rng)) for number in range(4)]
        plan = practice.Plan(lesson, HINTS_PLAIN[0], turns, (), Usage())
        problems = [grammar.new_problem(rng) for _ in range(48)]

        async def exam(sampler: Sampler) -> float:
            drawn = [sampler.sample(asks(0, one).prompt, params) for one in problems]
            texts = [renderer.decode(done.tokens) for (done,) in await side_by_side(drawn)]
            return fmean(map(grammar.accepts, texts, problems))

        async def train(prepared: Prepared) -> StepReport:
            return await trainer.train_step(prepared.passes, Adam(learning_rate=6e-3))

        before = await exam(first)
        made = await practice.Practice(parts, scorer, None).run(
            plan, Random(0), train, lambda sampler: None
        )
        after = await exam(made.sampler)
        figures = made.figures["practice"]
        ledger.close()
    assert before < 0.5
    assert after > 0.75
    assert figures["after"] < practice.LEARNED < figures["before"]
