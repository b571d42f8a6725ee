"""The guard: how far a step may go, what counts as harm, and what follows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.personalize.run import told_by
from tests.bills import of_step
from tests.fakes import LOGPROB, FakeSampler, FakeTrainer
from tests.learner.test_loop import World, world
from tests.learner.test_rollback import undoing
from tests.tallies import sample_counts, step_counts
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.prices import Price
from tinker_claw.config.settings import Training
from tinker_claw.learner.guard import (
    FEWEST,
    REJECTED,
    UNTOLD,
    WINDOW,
    Form,
    Guard,
    Replies,
    Ruling,
    contradiction,
    drift,
    moved,
    one_sided,
    rejection,
)
from tinker_claw.ledger.database import FILE
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.judgements import JudgedReply
from tinker_claw.policy import Sampler
from tinker_claw.types import Adam, Attempt, LossPass, StepReport, Usage

# How far a step moves the policy


def test_distance_is_that_between_a_token_and_all_others() -> None:
    assert moved([math.log(0.5)], [math.log(0.5)]) == 0
    # 1/2 ln(1/2 / 1/4) + 1/2 ln(1/2 / 3/4)
    half = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert moved([math.log(0.5)], [math.log(0.25)]) == pytest.approx(half)
    # 0.99 ln 9.9 + 0.01 ln(0.01 / 0.9)
    fallen = 0.99 * math.log(9.9) + 0.01 * math.log(0.01 / 0.9)
    assert moved([math.log(0.99)], [math.log(0.1)]) == pytest.approx(fallen)
    both = moved([math.log(0.5), math.log(0.99)], [math.log(0.25), math.log(0.1)])
    assert both == pytest.approx((half + fallen) / 2)


def test_distance_is_finite_where_a_token_has_become_impossible_or_certain() -> None:
    assert 20 < moved([math.log(0.9)], [-math.inf]) < 60
    assert moved([0.0], [0.0]) == 0
    assert moved([-1e-12], [-3.0]) == pytest.approx(3, rel=1e-3)
    # exp(5) - 1 - 5 would say 142 nats here.
    assert moved([-6.0], [-1.0]) < 0.5


@given(
    st.lists(st.floats(0.01, 1), min_size=4, max_size=4),
    st.lists(st.floats(0.01, 1), min_size=4, max_size=4),
)
def test_distance_is_never_more_than_the_whole_divergence(
    before: list[float], after: list[float]
) -> None:
    p, q = ([x / sum(some) for x in some] for some in (before, after))
    whole = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    for a, b in zip(p, q, strict=True):
        assert 0 <= moved([math.log(a)], [math.log(b)]) <= whole + 1e-9


class FarTrainer(FakeTrainer):
    """A trainer whose versions give every token less logprob, in proportion to the step's rate."""

    def __init__(self, nats: float, *, bills: bool = False, until: int = 1000) -> None:
        """`nats`: loss at the rate of a whole step; `until`: number of steps with a loss."""
        super().__init__(bills=bills)
        self.nats, self.until = nats, until
        self.rates: list[float] = []

    async def train_step(self, passes: Sequence[LossPass], adam: Adam) -> StepReport:
        self.rates.append(adam.learning_rate / 1e-3)
        return await super().train_step(passes, adam)

    async def publish(self) -> Sampler:
        published = await super().publish()
        assert isinstance(published, FakeSampler)
        far = self.nats * self.rates[-1] if 0 < len(self.rates) <= self.until else 0.0
        published._opinion = lambda token: LOGPROB - far
        return published


def whole_batch(w: World) -> None:
    for number in range(4):
        w.turn("YES" if number % 2 else "NO")


def errors(w: World) -> list[str | None]:
    return [row["error"] for row in w.ledger._db.rows("SELECT error FROM steps ORDER BY id")]


async def test_step_that_goes_too_far_is_taken_again_at_half_the_rate(tmp_path: Path) -> None:
    # From 0.61 to 0.22, 0.37 and 0.47: 0.339, 0.117 and 0.036 nats.
    async with world(tmp_path, trainer=FarTrainer(1.0), max_step_kl=0.05) as w:
        assert isinstance(w.trainer, FarTrainer)
        old = w.policy.current
        whole_batch(w)
        await w.version(1)
        assert w.trainer.rates == [1.0, 0.5, 0.25]
        assert w.trainer.weights == 1, "each began at the state before"
        assert w.policy.current.version.parent == old.version.id
        said = errors(w)
        assert said[0] == (
            "the step moved the policy too far: 0.339 nats per token on its batch, and "
            "--max-step-kl is 0.05"
        )
        assert said[2] is None
        assert sample_counts(w.ledger)["trained"] == 4
        (line,) = [json.loads(line) for line in w.metrics.read_text().splitlines()]
        assert (line["rate"], line["moved"]) == (0.25, pytest.approx(0.0362, abs=1e-4))
        candidates = [s for ref, s in w.trainer.samplers.items() if ref.startswith("fake")]
        await w.until(lambda: [s.closed for s in candidates] == [True, True, True, False])
        assert b"tinker_claw_step_kl 0.036" in w.telemetry.exposition()


async def test_candidate_answers_nobody_before_it_was_measured(tmp_path: Path) -> None:
    async with world(tmp_path, trainer=FarTrainer(0.1), max_step_kl=0.05) as w:
        serving = w.policy.current.version.id
        whole_batch(w)
        await w.version(1)
        sampler = w.policy.current.sampler
        assert isinstance(sampler, FakeSampler)
        assert len(sampler.scored) == 4, "every sample, before it answered"
        assert sampler.prompts == []
        assert serving == 0


async def test_batch_that_goes_too_far_at_every_rate_is_set_aside_and_the_next_is_trained(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, trainer=FarTrainer(4.0, until=3), max_step_kl=0.05) as w:
        whole_batch(w)
        await w.until(lambda: sample_counts(w.ledger)["quarantined"] == 4)
        assert w.policy.current.version.id == 0
        assert w.trainer.weights == 0
        whole_batch(w)
        await w.version(1)
        assert sample_counts(w.ledger) == {
            "queued": 0,
            "trained": 4,
            "expired": 0,
            "quarantined": 4,
        }


async def test_service_that_is_away_while_the_candidate_is_scored_is_waited_for(
    tmp_path: Path,
) -> None:
    class Away(FakeTrainer):
        async def publish(self) -> Sampler:
            published = await super().publish()
            assert isinstance(published, FakeSampler)
            published.away = 4 if self.asked["publish"] == 2 else 0
            return published

    async with world(tmp_path, trainer=Away(), max_step_kl=0.05) as w:
        whole_batch(w)
        await w.version(1)
        assert step_counts(w.ledger) == {"intent": 0, "committed": 1, "void": 1}
        assert sample_counts(w.ledger)["trained"] == 4
        assert w.trainer.weights == 1
        candidates = [s for ref, s in w.trainer.samplers.items() if ref.startswith("fake")]
        assert candidates[1].closed, "it never answered anybody"


async def test_two_batches_that_go_too_far_hold_learning(tmp_path: Path) -> None:
    async with world(tmp_path, trainer=FarTrainer(4.0, until=6), max_step_kl=0.05) as w:
        for _ in range(3):
            whole_batch(w)
        await w.until(lambda: w.health.learner.state == "held")
        assert sample_counts(w.ledger)["quarantined"] == 8
        assert sample_counts(w.ledger)["queued"] == 4, "the third batch waits"
        assert "Two batches in a row moved the policy too far" in (w.health.learner.error or "")
        await undoing(w).roll_back(0)
        await w.version(2)
        assert w.health.learner.state != "held"


async def test_bound_of_zero_is_none(tmp_path: Path) -> None:
    async with world(tmp_path, trainer=FarTrainer(9.0), max_step_kl=0) as w:
        whole_batch(w)
        await w.version(1)
        assert isinstance(w.policy.current.sampler, FakeSampler)
        assert w.policy.current.sampler.scored == []


async def test_every_fourth_step_is_measured_where_it_is_billed(tmp_path: Path) -> None:
    async with world(tmp_path, max_step_kl=0.1) as w:
        guard = Guard(w.parts, every=4)
        assert [step for step in range(1, 10) if guard.measures(step)] == [1, 5, 9]
        assert not Guard(replace(w.parts, training=Training(max_step_kl=0))).measures(1)


async def test_what_measuring_bills_is_in_the_steps_bill(
    tmp_path: Path,
) -> None:
    price = Price(1.0, 0.5, 2.0, 4.0)
    async with world(
        tmp_path,
        trainer=FakeTrainer(bills=True),
        max_step_kl=0.1,
        method="binary",
        spending=lambda ledger, telemetry: Spending(price, ledger.spend, telemetry),
    ) as w:
        whole_batch(w)
        await w.version(1)
        told = of_step(w.ledger, 1)
        assert told == Usage(prefill=24, sampled=4, trained=20), "four of six tokens"
        (line,) = [json.loads(line) for line in w.metrics.read_text().splitlines()]
        assert line["billed"] == asdict(told)


async def test_batch_that_is_all_of_one_mind_takes_no_full_step(tmp_path: Path) -> None:
    async with world(tmp_path, trainer=FarTrainer(0.0)) as w:
        assert isinstance(w.trainer, FarTrainer)
        for _ in range(4):
            w.turn("YES")
        await w.version(1)
        for said in ("NO", "NO", "NO", "NO, HOW it should be"):
            w.turn(said)
        await w.version(2)
        whole_batch(w)
        await w.version(3)
        assert w.trainer.rates == [0.25, 1.0, 1.0], "a hint says what would be better"


async def test_one_sided_is_what_has_neither_contrast_nor_hint(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=5) as w:
        for said in ("NO", "NO", "NO, HOW it should be", "YES"):
            w.turn(said)
        await w.settled()
        batch = w.ledger.samples.oldest(4)
        assert one_sided([s for s in batch if s.reward == -1 and s.teacher is None])
        assert not one_sided(batch[:3])
        assert not one_sided([s for s in batch if s.teacher is None])


# What replies are like


def replies(count: int = WINDOW, *, good: float = 0.2, **form: Any) -> Replies:
    """Replies of 40 tokens, unless told otherwise; the accepted ones are like the others."""
    usual = {"tokens": 40.0, "nats": 0.2, "cut": 0.0, "refusals": 0.0}
    usual |= {"questions": 0.1, "tools": 0.3, "alike": 0.05}
    made = Form(count, **(usual | form))
    return Replies(made, made if good * count >= 8 else None, good, praised=0.0, since=1)


FIRST = replies()


@pytest.mark.parametrize(
    ("alarm", "warns", "holds", "rolls_back"),
    [
        ("length", {"tokens": 57}, {"tokens": 81}, {"tokens": 121}),
        ("brevity", {"tokens": 25}, {"tokens": 19}, {"tokens": 9}),
        ("entropy", {"nats": 0.43}, {"nats": 0.54}, {"nats": 0.87}),
        ("stop", {"cut": 0.16}, {"cut": 0.31}, {"cut": 0.51}),
        ("refusals", {"refusals": 0.16}, {"refusals": 0.31}, {"refusals": 0.51}),
        ("questions", {"questions": 0.36}, {"questions": 0.56}, {"questions": 0.81}),
        ("tools", {"tools": 0.61}, None, None),
        ("repetition", {"alike": 0.21}, {"alike": 0.36}, None),
    ],
)
def test_each_alarm_warns_holds_and_rolls_back(
    alarm: str, warns: Any, holds: Any, rolls_back: Any
) -> None:
    said = ((warns, Ruling.WARN), (holds, Ruling.HOLD), (rolls_back, Ruling.ROLL_BACK))
    for form, ruling in said:
        if form is not None:
            (found,) = drift(replies(good=0.1, **form), [FIRST])
            assert (found.alarm, found.ruling) == (alarm, ruling)
            assert "10% are accepted, 20% then" in found.told


def test_well_is_well() -> None:
    assert drift(FIRST, [FIRST]) == []
    assert drift(replies(good=0.9, tokens=30, nats=0.3), [FIRST]) == []


def test_replies_that_grow_are_no_alarm_while_more_of_them_are_accepted() -> None:
    assert drift(replies(good=0.31, tokens=200), [FIRST]) == []


def test_user_who_wants_long_answers_is_no_alarm_and_long_rejected_ones_are() -> None:
    """Nearly all was accepted at first already, so that it cannot rise any more."""
    first = replies(good=0.95)
    assert drift(replies(good=0.95, tokens=200), [first]) == [], "what is accepted is long, too"
    split = replies(good=0.5, tokens=120)
    assert split.accepted is not None
    split = replace(split, accepted=replace(split.accepted, tokens=40))
    assert [f.alarm for f in drift(split, [first])] == ["length"]


def test_what_was_gained_since_the_first_step_excuses_no_later_loss() -> None:
    """More is accepted than at first, but far less than at the best time."""
    now, best = replies(good=0.5, tokens=130), replies(good=0.95)
    assert now.accepted is not None
    now = replace(now, accepted=replace(now.accepted, tokens=40))
    assert drift(now, [FIRST]) == []
    (found,) = drift(now, [FIRST, best, replies(good=0.9)])
    assert (found.alarm, found.ruling) == ("length", Ruling.ROLL_BACK)
    assert found.told.endswith("50% are accepted, 95% then)")


def test_what_would_hold_learning_rolls_back_where_far_less_is_accepted() -> None:
    """Measured: an honest user, and a stop token that three steps had unlearned."""
    best, now = replies(good=0.94, tokens=28), replies(good=0.53, tokens=63, cut=0.3)
    assert now.accepted is not None
    now = replace(now, accepted=replace(now.accepted, tokens=28, cut=0.0))
    found = {one.alarm: one.ruling for one in drift(now, [best])}
    assert found == {"length": Ruling.ROLL_BACK, "stop": Ruling.ROLL_BACK}
    content = replace(now, good=0.8)
    assert {one.ruling for one in drift(content, [best])} == {Ruling.HOLD}


def test_creeping_is_measured_from_its_beginning() -> None:
    creeping = [replies(good=0.0, tokens=40 * 1.2**n) for n in range(6)]
    assert drift(creeping[1], creeping[:1]) == []
    (found,) = drift(creeping[5], creeping[:5])
    assert found.ruling == Ruling.HOLD


def test_praise_excuses_no_disorder() -> None:
    """Measured: praise for replies without the right equation, which end as `#}` and `1111`."""
    (found,) = drift(replies(good=0.67, tokens=18, nats=0.325), [replies(nats=0.11)])
    assert (found.alarm, found.ruling) == ("entropy", Ruling.HOLD)


def test_praise_excuses_no_reply_that_is_the_same_for_everything() -> None:
    praised = replies(good=1.0, alike=0.88, tokens=10)
    (found,) = drift(praised, [FIRST])
    assert (found.alarm, found.ruling) == ("repetition", Ruling.HOLD)
    assert "88% of the replies answer something else, too, before 5%" in found.told
    assert drift(praised, [praised]) == [], "it was like that from the start"


@pytest.mark.parametrize(
    ("accepted", "alike", "ruling"),
    [(0.45, 0.21, Ruling.HOLD), (0.45, 0.16, Ruling.WARN), (0.35, 0.21, Ruling.WARN)],
)
def test_one_reply_for_everything_is_held_sooner_where_it_is_what_is_praised(
    accepted: float, alike: float, ruling: Ruling
) -> None:
    now = replies(good=0.5, alike=alike)
    assert now.accepted is not None
    now = replace(now, accepted=replace(now.accepted, alike=accepted))
    (found,) = drift(now, [FIRST])
    assert (found.alarm, found.ruling) == ("repetition", ruling)


def test_figures_of_replies() -> None:
    def reply(turn: int, text: str, verdict: int, **also: Any) -> JudgedReply:
        usual: dict[str, Any] = {"tokens": 10, "nats": 0.1, "cut": False, "called_tools": False}
        usual["asked"] = f"question {turn}"
        return JudgedReply(turn_id=turn, text=text, verdict=verdict, **(usual | also))  # type: ignore[arg-type]

    judged = [reply(n, f"It is {n}.", -1) for n in range(36, 12, -1)]
    judged += [reply(n, "Two tries.", -1, asked="the same") for n in (12, 11)]
    judged += [reply(10, "Shall I go on?", 1), reply(9, "Soll ich? :)", 1, tokens=90)]
    judged += [reply(8, "I'm sorry, but I can't.", -1), reply(7, "Es tut mir leid, nein.", -1)]
    judged += [reply(6, "same", 0, cut=True), reply(5, "same", 0, called_tools=True)]
    found = Replies.of(judged)
    assert found is not None
    assert found.all == Form(
        replies=32,
        tokens=12.5,
        nats=pytest.approx(0.1),  # type: ignore[arg-type]
        cut=1 / 32,
        refusals=2 / 32,
        questions=2 / 32,
        tools=1 / 32,
        alike=1 / 32,
    )
    assert (found.good, found.accepted, found.since) == (2 / 32, None, 5)
    assert Replies.read(json.loads(json.dumps(asdict(found)))) == found

    assert Replies.of(judged[:31]) is None


@pytest.mark.parametrize(("texts", "share"), [(12, 0.0), (9, 1.0), (1, 1.0)])
def test_calls_fall_together_and_one_call_for_everything_does_not(texts: int, share: float) -> None:
    calls = [
        JudgedReply(n, f"sum {n // 4}", f"call {n % texts}", 10, 0.1, False, True, 1)
        for n in range(36)
    ]
    found = Replies.of(calls)
    assert found is not None
    assert found.all.alike == share


def test_rejections_in_a_row_warn_and_then_hold() -> None:
    for (warns, holds), hinted in ((REJECTED, True), (UNTOLD, False)):
        no = (-1, hinted)
        assert rejection([no] * (warns - 1)) == []
        assert [f.ruling for f in rejection([no] * warns)] == [Ruling.WARN]
        assert [f.ruling for f in rejection([no] * holds)] == [Ruling.HOLD]
        row = [no] * (warns - 2)
        assert rejection([*row, (0, False), *[no] * 200]) == [], "one that was not is enough"


def test_rejections_hold_sooner_where_none_of_them_says_what_would_be_better() -> None:
    silent = [(-1, False)] * UNTOLD[1]
    assert [f.ruling for f in rejection(silent)] == [Ruling.HOLD]
    assert [f.ruling for f in rejection([*silent[1:], (-1, True)])] == [Ruling.WARN]


def test_judge_who_is_wrong_in_one_of_five_holds_nobody_however_often_one_looks() -> None:
    """Checked before each of 400 steps, over the newest 64 opinions."""
    held = 0
    for seed in range(50):
        rng = Random(seed)
        heard = [(1.0, -1.0 if rng.random() < 0.2 else 1.0) for _ in range(400)]
        looks = (contradiction(heard[max(0, n - WINDOW) : n]) for n in range(400))
        held += any(f.ruling == Ruling.HOLD for found in looks for f in found)
    assert held <= 0.05 * 50


def test_verdicts_that_others_contradict_are_not_learned_from() -> None:
    agree, against = (1.0, 0.5), (1.0, -1.0)
    assert contradiction([]) == []
    assert contradiction([against] * 2)[0].ruling == Ruling.WARN
    assert contradiction([against] * 4)[0].ruling == Ruling.HOLD
    assert contradiction([agree] * 30 + [against] * 4 + [(1.0, 0.0)] * 50) == []
    assert [f.ruling for f in contradiction([agree] * 16 + [against] * 8)] == [Ruling.WARN]
    (found,) = contradiction([agree] * 10 + [against] * 14)
    assert found.ruling == Ruling.HOLD
    assert found.told == "14 of 24 verdicts are contradicted by the auditor or the user"


# In a run


def talk(w: World, said: str, tokens: int, text: str) -> None:
    """Add enough turns of one kind, or of both where `said` is empty."""
    for number in range(FEWEST):
        w.turn(
            said or ("YES" if number % 2 else "NO"),
            tokens=tuple(range(100, 100 + tokens)),
            reply=f"{text} {number}",
        )


async def test_replies_that_grow_hold_learning_until_a_rollback(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=FEWEST) as w:
        talk(w, "", 2, "short")
        await w.version(1)
        talk(w, "NO, HOW it should be", 7, "longer")  # 4.5 in the mean
        await w.until(lambda: w.health.learner.state == "held")
        assert w.policy.newest.version.id == 1
        assert w.ledger.samples.waiting() == FEWEST, "nothing is lost"
        assert told_by(tmp_path / FILE)["guard"]["alarm"] == "length"
        shown = w.health.snapshot(version=1, waiting=FEWEST, batch_size=FEWEST)
        assert (shown["status"], shown["learner"], shown["guard"]) == ("degraded", "held", "warns")
        assert shown["learner_error"] == (
            "Replies have grown to 4 tokens from 2 (the newest 64 judged ones; 25% are accepted, "
            "50% then). To go on from here: `tinker-claw rollback v1`; from before: an "
            "earlier version (`tinker-claw versions`)"
        )
        assert "Replies come from policy v1 as before; learning is held until" in shown["meaning"]
        assert b'tinker_claw_guard{alarm="length"} 4.0' in w.telemetry.exposition()
        talk(w, "", 2, "short again")
        await w.settled()
        assert w.policy.newest.version.id == 1, "held it stays, until the user says so"
        await undoing(w).roll_back(1)
        await w.version(3)
        assert w.health.learner.state != "held"
        await w.version(4)


async def test_episodes_of_which_no_judge_is_asked_are_guarded_by_their_outcomes(
    tmp_path: Path,
) -> None:
    async def play(w: World, name: str, tokens: int, score: float) -> None:
        """Play episodes without a group, each of a step and an end."""
        for number in range(FEWEST):
            session = f"{name} {number}"
            assert w.ledger.turns.enrol(
                w.ledger.turns.session("me", session), "me", Attempt(episode=True)
            )
            w.turn(
                "",
                session=session,
                tokens=tuple(range(100, 100 + tokens)),
                reply=f"{name} {number}",
            )
            said = Feedback(score if number % 2 else -score, source="client", final=True)
            assert w.ledger.feedback.give("me", About("session", session), said)
        w.judging.wake()

    async with world(tmp_path, batch_size=FEWEST, episode_reward="outcome") as w:
        await play(w, "short", 2, 1.0)
        await w.version(1)
        await play(w, "longer", 7, 0.0)
        await w.until(lambda: w.health.learner.state == "held")
        assert w.says.asked == 0
        assert "25% are accepted, 50% then" in (w.health.learner.error or "")


def episode(w: World, name: str, *replies: str, score: float) -> None:
    """Play an episode that is told NO after every reply but its last, which nothing follows."""
    assert w.ledger.turns.enrol(w.ledger.turns.session("me", name), "me", Attempt(episode=True))
    for reply in replies:
        last = w.turn("NO, not yet", session=name, asked=name, reply=reply)
    with w.ledger._db.transaction() as tx:
        tx.execute("DELETE FROM next_states WHERE turn_id = ?", (last,))
    said = Feedback(score, source="client", final=True)
    assert w.ledger.feedback.give("me", About("session", name), said)
    w.judging.wake()


@pytest.mark.parametrize("reward", ["steps", "outcome"])
@pytest.mark.parametrize("one_in", [2, 50], ids=["half", "hardly one"])
async def test_task_is_not_held_for_how_rarely_it_is_solved(
    tmp_path: Path, one_in: int, reward: str
) -> None:
    """A success has no next state, so a judge can only reject replies of such a task."""
    async with world(tmp_path, batch_size=48, episode_reward=reward) as w:
        for number in range(200):
            tries = (f"try {number}", f"again {number}")
            if solved := number % one_in == one_in - 1:
                tries = tries[:1]
            episode(w, f"task {number}", *tries, score=1.0 if solved else -1.0)
            if number % 32 == 31:
                await w.settled()
        await w.version(200 * 3 // 2 // 48)
        await w.settled()
        assert w.health.learner.state != "held"
        assert w.health.guard.error is None
        found = Guard(w.parts).replies()
        assert found is not None
        assert found.good == pytest.approx({2: 1 / 3, 50: 1 / 64}[one_in], abs=0.02)


async def test_task_with_few_answers_is_not_held_for_learning_them(tmp_path: Path) -> None:
    """One text for many tasks is suspicious where somebody praises it, but not where it is graded:
    many questions have the answer yes."""
    async with world(tmp_path, batch_size=FEWEST) as w:
        for step in range(4):
            for number in range(step * FEWEST, (step + 1) * FEWEST):
                reply = ("yes", "no")[number % 2] if step else f"I wonder {number}"
                score = 1.0 if step and number % 4 else -1.0 + number % 2
                episode(w, f"task {number}", reply, score=score)
            await w.settled()
            await w.version(step + 1)
        assert w.health.guard.error is None


async def test_hold_and_what_it_rests_on_outlive_the_process(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with world(tmp_path, batch_size=FEWEST, trainer=trainer) as w:
        talk(w, "", 2, "short")
        await w.version(1)
    async with world(tmp_path, batch_size=FEWEST, trainer=trainer) as w:
        talk(w, "NO, HOW it should be", 7, "longer")
        await w.until(lambda: w.health.learner.state == "held")
    async with world(tmp_path, batch_size=FEWEST, trainer=trainer) as w:
        await w.until(lambda: w.health.learner.state == "held")
        assert w.policy.newest.version.id == 1


async def test_grave_harm_lets_the_version_before_answer(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=FEWEST) as w:
        undoing(w)
        talk(w, "", 2, "short")
        await w.version(1)
        talk(w, "", 2, "short still")
        await w.version(2)
        talk(w, "NO, HOW it should be", 40, "endless")
        await w.until(lambda: w.policy.newest.version.id == 3)
        await w.until(lambda: w.health.learner.state == "held")
        newest = w.policy.current.version
        assert (newest.parent, newest.step) == (1, 1), "whose replies raised no alarm"
        assert "the weights of v1 answer, from before that" in (w.health.learner.error or "")
        assert w.trainer.weights == 1


async def test_warning_is_told_and_learning_goes_on(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=FEWEST) as w:
        talk(w, "", 2, "short")
        await w.version(1)
        talk(w, "NO, HOW it should be", 4, "a bit longer")
        await w.version(2)
        shown = w.health.snapshot(version=2, waiting=0, batch_size=FEWEST)
        assert (shown["status"], shown["guard"]) == ("ok", "warns")
        assert shown["guard_error"].startswith("replies have grown to 3 tokens from 2")
        assert b'tinker_claw_guard{alarm="length"} 1.0' in w.telemetry.exposition()
        told = told_by(tmp_path / FILE)["guard"]
        assert told == {"steps": 2, "refused": 0, "warned": {"length": 1}}


async def test_user_who_is_never_content_holds_learning(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=FEWEST) as w:
        for number in range(REJECTED[1] // FEWEST):
            talk(w, "NO, HOW it should be", 2, f"reply {number}")
            await w.until(
                lambda steps=number: (
                    w.policy.newest.version.id > steps or w.health.learner.state == "held"
                )
            )
        assert w.health.learner.state == "held"
        assert "judged replies were all rejected" in (w.health.learner.error or "")
        assert w.ledger.samples.waiting() > 0


async def test_opinions_of_others_are_asked_for_before_a_step(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        ballots: dict[str, Any] = {"verdict_ballots": (), "hint_ballots": (), "hints": ()}
        for _ in range(20):
            w.ledger.judgements.add(w.turn("YES"), value=1, audit=-1, **ballots)
        found = Guard(w.parts).look()
        assert found is not None
        assert (found.alarm, found.ruling) == ("verdicts", Ruling.HOLD)
        assert Guard(w.parts, opinions=lambda after: ()).look() is None
