"""The guard: how far a step may go, what counts as harm, and what follows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

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
from tinker_claw.learner import guard as module
from tinker_claw.learner.guard import (
    Guard,
    moved,
    trust,
)
from tinker_claw.policy import Sampler
from tinker_claw.types import Adam, LossPass, StepReport, StopReason, Usage

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
