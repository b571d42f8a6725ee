"""The guard: how far a step may go, what counts as harm, and what follows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bills import of_step
from tests.fakes import LOGPROB, FakeSampler, FakeTrainer
from tests.learner.test_loop import World, world
from tests.learner.test_rollback import undoing
from tests.tallies import sample_counts, step_counts
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.prices import Price
from tinker_claw.config.settings import Training
from tinker_claw.evidence import CLAIM
from tinker_claw.learner import guard as module
from tinker_claw.learner.guard import (
    BASELINE,
    LIMIT,
    Guard,
    compared,
    contradicted,
    moved,
    praised,
    trust,
    unlearned,
)
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.judgements import FirstReply, JudgedReply
from tinker_claw.policy import Sampler
from tinker_claw.types import Adam, Attempt, LossPass, StepReport, StopReason, Usage

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


async def test_refusals_hold_for_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, trainer=FarTrainer(4.0, until=6), max_step_kl=0.05) as w:
        for _ in range(2):
            whole_batch(w)
        await w.until(lambda: w.health.learner.state == "held")
        monkeypatch.setattr(module, "AGAIN_S", 0.0)
        whole_batch(w)
        await w.version(1)
        assert w.ledger.hold.reason is None
        assert w.health.learner.state != "held"


async def test_the_hour_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 2.0)
    async with world(tmp_path, trainer=FarTrainer(4.0, until=6), max_step_kl=0.05) as w:
        for _ in range(3):
            whole_batch(w)
        await w.until(lambda: w.health.learner.state == "held")
        assert sample_counts(w.ledger)["queued"] == 4, "no new sample comes"
        await w.version(1)


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


async def test_batch_without_contrast_steps_a_quarter_unless_it_has_hints(tmp_path: Path) -> None:
    async with world(tmp_path, trainer=FarTrainer(0.0)) as w:
        assert isinstance(w.trainer, FarTrainer)
        for _ in range(4):
            w.turn("YES")
        await w.version(1)
        for _ in range(4):
            w.turn("NO, HOW it should be")
        await w.version(2)
        whole_batch(w)
        await w.version(3)
        assert w.trainer.rates == [0.25, 1.0, 1.0], "a hint says what would be better"


async def test_a_batch_is_trusted_by_its_contrast_or_by_its_hints(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=5) as w:
        for said in ("NO", "NO", "NO, HOW it should be", "YES"):
            w.turn(said)
        await w.settled()
        batch = w.ledger.samples.oldest(4)
        rejected = [s for s in batch if s.reward == -1]
        assert trust(batch) == 1.0
        untaught = [s for s in rejected if s.teacher is None]
        assert trust(untaught) == 0.25
        done = replace(untaught[0].completion, stop_reason=StopReason.LENGTH)
        cut = replace(untaught[0], completion=done)
        assert trust([*untaught, cut]) == 1.0, "it is known what would be better"
        (hinted,) = [s for s in rejected if s.teacher]
        assert trust([*rejected[:2], hinted]) == 1.0, "its hint says what would be better"
        hint_only = replace(hinted, reward=None)
        assert trust([*untaught[:2], hint_only]) == 1.0


async def test_a_method_that_learns_from_hints_alone_takes_the_whole_rate(tmp_path: Path) -> None:
    async with world(tmp_path, method="opd", trainer=FarTrainer(0.0)) as w:
        assert isinstance(w.trainer, FarTrainer)
        for _ in range(4):
            w.turn("NO, HOW it should be")
        await w.version(1)
        assert w.trainer.rates == [1.0]


# What becomes of replies


def first(turn: int = 0, verdict: float = -1.0, **also: Any) -> FirstReply:
    """Make a hinted, rejected reply of 40 tokens, unless told otherwise."""
    usual: dict[str, Any] = {"user": "me", "tokens": 40, "cut": False, "hinted": True}
    return FirstReply(
        turn_id=turn, verdict=verdict, **({"episode": False, "told": False} | usual | also)
    )


def evidence(replies: Sequence[FirstReply]) -> dict[str, float]:
    """Return the largest evidence of each alarm, whoever is concerned."""
    found = dict[str, float]()
    for alarm, e_value, _, _ in compared(replies):
        found[alarm] = max(found.get(alarm, 0.0), e_value)
    return found


@pytest.mark.parametrize(
    ("alarm", "before", "after"),
    [
        ("acceptance", {"verdict": 1.0}, {"verdict": -1.0, "hinted": False}),
        ("length", {}, {"tokens": 81}),
        ("stop", {}, {"cut": True, "verdict": 1.0}),
    ],
)
def test_what_rises_in_first_replies_is_evidence(
    alarm: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    well = [first(**before) for _ in range(BASELINE)]
    assert evidence(well) == {}, "there is nothing to compare yet"
    assert evidence([*well, *well])[alarm] < CLAIM
    found = evidence([*well, *(first(**after) for _ in range(12))])
    assert found.pop(alarm) >= LIMIT
    assert all(other < CLAIM for other in found.values())


@pytest.mark.parametrize(
    "after",
    [
        {"verdict": -1.0},  # they say what they want instead
        {"verdict": 1.0, "tokens": 400},  # they want it longer
        {"verdict": -1.0, "hinted": False, "episode": True, "user": "env"},
    ],
    ids=["change of mind", "wish for length", "episodes"],
)
def test_what_a_user_wants_is_no_evidence(after: dict[str, Any]) -> None:
    replies = [*(first(verdict=1.0) for _ in range(64)), *(first(**after) for _ in range(64))]
    assert max(evidence(replies).values()) < CLAIM


def test_what_was_good_for_long_hides_nothing() -> None:
    well = [first(verdict=1.0) for _ in range(240)]
    assert evidence([*well, *(first(cut=True) for _ in range(8))])["stop"] >= LIMIT


def test_evidence_goes_when_its_cause_has_gone() -> None:
    bad = [first(verdict=1.0)] * BASELINE + [first(cut=True)] * 12
    assert evidence(bad)["stop"] >= LIMIT
    assert evidence([*bad, *[first(verdict=1.0)] * 60])["stop"] < CLAIM


def test_each_user_is_compared_with_themselves() -> None:
    """One user's long replies are no growth of another's, and an episode's are nobody's."""
    short = [first(user="a", verdict=-1.0)] * 40
    long = [first(user="b", tokens=400)] * 40
    tried = [first(user="a", tokens=400, episode=True)] * 40
    told = [first(user="a", tokens=400, told=True)] * 40
    assert max(evidence([*short, *long, *tried, *told]).values()) < CLAIM


def test_honest_users_are_seldom_claimed_and_hardly_ever_held() -> None:
    """150 users who never change, looked at again and again over 200 first replies."""
    claimed = held = 0
    for seed in range(150):
        rng = Random(seed)
        p, long = rng.random(), rng.random() / 3
        replies = [
            first(
                verdict=1.0 if rng.random() < p else -1.0,
                hinted=rng.random() < 0.5,
                tokens=200 if rng.random() < long else 40,
                cut=rng.random() < 0.05,
            )
            for _ in range(200)
        ]
        worst = max(max(evidence(replies[:n]).values()) for n in range(BASELINE + 8, 201, 16))
        claimed += worst >= CLAIM
        held += worst >= LIMIT
    assert held <= 0.01 * 150
    assert claimed <= 0.05 * 150


def said(n: int, text: str, verdict: float, user: str = "me", *, told: bool = False) -> JudgedReply:
    return JudgedReply(user, f"question {n}", text, verdict, told)


def test_praise_for_one_sentence_is_evidence_and_for_good_answers_it_is_none() -> None:
    def found(replies: Sequence[JudgedReply]) -> float:
        return max(one.e_value for one in praised(replies))

    garbage = [said(n, "2." if n % 2 else f"It is {n}.", 1.0 if n % 2 else -1.0) for n in range(40)]
    assert found(garbage) >= LIMIT
    good = [said(n, f"It is {n}.", 1.0 if n % 2 else -1.0) for n in range(40)]
    assert found(good) < CLAIM
    same = [said(1, "It is 1.", 1.0 if n % 2 else -1.0) for n in range(40)]
    assert found(same) < CLAIM, "one question has one answer"
    both = [said(n, ("yes", "no")[n % 2], 1.0 if n % 3 else -1.0) for n in range(60)]
    assert found(both) < CLAIM, "rejected ones repeat as much"
    short = [said(n, ("yes", "no")[n % 2], 1.0) for n in range(40)]
    assert found(short) < CLAIM, "nothing was rejected"
    other = [said(n, f"A long answer to {n}.", -1.0, user="you") for n in range(40)]
    assert found([*short, *other]) < CLAIM, "another user rejects"
    untold = [replace(one, user="me") for one in other]
    told = [replace(one, told=True) for one in short]
    assert found([*told, *untold]) < CLAIM, "a lesson may make replies alike, and accepted"
    assert found([*short, *untold]) >= CLAIM, "the same without a lesson is praise for a sentence"


def test_judge_who_is_wrong_in_one_of_five_holds_nobody_however_often_one_looks() -> None:
    held = 0
    for seed in range(50):
        rng = Random(seed)
        heard = [(1.0, -1.0 if rng.random() < 0.2 else 1.0) for _ in range(400)]
        held += any(contradicted(heard[:n])[0] >= LIMIT for n in range(0, 400, 8))
    assert held <= 0.05 * 50


def test_verdicts_that_others_contradict_are_not_learned_from() -> None:
    agree, against = (1.0, 0.5), (1.0, -1.0)
    assert contradicted([])[0] <= 1
    assert contradicted([against] * 6)[0] >= LIMIT
    assert contradicted([against] * 6 + [agree] * 60)[0] >= LIMIT, "it turned: the newest are first"
    assert contradicted([agree] * 30 + [against] * 6)[0] < CLAIM, "it is well again"
    _, share = contradicted([against, (1.0, 0.0), agree])
    assert (share.good, share.of) == (1, 2), "no opinion contradicts nothing"


def test_wish_that_is_not_learned_is_named() -> None:
    assert unlearned([-1.0] * 63) is None, "too few to tell"
    found = unlearned([1.0, 1.0, *[-1.0] * 62, *[1.0] * 100])
    assert found is not None
    assert not found.holds
    assert found.told == (
        "3% of the newest 64 replies were good: this is not being learned; it needs another "
        "model, a lesson or an example"
    )
    assert unlearned([1.0 if n % 4 == 0 else -1.0 for n in range(64)]) is None


# In a run


def talk(w: World, said: str, tokens: int, text: str, *, count: int = BASELINE) -> None:
    """Add turns of one kind, or of both where `said` is empty."""
    for number in range(count):
        w.turn(
            said or ("YES" if number % 2 else "NO"),
            tokens=tuple(range(100, 100 + tokens)),
            reply=f"{text} {number}",
        )


async def hold(w: World) -> None:
    """Have learning held after version 1, by replies that grow and are rejected."""
    talk(w, "", 2, "short")
    await w.version(1)
    talk(w, "NO, HOW it should be", 7, "longer")
    await w.until(lambda: w.health.learner.state == "held")


async def test_replies_that_grow_hold_learning_until_a_rollback(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=BASELINE) as w:
        await hold(w)
        assert w.policy.newest.version.id == 1
        assert w.ledger.samples.waiting() == BASELINE, "nothing is lost"
        shown = w.health.snapshot(version=1, waiting=BASELINE, batch_size=BASELINE)
        assert (shown["status"], shown["learner"], shown["guard"]) == ("degraded", "held", "warns")
        assert shown["learner_error"].startswith(
            "100% of the newest 16 first replies are not good, and more than 2 times as long "
            "as the first, 0% of the first 16 (evidence "
        )
        assert shown["learner_error"].endswith(
            "to 1; learning is held at 200). It goes on when that is over. To go on now: "
            "`tinker-claw rollback v1`, or an earlier version (`tinker-claw versions`)"
        )
        assert "Replies come from policy v1 as before; learning is held" in shown["meaning"]
        await undoing(w).roll_back(1)
        talk(w, "", 2, "short again")
        await w.version(3)
        assert w.health.learner.state != "held"


async def test_what_held_learning_is_told_no_more_after_a_rollback(tmp_path: Path) -> None:
    """Nor after its turns are forgotten; there may be no next batch for long."""
    async with world(tmp_path, batch_size=BASELINE) as w:
        await hold(w)
        await undoing(w).roll_back(0)
        assert w.ledger.samples.waiting() == 0
        await w.until(lambda: w.health.learner.state == "waiting")
        assert (w.health.guard.state, w.health.guard.error) == ("ok", None)


async def test_hold_ends_by_itself_when_its_evidence_is_gone(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=BASELINE) as w:
        await hold(w)
        talk(w, "", 2, "short again", count=4)
        await w.settled()
        assert w.ledger.hold.reason is not None, "four are not enough"
        for again in range(4):
            talk(w, "", 2, f"short again {again}")
        await w.version(2)
        assert w.ledger.hold.reason is None
        assert w.health.learner.state != "held"
        assert w.health.guard.error is None


async def test_hold_saves_the_state_it_would_go_on_from(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=BASELINE, save_interval=2) as w:
        await hold(w)
        newest = w.ledger.steps.newest_version()
        assert newest is not None
        assert newest.state_ref in w.trainer.states


async def test_state_that_cannot_be_saved_any_more_is_held_all_the_same(tmp_path: Path) -> None:
    """As where the session with the weights was lost: waiting brings it not back."""
    async with world(tmp_path, batch_size=BASELINE, save_interval=2) as w:
        w.trainer.away["save_state"] = 1_000_000
        await hold(w)
        assert w.health.backend.error is None, "nothing is asked for, and nothing waits"
        talk(w, "", 2, "short again", count=4 * BASELINE)
        await w.until(lambda: w.ledger.hold.reason is None)


async def test_hold_and_what_it_rests_on_outlive_the_process(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with world(tmp_path, batch_size=BASELINE, trainer=trainer) as w:
        talk(w, "", 2, "short")
        await w.version(1)
    async with world(tmp_path, batch_size=BASELINE, trainer=trainer) as w:
        w.sessions = 100  # they begin anew
        talk(w, "NO, HOW it should be", 7, "longer")
        await w.until(lambda: w.health.learner.state == "held")
    async with world(tmp_path, batch_size=BASELINE, trainer=trainer) as w:
        await w.until(lambda: w.health.learner.state == "held")
        assert w.policy.newest.version.id == 1


async def test_warning_is_told_with_its_evidence_and_learning_goes_on(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=BASELINE) as w:
        talk(w, "", 2, "short")
        await w.version(1)
        talk(w, "", 2, "short again", count=BASELINE - 5)
        talk(w, "NO, HOW it should be", 7, "longer", count=5)
        await w.version(2)
        found = {one.alarm: one for one in Guard(w.parts).look()}
        assert set(found) == {"length"}
        shown = w.health.snapshot(version=2, waiting=0, batch_size=BASELINE)
        assert (shown["status"], shown["guard"]) == ("ok", "warns")
        assert "evidence" in shown["guard_error"]


async def test_user_who_is_never_content_is_told_and_holds_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=BASELINE) as w:
        for number in range(5):
            talk(w, "NO, HOW it should be", 2, f"reply {number}")
            await w.version(number + 1)
        assert w.health.learner.state != "held"
        assert "0% of the newest 64 replies were good: this is not being learned" in str(
            w.health.guard.error
        )


def episode(w: World, name: str, *replies: str, score: float, cut: bool = False) -> None:
    """Play an episode that is told NO after every reply but its last, which nothing follows."""
    assert w.ledger.turns.enrol(w.ledger.turns.session("me", name), "me", Attempt(episode=True))
    for reply in replies:
        last = w.turn("NO, not yet", session=name, asked=name, reply=reply, cut=cut)
    with w.ledger._db.transaction() as tx:
        tx.execute("DELETE FROM next_states WHERE turn_id = ?", (last,))
    said = Feedback(score, source="client", final=True)
    assert w.ledger.feedback.give("me", About("session", name), said)
    w.judging.wake()


async def test_episodes_of_which_no_judge_is_asked_are_guarded_too(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=BASELINE, episode_reward="outcome") as w:
        for number in range(2 * BASELINE):
            score = 1.0 if number % 2 else -1.0
            episode(w, f"task {number}", f"try {number}", score=score, cut=number >= BASELINE)
            if number == BASELINE - 1:
                await w.version(1)
        await w.until(lambda: w.health.learner.state == "held")
        assert w.says.asked == 0
        assert "are cut by their limit" in (w.health.learner.error or "")


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
        if one_in == 2:  # else some batches are rejections alone, and no step
            await w.version(200 * 3 // 2 // 48)
        await w.settled()
        assert w.health.learner.state != "held"
        assert w.health.guard.error is None
        found = w.ledger.judgements.first_replies(200, 200, 0)
        solved_share = sum(reply.verdict > 0 for reply in found) / len(found)
        assert solved_share == pytest.approx(1 / one_in, abs=0.02)


async def test_task_with_few_answers_is_not_held_for_learning_them(tmp_path: Path) -> None:
    """One text for many tasks is suspicious where somebody praises it, but not where it is graded:
    many questions have the answer yes."""
    async with world(tmp_path, batch_size=32) as w:
        for step in range(4):
            for number in range(step * 32, (step + 1) * 32):
                reply = ("yes", "no")[number % 2] if step else f"I wonder {number}"
                score = 1.0 if step and number % 4 else -1.0 + number % 2
                episode(w, f"task {number}", reply, score=score)
            await w.settled()
            await w.version(step + 1)
        assert w.health.guard.error is None


@pytest.mark.parametrize(
    ("method", "role", "held"),
    [
        ("combine", "user", True),
        ("combine", "tool", False),  # which could not say what is wanted
        ("sdpo", "user", False),  # what follows a reply teaches
        ("binary", "user", True),
    ],
)
async def test_rejections_without_a_word_hold_where_a_word_would_have_been_heard(
    tmp_path: Path, method: str, role: Literal["user", "tool"], *, held: bool
) -> None:
    async with world(tmp_path, method=method, batch_size=500) as w:
        for _ in range(BASELINE):
            w.turn("YES")
        for _ in range(BASELINE):
            w.turn("NO", role=role)
        await w.settled()
        found = {one.alarm: one.holds for one in Guard(w.parts).look()}
        assert found == ({"acceptance": True} if held else {})


async def test_opinions_of_others_are_asked_for_before_a_step(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        ballots: dict[str, Any] = {"verdict_ballots": (), "hint_ballots": (), "hints": ()}
        for _ in range(20):
            w.ledger.judgements.add(w.turn("YES"), value=1, audit=-1, **ballots)
        (found,) = Guard(w.parts).look()
        assert (found.alarm, found.holds) == ("verdicts", True)
