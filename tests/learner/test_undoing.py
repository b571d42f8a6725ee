"""Undoing waits for the running step at most: never for a service, nor for money."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.learner.test_rollback import SlowTrainer, learn, undoing
from tests.support.fakes import UNTIL_TOLD, FakeSampler, FakeTrainer
from tests.support.learning import World, world
from tests.support.ledger import sample_counts, sql, step_counts
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.prices import Price
from tinker_claw.config.settings import Budget
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.prune import in_session
from tinker_claw.retry import Backoff
from tinker_claw.telemetry import Telemetry
from tinker_claw.types import Adam, Charge, LossPass, StepReport, uncharged

FOR_HOURS = Backoff(first_s=3600.0, longest_s=3600.0)


def four(w: World) -> None:
    """Add a batch."""
    for number in range(4):
        w.turn("YES" if number % 2 else "NO", session=f"s{number}")


# Neither an outage nor a budget holds up what a user undoes


@pytest.mark.parametrize("recovers", [False, True], ids=["in a step", "in recovery"])
async def test_an_outage_holds_up_nothing_that_a_user_undoes(
    tmp_path: Path, recovers: bool
) -> None:
    trainer = FakeTrainer()
    async with world(tmp_path, trainer=trainer, waits=FOR_HOURS) as w:
        await learn(w, 1)
        trainer.fail["train_step"] = recovers
        trainer.away = {"load_state" if recovers else "train_step": UNTIL_TOLD}
        four(w)
        await w.until(lambda: w.health.learner.state == "stalled")
        async with asyncio.timeout(60):
            forgotten = await undoing(w).forget(in_session("s0", None))
            assert (len(forgotten.turns), trainer.asked["forget"]) == (1, 1)
            await undoing(w).pin(0)
            if not recovers:  # which needs the state that cannot be loaded
                new = await undoing(w).roll_back(0)
                assert w.policy.current.version == new
        assert w.ledger.samples.queued() == 3 * recovers
        assert w.health.learner.state == "stalled", "it still waits"


async def test_a_rollback_during_an_outage_is_what_learning_goes_on_from(tmp_path: Path) -> None:
    """Recovery does not load another state over the one of the rollback."""
    trainer = FakeTrainer()
    async with world(tmp_path, trainer=trainer) as w:
        await learn(w, 2)
        trainer.away = {"train_step": UNTIL_TOLD}
        four(w)
        await w.until(lambda: w.health.learner.state == "stalled")
        new = await undoing(w).roll_back(0)
        trainer.away.clear()
        await learn(w, new.id + 1)
        assert w.policy.newest.version.parent == new.id
        assert trainer.weights == 1, "one step on from version 0"


def budget_of(usd: float) -> object:
    price = Price(1.0, 0.5, 2.0, 4.0)

    def spending(ledger: Ledger, telemetry: Telemetry) -> Spending:
        return Spending(price, ledger.spend, telemetry, budget=Budget(usd))

    return spending


async def test_a_step_without_money_holds_up_nothing_that_a_user_undoes(tmp_path: Path) -> None:
    trainer = FakeTrainer(bills=True, refuse=lambda _: True)
    # A failing step of 80e-6 is spent, and nothing is left for another.
    spending = budget_of(0.00007)
    async with world(tmp_path, trainer=trainer, method="binary", spending=spending) as w:  # type: ignore[arg-type]
        four(w)
        await w.until(lambda: step_counts(w.ledger)["void"] == 1)
        await w.until(lambda: w.spending.paused() is not None)
        async with asyncio.timeout(60):
            await undoing(w).forget(in_session("s0", None))
            await undoing(w).roll_back(0)
        assert sample_counts(w.ledger)["quarantined"] == 0


async def test_a_batch_is_not_blamed_for_what_is_forgotten_during_its_second_step(
    tmp_path: Path,
) -> None:
    trainer = SlowTrainer()

    def first(_: Sequence[LossPass]) -> bool:
        if trainer.asked["train_step"] > 1:
            return False
        trainer.go_on.clear()
        trainer.stepping.clear()
        return True

    trainer.refuse = first
    async with world(tmp_path, trainer=trainer) as w:
        four(w)
        await w.until(lambda: trainer.asked["train_step"] == 1 and trainer.stepping.is_set())
        forgetting = asyncio.create_task(undoing(w).forget(in_session("s0", None)))
        await w.until(lambda: w.ledger.samples.queued() == 3)
        trainer.go_on.set()
        await asyncio.wait_for(forgetting, 60)
        w.turn("NO")
        await w.version(1)
        assert sample_counts(w.ledger)["quarantined"] == 0
        assert trainer.weights == 1


@pytest.mark.parametrize("left", [False, True], ids=["", "left by its client"])
async def test_a_step_over_what_is_forgotten_meanwhile_comes_to_nothing(
    tmp_path: Path, left: bool
) -> None:
    trainer = SlowTrainer()
    async with world(tmp_path, trainer=trainer, waits=FOR_HOURS) as w:
        trainer.go_on.clear()
        four(w)
        await asyncio.wait_for(trainer.stepping.wait(), 60)
        forgetting = asyncio.create_task(undoing(w).forget(in_session("s0", None)))
        await w.until(lambda: w.ledger.samples.queued() == 3)  # at once, beside the step
        assert not forgetting.done(), "the step has it in memory"
        if left:
            forgetting.cancel()
            await asyncio.wait([forgetting])
        trainer.go_on.set()
        assert left or (await asyncio.wait_for(forgetting, 60)).steps == ()
        w.turn("NO")
        await w.version(1)  # it waits for no service
        assert trainer.weights == 1, "of the void step nothing is left"
        errors = sql(w.ledger).column("SELECT error FROM steps WHERE status = 'void'")
        assert errors == ["what it trained on was forgotten meanwhile"]
        query = "SELECT 1 FROM turns JOIN sessions ON sessions.id = session_id "
        assert not sql(w.ledger).rows(f"{query} WHERE key LIKE 'forgotten%'")


# Accidents


async def test_a_sampler_that_cannot_be_closed_ends_no_step(tmp_path: Path) -> None:
    class Clings(FakeSampler):
        async def aclose(self) -> None:
            raise ZeroDivisionError("it cannot be closed")

    async with world(tmp_path) as w:
        w.learner.retire(replace(w.policy.current, sampler=Clings()))
        await learn(w, 2)
        assert step_counts(w.ledger) == {"intent": 0, "committed": 2, "void": 0}


async def test_what_was_said_during_a_step_that_could_not_be_closed_is_heard(
    tmp_path: Path,
) -> None:
    """The disk was full when the step failed, and has room again for the next."""
    trainer = SlowTrainer()
    trainer.fail = {"train_step": 1}
    async with world(tmp_path, trainer=trainer, method="binary") as w:
        trainer.go_on.clear()
        turns = [w.turn("YES" if number % 2 else "NO") for number in range(4)]
        await asyncio.wait_for(trainer.stepping.wait(), 60)
        given = w.ledger.feedback.give("me", About("turn", turns[0]), Feedback(1, ""))
        assert given is not None
        assert given.unused is not None
        db = sql(w.ledger)
        with db.transaction() as tx:
            tx.execute(
                "CREATE TRIGGER full BEFORE UPDATE ON steps WHEN new.status = 'void' "
                "AND new.void = 1 BEGIN SELECT RAISE(ABORT, 'full'); END"
            )
        trainer.go_on.set()
        await w.until(lambda: w.ledger.samples.queued() == 3)
        w.judging.wake()  # as whatever comes in does
        await w.version(1)
        found = db.rows("SELECT reward FROM samples JOIN turns ON turns.id = turn_id ORDER BY 1")
        assert [row["reward"] for row in found] == [-1, 1, 1, 1], "what the user said in the end"
        errors = db.rows("SELECT error FROM steps WHERE status = 'void'")
        assert [row["error"] for row in errors] == ["it could not be closed when it ended"]


async def test_a_step_whose_loss_is_no_number_is_void(tmp_path: Path) -> None:
    """In its metrics the loss would make those of all steps unreadable."""

    class Nonsense(FakeTrainer):
        async def train_step(
            self, passes: Sequence[LossPass], adam: Adam, charge: Charge = uncharged
        ) -> StepReport:
            report = await super().train_step(passes, adam, charge)
            first = self.asked["train_step"] == 1
            return replace(report, losses=(math.nan,) * len(passes)) if first else report

    async with world(tmp_path, trainer=Nonsense()) as w:
        four(w)
        await w.version(1)
        assert step_counts(w.ledger) == {"intent": 0, "committed": 1, "void": 1}
        assert w.trainer.weights == 1
