"""Judging and learning over a real ledger: which turns become samples, and rules of every step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fakes import LOGPROB, FakeSampler, FakeTrainer
from tests.support.learning import (
    HINT,
    SCORING,
    SHORT,
    bad_batch,
    has_token,
    world,
)
from tests.support.ledger import judgeable, sample_counts, sql, step_counts
from tinker_claw.errors import LearningEndedError, OutageError
from tinker_claw.learner.recovery import restore
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.policy import Sampler
from tinker_claw.turn_state import Reason
from tinker_claw.types import (
    HintScores,
    LossPass,
)


async def test_sixteen_samples_make_a_step_and_surplus_stays_queued(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=16) as w:
        for number in range(15):
            w.turn("YES" if number % 2 else "NO")
        await w.settled()
        assert w.policy.current.version.id == 0, "fifteen are not sixteen"
        for _ in range(4):
            w.turn("NO")
        await w.version(1)
        await w.settled()
        assert sample_counts(w.ledger) == {
            "queued": 3,
            "trained": 16,
            "expired": 0,
            "quarantined": 0,
        }
        assert len(w.trainer.steps) == 1


async def test_teacher_scores_the_same_tokens_under_the_spliced_prompt(tmp_path: Path) -> None:
    async with world(tmp_path, method=SCORING) as w:
        w.turn("NO, HOW it should be")
        w.turn("NO")
        silent = w.turn("something that does not tell")
        await w.settled()
        assert w.base.scored == [(1, 2, 3, *HINT, 4, 7, 8)], "of the one with a hint"
        assert w.why_refused(silent) == "neutral verdict, no hint"
        assert w.ledger.samples.queued() == 2
        (sample,) = w.ledger.samples.load()[:1]
        assert sample.teacher is not None
        assert sample.teacher.hint == "do it the other way"
        assert len(sample.teacher.targets) == 2
        assert sample.reward == -1


@pytest.mark.parametrize("rewards", [True, False])
async def test_failed_teacher_leaves_the_reward_and_says_why(
    tmp_path: Path, *, rewards: bool
) -> None:
    async with world(tmp_path, method=SCORING if rewards else "opd") as w:
        w.base.fail_logprobs = 1
        failed = w.turn("NO, HOW it should be")
        await w.settled()
        w.turn("NO, HOW it should be", hint_at=None)
        await w.settled()
        assert w.base.scored == [], "nor is it asked where a hint has no place in the prompt"
        why = f"{Reason.UNSCORED}: scoring fails, as told"
        assert w.untaught(failed) == (why if rewards else None)
        assert w.why_refused(failed) == (None if rewards else why)
        assert [s.reward for s in w.ledger.samples.load()] == ([-1, -1] if rewards else [])


async def test_score_that_is_not_a_number_is_trained_by_nobody(tmp_path: Path) -> None:
    class Odd(FakeTrainer):
        async def base(self) -> Sampler:
            return FakeSampler(opinion=lambda token: math.nan)

    async with world(tmp_path, method=SCORING, trainer=Odd()) as w:
        odd = w.turn("NO, HOW it should be")
        await w.settled()
        why = w.untaught(odd)
        assert why is not None
        assert why.endswith("a score is not a number")
        assert [s.teacher for s in w.ledger.samples.load()] == [None]


async def test_turns_that_the_judge_cannot_take_do_not_hold_up_the_others(tmp_path: Path) -> None:
    async with world(tmp_path, judge_waits=SHORT) as w:
        stuck = [w.turn("UNJUDGEABLE") for _ in range(6)]  # more than are judged at a time
        await w.until(lambda: w.says.asked >= 6)
        for _ in range(4):
            w.turn("GOOD")
        await w.version(1)
        assert judgeable(w.ledger) == stuck


async def test_step_is_committed_with_state_version_and_metrics(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        old = w.policy.current
        for said in ("YES", "NO", "NO, HOW it should be", "YES"):
            w.turn(said)
        await w.version(1)
        version = w.policy.current.version
        assert (version.parent, version.step) == (0, 1)
        assert version.state_ref in w.trainer.states
        assert version.sampler_ref in w.trainer.samplers
        (passes,) = w.trainer.steps
        assert [p.loss for p in passes] == ["ppo", "cross_entropy"]
        await w.until(lambda: old.sampler.closed)  # type: ignore[attr-defined]
        (line,) = [json.loads(line) for line in w.metrics.read_text().splitlines()]
        assert (line["samples"], line["hinted"], line["reward_mean"]) == (4, 1, 0.0)
        assert line["version"] == 1


def breaks(passes: Sequence[LossPass]) -> bool:
    if has_token(666)(passes):
        raise ZeroDivisionError("what nobody thought of")
    return False


class BreaksBehind(FakeTrainer):
    """A trainer whose state after a step with an odd token cannot be saved, by an accident."""

    async def save_state(self, name: str) -> str:
        if self.steps:
            breaks(self.steps[-1])
        return await super().save_state(name)


@pytest.mark.parametrize(
    ("trainer", "error"),
    [
        (lambda: FakeTrainer(refuse=has_token(666)), "the step failed, as told"),
        (lambda: FakeTrainer(refuse=breaks), "ZeroDivisionError: what nobody thought of"),
        (BreaksBehind, "ZeroDivisionError: what nobody thought of"),
    ],
    ids=["refused", "accident", "accident behind the training"],
)
async def test_batch_that_fails_twice_is_set_aside_whole_and_the_next_is_trained(
    tmp_path: Path, trainer: Callable[[], FakeTrainer], error: str
) -> None:
    async with world(tmp_path, trainer=trainer()) as w:
        await bad_batch(w)
        assert step_counts(w.ledger) == {"intent": 0, "committed": 0, "void": 2}
        (said,) = sql(w.ledger).column("SELECT DISTINCT error FROM steps WHERE status = 'void'")
        assert said.startswith(error)
        w.trainer.steps.clear()
        for _ in range(4):
            w.turn("GOOD")
        await w.version(1)
        assert sample_counts(w.ledger) == {
            "queued": 0,
            "trained": 4,
            "expired": 0,
            "quarantined": 4,
        }
        assert w.trainer.weights == 1, "the void steps left nothing in the weights"
        unused = [s for ref, s in w.trainer.samplers.items() if ref != "base"][1:-1]
        await w.until(lambda: all(s.closed for s in unused))


@pytest.mark.parametrize("what", ["train_step", "save_state", "publish"])
async def test_failed_step_is_void_and_tried_again(tmp_path: Path, what: str) -> None:
    async with world(tmp_path) as w:
        w.trainer.fail[what] = 1
        for _ in range(4):
            w.turn("GOOD")
        await w.version(1)
        assert step_counts(w.ledger) == {"intent": 0, "committed": 1, "void": 1}
        assert sample_counts(w.ledger)["trained"] == 4
        assert w.trainer.weights == 1, "the void step left nothing in the weights"
        assert w.health.learner.state in ("waiting", "training")


async def test_what_was_published_for_a_step_that_is_not_committed_is_closed(
    tmp_path: Path,
) -> None:
    """A disk that is full for hours must not fill the samplers, attempt by attempt."""
    async with world(tmp_path) as w:
        with sql(w.ledger).transaction() as tx:
            tx.execute(
                "CREATE TRIGGER full BEFORE INSERT ON versions "
                "BEGIN SELECT RAISE(ABORT, 'full'); END"
            )
        for _ in range(4):
            w.turn("GOOD")
        await w.until(lambda: w.trainer.asked["publish"] > 3)
        published = [s for ref, s in w.trainer.samplers.items() if ref != "base"]
        assert [s.closed for s in published[1:-1]] == [True] * (len(published) - 2)
        assert not published[0].closed, "it serves"
        with sql(w.ledger).transaction() as tx:
            tx.execute("DROP TRIGGER full")
        await w.version(1)


async def test_sampler_that_is_gone_is_published_anew_and_no_sample_is_blamed(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        w.turn("NO")  # waits for others, and is then of an older version: the newest scores it
        for _ in range(4):
            w.turn("GOOD")
        await w.version(1)
        newest = w.policy.newest.sampler
        assert isinstance(newest, FakeSampler)
        del w.trainer.samplers[newest.ref]
        newest.gone = True
        for _ in range(3):
            w.turn("GOOD")
        await w.version(2)
        published, made = (w.ledger.versions.get(n) for n in (1, 2))
        assert published is not None
        assert made is not None
        assert (published.parent, made.parent, made.step) == (0, 1, 2)
        assert sample_counts(w.ledger)["quarantined"] == 0


async def test_lack_of_memory_is_waited_out_and_counts_against_no_batch(tmp_path: Path) -> None:
    trainer = FakeTrainer()

    def full(passes: Sequence[LossPass]) -> bool:
        if trainer.asked["train_step"] < 5:
            raise MemoryError
        return False

    trainer.refuse = full
    async with world(tmp_path, trainer=trainer) as w:
        for _ in range(4):
            w.turn("GOOD")
        await w.version(1)
        assert sample_counts(w.ledger)["trained"] == 4
        outages = sql(w.ledger).column("SELECT void > 1 FROM steps WHERE status = 'void'")
        assert outages == [1] * 4


async def test_batch_with_a_sample_that_does_not_fit_is_set_aside_and_learning_goes_on(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, running=False) as w:
        cut = HintScores("hint", (LOGPROB,), targets=((LOGPROB,) * 4,))  # one row for two tokens
        w.ledger.samples.add(w.turn("NO"), -1, cut)
        trainer = w.trainer
    async with world(tmp_path, trainer=trainer) as w:
        for _ in range(3):
            w.turn("GOOD")
        await w.until(lambda: sample_counts(w.ledger)["quarantined"] == 4)
        for _ in range(4):
            w.turn("GOOD")
        await w.version(1)
        assert sample_counts(w.ledger)["trained"] == 4


async def test_trainer_that_fails_whatever_it_gets_ends_learning_after_two_batches(
    tmp_path: Path,
) -> None:
    """The rest of the queue is not set aside for it, and is trained when the cause is mended."""
    failing = FakeTrainer(refuse=lambda _: True)

    async def until_it_stops() -> None:
        async with world(tmp_path, trainer=failing) as w:
            for _ in range(12):
                w.turn("GOOD")
            await w.until(lambda: False)

    with pytest.raises(ExceptionGroup) as failed:
        await until_it_stops()
    assert failed.group_contains(LearningEndedError, match="2 batches in a row .* as told")
    failing.refuse = lambda _: False
    async with world(tmp_path, trainer=failing) as w:
        await w.version(1)
        assert sample_counts(w.ledger)["quarantined"] == 8
        assert sample_counts(w.ledger)["trained"] == 4


async def test_stale_samples_get_scores_of_the_serving_policy_and_fresh_ones_do_not(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        for _ in range(6):
            w.turn("GOOD")
        await w.version(1)
        current = w.policy.current.sampler
        assert isinstance(current, FakeSampler)
        for _ in range(2):
            w.turn("NO")
        await w.version(2)
        assert len(current.scored) == 2, "two of the four samples were taken with version 0"


async def test_old_samples_expire_before_a_batch_is_taken(tmp_path: Path) -> None:
    async with world(tmp_path, max_staleness=0) as w:
        for _ in range(5):
            w.turn("GOOD")
        await w.version(1)
        await w.until(lambda: sample_counts(w.ledger)["expired"] == 1)
        assert w.ledger.samples.queued() == 0


async def test_uncommitted_step_is_void_after_a_restart(tmp_path: Path) -> None:
    async with world(tmp_path, running=False) as w:
        for _ in range(4):
            w.ledger.samples.add(w.turn("YES"), 1, None)
        w.ledger.steps.begin(0, [s.id for s in w.ledger.samples.load()[:4]])
        trainer = w.trainer
        trainer.weights = 99  # trained, and killed before the commit
    async with world(tmp_path, trainer=trainer) as w:
        assert step_counts(w.ledger)["void"] == 1
        await w.version(1)
        assert trainer.weights == 1


async def test_restart_publishes_anew_where_the_sampler_is_gone(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with world(tmp_path, trainer=trainer) as w:
        for number in range(4):
            w.turn("YES" if number % 2 else "NO")
        await w.version(1)
        gone = w.policy.current.version
    trainer.fail["open"] = 1
    async with world(tmp_path, trainer=trainer) as w:
        now = w.policy.current.version
        assert now.sampler_ref != gone.sampler_ref
        assert now == replace(gone, sampler_ref=now.sampler_ref)
        assert w.policy.current.sampler is trainer.samplers[now.sampler_ref]
    trainer.away["open"] = 1
    with closing(Ledger(tmp_path)) as ledger, pytest.raises(OutageError):
        await restore(ledger, trainer)
