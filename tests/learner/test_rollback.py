"""Pins and rollbacks while the loop runs: serving version, training state, expired samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.fakes import FakeTrainer
from tests.support.learning import World, world
from tests.support.ledger import sample_counts, sql, step_counts
from tinker_claw.errors import BackendError, OutageError, UndoError
from tinker_claw.learner.recovery import restore, restore_pin
from tinker_claw.learner.rollback import RollbackOperations
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.versions import pinned, read_versions
from tinker_claw.types import Adam, Charge, LossPass, StepReport, uncharged


def undoing(w: World) -> RollbackOperations:
    return RollbackOperations(w.parts, w.learner, lambda session: None, w.judging.wake)


async def learn(w: World, to: int) -> None:
    """Add four good turns a step, until version `to` is the newest."""
    while w.policy.newest.version.id < to:
        at = w.policy.newest.version.id
        for number in range(4):
            w.turn("YES" if number % 2 else "NO")
        await w.until(lambda at=at: w.policy.newest.version.id > at)


class SlowTrainer(FakeTrainer):
    """A trainer whose steps end when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.stepping, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def train_step(
        self,
        passes: Sequence[LossPass],
        adam: Adam,
        charge: Charge = uncharged,
    ) -> StepReport:
        self.stepping.set()
        await self.go_on.wait()
        return await super().train_step(passes, adam, charge)


async def test_rollback_answers_and_learns_on_from_that_state_as_a_new_version(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        await learn(w, 3)
        new = await undoing(w).roll_back(1)
        first = w.ledger.versions.get(1)
        assert first is not None
        assert (new.id, new.parent, new.step) == (4, 1, 1)
        assert (new.state_ref, new.sampler_ref) == (first.state_ref, first.sampler_ref)
        assert w.policy.current.version == new
        assert w.policy.current.sampler.ref == first.sampler_ref
        assert w.trainer.weights == 1, "the trainer has the state of version 1"
        assert sample_counts(w.ledger)["trained"] == 12
        assert w.ledger.samples.queued() == 0, "nothing is trained again"
        await learn(w, 5)
        assert w.trainer.weights == 2, "one step on from there"
        assert w.policy.current.version.parent == 4
        live = [r["id"] for r in read_versions(sql(w.ledger)) if r["live"]]
        assert live == [0, 1, 4, 5]


async def test_samples_of_versions_that_are_left_expire_and_those_of_the_line_stay(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        w.turn("GOOD")  # of version 0
        await w.settled()
        await w.until(lambda: w.ledger.samples.queued() == 1)
        for _ in range(4):  # makes version 1 of the first four, one of version 0 is left
            w.turn("GOOD")
        await w.version(1)
        await w.settled()
        w.turn("GOOD")  # of version 1
        await w.until(lambda: w.ledger.samples.queued() == 2)
        unjudged = w.turn("UNJUDGEABLE")
        await undoing(w).roll_back(0)
        assert sample_counts(w.ledger) == {
            **{"queued": 1, "trained": 4, "expired": 1, "quarantined": 0},
        }
        # A reply of an abandoned version may become a sample later; it expires then.
        w.ledger.samples.add(unjudged, 1, None)
        w.learner.wake()
        await w.until(lambda: sample_counts(w.ledger)["expired"] == 2)


async def until_it_steps(w: World, trainer: SlowTrainer) -> None:
    """Learn version 1, and enter the step to version 2."""
    await learn(w, 1)
    trainer.go_on.clear()
    trainer.stepping.clear()
    for _ in range(4):
        w.turn("GOOD")
    await asyncio.wait_for(trainer.stepping.wait(), 60)


@pytest.mark.parametrize("taken_back", [False, True])
async def test_rollback_during_a_step_answers_at_once_and_leaves_what_the_step_makes(
    tmp_path: Path, taken_back: bool
) -> None:
    trainer = SlowTrainer()
    async with world(tmp_path, trainer=trainer) as w:
        await until_it_steps(w, trainer)
        rolling = asyncio.create_task(undoing(w).roll_back(0))
        await w.until(lambda: w.policy.current.version.id == 0)
        assert not rolling.done(), "it waits for the step"
        assert "load_state" not in trainer.asked
        if taken_back:  # it changes nothing
            rolling.cancel()
            await asyncio.wait([rolling])
            assert w.policy.current.version.id == 1
            trainer.go_on.set()
            await w.version(2)
            assert w.policy.current.version.parent == 1
            return
        trainer.go_on.set()
        new = await asyncio.wait_for(rolling, 60)
        assert (new.id, new.parent) == (3, 0), "the step made version 2, which is left behind"
        assert w.policy.current.version == new
        assert trainer.weights == 0
        assert step_counts(w.ledger) == {"intent": 0, "committed": 2, "void": 0}


@pytest.mark.parametrize(
    ("fault", "what", "error"),
    [
        ("fail", "open", UndoError),
        ("fail", "load_state", UndoError),
        ("away", "load_state", OutageError),
    ],
)
async def test_rollback_that_fails_leaves_all_as_it_was(
    tmp_path: Path, fault: str, what: str, error: type[Exception]
) -> None:
    async with world(tmp_path) as w:
        await learn(w, 2)
        await undoing(w).pin(1)
        getattr(w.trainer, fault)[what] = 1
        with pytest.raises(error, match="v0 cannot be loaded" if error is UndoError else "away"):
            await undoing(w).roll_back(0)
        assert (w.policy.current.version.id, pinned(w.ledger.rows)) == (1, 1)
        assert w.trainer.weights == 2
        await learn(w, 3)
        assert w.policy.newest.version.parent == 2
        assert w.trainer.weights == 3


async def test_pinned_version_answers_while_learning_goes_on(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await learn(w, 1)
        undo = undoing(w)
        await undo.pin(0)
        assert w.policy.current.version.id == 0
        await learn(w, 3)
        assert w.policy.current.version.id == 0
        assert w.ledger.versions.newest() == w.policy.newest.version
        assert await undo.unpin() == 3
        assert w.policy.current.version.id == 3


async def test_pin_outlives_the_process_and_a_rollback_ends_it(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with world(tmp_path, trainer=trainer) as w:
        await learn(w, 2)
        await undoing(w).pin(1)
    ledger = Ledger(tmp_path)
    reopened = await restore_pin(ledger, trainer)
    assert reopened is not None
    assert reopened.version.id == 1
    assert (await restore(ledger, trainer)).version.id == 2
    ledger.versions.roll_back(reopened.version)
    assert await restore_pin(ledger, trainer) is None
    assert (await restore(ledger, trainer)).version.id == 3
    assert trainer.weights == 1
    ledger.close()


async def test_pin_ends_where_its_weights_are_gone_and_at_no_other_failure(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with world(tmp_path, trainer=trainer) as w:
        await learn(w, 1)
        await undoing(w).pin(0)
    ledger = Ledger(tmp_path)
    trainer.fail["open"] = 1
    with pytest.raises(BackendError, match=r"v0 is pinned and cannot be opened: .*`tinker"):
        await restore_pin(ledger, trainer)
    reopened = await restore_pin(ledger, trainer)  # at the next start
    assert reopened is not None
    assert reopened.version.id == 0
    del trainer.samplers[reopened.version.sampler_ref]
    assert await restore_pin(ledger, trainer) is None
    assert [one["id"] for one in read_versions(sql(ledger)) if one["serving"]] == [1]
    ledger.close()


async def test_start_whose_state_is_gone_says_how_to_go_on_from_an_earlier_one(
    tmp_path: Path,
) -> None:
    trainer = FakeTrainer()
    async with world(tmp_path, trainer=trainer) as w:
        await learn(w, 2)
    ledger = Ledger(tmp_path)
    first, newest = ledger.versions.get(1), ledger.versions.newest()
    assert first is not None
    assert newest is not None
    del trainer.states[str(newest.state_ref)]
    with pytest.raises(BackendError, match="`tinker-claw rollback vN` continues from an earlier"):
        await restore(ledger, trainer)
    ledger.versions.roll_back(first)
    assert (await restore(ledger, trainer)).version.parent == first.id
    assert trainer.weights == 1
    ledger.close()
