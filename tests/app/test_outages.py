"""Outages of a service: learning and judging wait, blame nobody and go on."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes import UNTIL_TOLD, FakeSampler, FakeTrainer
from tests.support.learning import SHORT, World, bad_batch, has_token, world
from tests.support.ledger import judgeable, sample_counts, sql, step_counts
from tinker_claw.errors import OutageError, SamplerError
from tinker_claw.outages import Outages
from tinker_claw.retry import Backoff
from tinker_claw.telemetry import configure
from tinker_claw.types import LossPass

Events = Callable[[], Counter[str]]


@pytest.fixture
def events() -> Events:
    """Names of all events so far."""
    stream = io.StringIO()
    configure(stream)
    return lambda: Counter(json.loads(line)["event"] for line in stream.getvalue().splitlines())


def void_steps(w: World) -> list[tuple[int, str]]:
    rows = sql(w.ledger).rows(
        "SELECT void > 1 AS outage, error FROM steps WHERE status = 'void' ORDER BY id"
    )
    return [(row["outage"], row["error"]) for row in rows]


def batch(w: World, *said: str) -> None:
    for text in said or ("YES", "NO", "YES", "NO"):
        w.turn(text)


@pytest.mark.parametrize("what", ["scoring", "train_step", "save_state", "publish"])
async def test_outage_anywhere_in_a_step_is_waited_out(
    tmp_path: Path, what: str, events: Events
) -> None:
    async with world(tmp_path, score_fresh=True) as w:
        if what == "scoring":
            sampler = w.policy.newest.sampler
            assert isinstance(sampler, FakeSampler)
            sampler.away = 9  # four ask at once, three times
        else:
            w.trainer.away[what] = 3
        batch(w)
        await w.version(1)
        assert [outage for outage, _ in void_steps(w)] == [1, 1, 1]
        assert all("away" in error for _, error in void_steps(w))
        counts = sample_counts(w.ledger)
        assert (counts["trained"], counts["quarantined"]) == (4, 0)
        tried = 1 if what == "scoring" else 4
        assert w.trainer.asked["train_step"] == tried, "nobody was looked for"
        # Before the weights are touched there is nothing to undo.
        assert w.trainer.asked["load_state"] == (0 if what == "scoring" else 3)
        assert w.trainer.weights == 1, "the void steps left nothing in the weights"
        await w.until(lambda: w.health.learner.state == "waiting")
        assert w.health.outages.error is None
        seen = events()
        assert (seen["backend.lost"], seen["backend.recovered"], seen["step.void"]) == (1, 1, 0)


def snapshot(w: World, waiting: int = 0) -> dict[str, Any]:
    return w.health.snapshot(version=0, waiting=waiting, batch_size=4)


async def test_while_the_service_is_away_nothing_is_lost_and_health_says_what_it_means(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, waits=Backoff(0.005, 0.01)) as w:
        w.trainer.away |= {"train_step": 1, "load_state": UNTIL_TOLD}
        batch(w)
        await w.until(lambda: w.trainer.asked["load_state"] >= 5)
        seen = snapshot(w, w.ledger.samples.queued())
        assert (seen["status"], seen["backend"], seen["learner"]) == ("degraded", "away", "stalled")
        assert seen["backend_error"] == "the service is away for load_state, as told"
        assert seen["learner_attempts"] >= 5
        assert seen["meaning"].endswith("learning waits; 4 samples are queued, none is lost.")
        w.trainer.away.clear()
        await w.version(1)
        assert len(void_steps(w)) == 1, "one step failed; loading a state is none"
        assert w.trainer.weights == 1
        await w.until(lambda: w.health.learner.state == "waiting")
        seen = snapshot(w)
        assert (seen["status"], seen["backend"], seen["learner_attempts"]) == ("ok", "ok", 0)


async def test_a_refusal_of_the_ledger_is_over_though_there_is_no_step(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        sql(w.ledger).rows("PRAGMA query_only = ON")
        w.learner.wake()
        await w.until(lambda: w.health.learner.state == "stalled")
        sql(w.ledger).rows("PRAGMA query_only = OFF")
        await w.until(lambda: w.health.learner.state == "waiting")
        seen = snapshot(w)
        assert (seen["status"], seen["backend"]) == ("ok", "ok")


async def test_waiting_learner_says_when_it_tries_again_and_ends_at_once(tmp_path: Path) -> None:
    async with asyncio.timeout(240), world(tmp_path, waits=Backoff(600, 3000)) as w:
        w.trainer.away["publish"] = 1
        batch(w)
        await w.until(lambda: w.health.learner.state == "stalled")
        assert 300 < snapshot(w)["learner_next_try_s"] <= 600
        assert step_counts(w.ledger)["intent"] == 0


async def test_outages_and_failures_of_one_batch_are_counted_apart(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.trainer.away["train_step"] = 2
        w.trainer.fail["train_step"] = 1
        batch(w)
        await w.version(1)
        assert [outage for outage, _ in void_steps(w)] == [1, 1, 0]
        assert w.trainer.asked["train_step"] == 4, "one failure is tried again"
        assert sample_counts(w.ledger)["quarantined"] == 0


async def test_outage_while_the_state_is_loaded_counts_against_no_batch(tmp_path: Path) -> None:
    trainer = FakeTrainer()

    def refuse(passes: Sequence[LossPass]) -> bool:
        trainer.away["load_state"] = 2
        return has_token(666)(passes)

    trainer.refuse = refuse
    async with world(tmp_path, trainer=trainer) as w:
        w.trainer.away["train_step"] = 1
        await bad_batch(w)
        assert [outage for outage, _ in void_steps(w)] == [1, 0, 0], "it fails twice after that"
        batch(w)
        await w.version(1)
        assert sample_counts(w.ledger)["trained"] == 4


async def test_judging_waits_for_the_service_and_goes_on(tmp_path: Path, events: Events) -> None:
    async with world(tmp_path, judge_waits=SHORT) as w:
        w.says.away = UNTIL_TOLD
        turn = w.turn("YES")
        await w.until(lambda: w.health.outages.attempts("judging") > 2)
        assert w.health.judge.state == "stalled"
        assert judgeable(w.ledger) == [turn]
        assert w.why_refused(turn) is None
        seen = snapshot(w)
        assert seen["status"] == "degraded"
        assert "judging waits" in seen["meaning"]
        w.says.away = 0
        await w.settled()
        verdict = w.ledger.judgements.verdict(turn)
        assert verdict is not None
        assert verdict.value == 1
        await w.until(lambda: w.health.judge.state == "ok")
        assert w.health.outages.away == frozenset()
        names = events()
        assert names["backend.lost"] == names["backend.recovered"] == 1
        assert not names["judge.failing"]


async def test_first_judged_turn_after_an_outage_wakes_the_others(tmp_path: Path) -> None:
    async with world(tmp_path, judge_waits=SHORT, rests=Backoff(600, 600)) as w:
        w.says.away = 2  # the verdicts of two turns
        batch(w, "YES", "YES")
        await w.until(lambda: w.says.away == 0 and w.health.outages.attempts("judging") == 2)
        w.turn("YES")
        await w.settled()
        assert w.ledger.samples.queued() == 3


async def test_teacher_that_is_away_keeps_the_sample(tmp_path: Path) -> None:
    async with world(tmp_path, judge_waits=SHORT) as w:
        w.base.away = UNTIL_TOLD
        turn = w.turn("NO, HOW it should be")
        await w.until(lambda: w.health.outages.attempts("teaching") > 2)
        w.turn("YES")  # no hint, so no teacher
        await w.until(lambda: w.ledger.samples.queued() == 1)
        assert w.health.outages.away == {"teaching"}, "the judge's answer says nothing of it"
        assert judgeable(w.ledger) == [turn]
        asked = w.says.asked
        w.base.away = 0
        await w.settled()
        assert w.ledger.samples.queued() == 2
        assert w.why_refused(turn) is None
        assert w.says.asked == asked, "the verdict was in the ledger"
        assert w.health.outages.away == frozenset()


async def test_answer_of_whatever_kind_ends_an_outage_of_its_kind_and_a_rest() -> None:
    outages = Outages()

    def ask(answer: Exception | None) -> None:
        with outages.watching("serving"):
            if answer:
                raise answer

    for answer in (None, SamplerError("refused")):
        with pytest.raises(OutageError):
            ask(OutageError("away"))
        outages.over("judging")
        assert outages.away == {"serving"}, "another kind of request says nothing of this one"
        resting = asyncio.create_task(outages.rest("serving", 600))
        await asyncio.sleep(0.01)
        assert not resting.done()
        with suppress(SamplerError):
            ask(answer)
        assert outages.away == frozenset()
        await asyncio.wait_for(resting, 60)
