"""Judges that send anything: no answer ends judging, counts as a verdict, or blames a turn."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.bad_judges import (
    ENDLESS,
    MARK,
    READ,
    SLOW,
    UNREAD,
    BadJudge,
    bad_judge,
    bad_judge_beside,
)
from tests.support.clients import ask
from tests.support.fakes import FakeTrainer
from tests.support.learning import SHORT, World, world
from tests.support.ledger import judgeable, read, tries
from tests.support.lives import Life, product, until
from tests.support.stories import run
from tinker_claw.app.main import guarded
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.errors import JudgeError
from tinker_claw.judge.endpoints import RETRIES, HttpEndpoint
from tinker_claw.ledger.database import FILE
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.jobs import TRIES
from tinker_claw.retry import Backoff
from tinker_claw.turn_state import Reason

NEVER = Backoff(1e6, 1e6)


def endpoint(judge: BadJudge, timeout_s: float = 60.0) -> HttpEndpoint:
    retries = replace(RETRIES, longest_s=0.01)
    return HttpEndpoint(judge.url, JudgeSettings(), retries=retries, answer_s=timeout_s)


async def sampled(w: World) -> None:
    """Check that another turn is judged well."""
    before = w.ledger.samples.queued()
    w.turn("YES")
    await w.until(lambda: w.ledger.samples.queued() > before)


@pytest.mark.parametrize("how", [*UNREAD, ENDLESS])
async def test_whatever_a_judge_sends_the_next_turn_is_judged(tmp_path: Path, how: str) -> None:
    async with (
        bad_judge() as judge,
        endpoint(judge) as http,
        world(tmp_path, endpoint=http, judge_waits=SHORT, rests=NEVER, batch_size=99) as w,
    ):
        await sampled(w)
        bad = w.turn(f"{MARK} {how}")
        await w.until(lambda: tries(w.ledger, bad) == 1)
        assert w.ledger.judgements.verdict(bad) is None
        await sampled(w)
        assert w.health.judge.state == "ok"
        assert judgeable(w.ledger) == [bad], "it is tried again"


@pytest.mark.parametrize("how", READ)
async def test_an_odd_answer_that_holds_votes_is_read(tmp_path: Path, how: str) -> None:
    async with (
        bad_judge() as judge,
        endpoint(judge) as http,
        world(tmp_path, endpoint=http, batch_size=99) as w,
    ):
        odd = w.turn(f"{MARK} {how}")
        await w.settled()
        verdict = w.ledger.judgements.verdict(odd)
        assert verdict is not None
        assert verdict.value == 1
        assert w.ledger.judgements.hints(odd) == (), "nothing that could be followed"
        assert w.ledger.samples.queued() == 1


async def test_an_answer_that_trickles_has_a_deadline_as_a_whole() -> None:
    async with bad_judge() as judge, endpoint(judge, timeout_s=0.3) as http:
        judge.spoilt = SLOW
        with pytest.raises(JudgeError, match=r"no whole answer within 0.3 s"):
            await http.answers([{"role": "system", "content": ""}], 1, {})


async def test_a_judge_that_does_not_answer_for_long_is_failing_until_it_does(
    tmp_path: Path,
) -> None:
    async with (
        bad_judge() as judge,
        endpoint(judge) as http,
        world(tmp_path, endpoint=http, silent_s=0.1, batch_size=99) as w,
    ):
        w.turn(f"{MARK} {SLOW}")
        await w.until(lambda: w.health.judge.state == "failing")
        said = "the judge has not answered for 0.1 s; its answer is waited for"
        assert w.health.judge.error == said
        await sampled(w)
        await w.until(lambda: w.health.judge.state == "ok")
        assert judge.asked[SLOW] == 1, "it was not asked again meanwhile"


@pytest.mark.parametrize("lessons", ["off", "on"])
async def test_once_learning_has_ended_the_judge_is_asked_for_lessons_only(
    tmp_path: Path, lessons: str
) -> None:
    failing = FakeTrainer(refuse=lambda _: True)
    async with (
        bad_judge() as judge,
        endpoint(judge) as http,
        world(
            tmp_path, trainer=failing, endpoint=http, running=False, batch_size=4, lessons=lessons
        ) as w,
        asyncio.TaskGroup() as group,
    ):
        judging = group.create_task(w.judging.run())
        for _ in range(8):
            w.turn("GOOD")
        await guarded("learning", w.learner.run, w.health.learner)  # ends: two batches are refused
        assert w.health.learner.ended
        await w.settled()
        asked = judge.asked.total()
        unjudged, rated = w.turn("YES"), w.turn("YES")
        assert w.ledger.feedback.give("me", About("turn", str(rated)), Feedback(1.0))
        w.judging.wake()
        await w.until(lambda: rated not in judgeable(w.ledger))
        if lessons == "off":
            assert judgeable(w.ledger) == [unjudged], "a later start judges it"
        else:
            await w.settled()
        assert judge.asked.total() == asked + (lessons == "on")
        judging.cancel()


FAILED = "SELECT tries FROM jobs"
SAMPLES = "SELECT COUNT(*) FROM samples"
ASIDE = f"SELECT COUNT(*) FROM turns WHERE reason = '{Reason.UNJUDGED}'"


def talk(running: Life, session: str, said: str) -> None:
    """Send two turns; the second contains what is said after the first."""
    first = {"role": "user", "content": "How many are 2 and 3?"}
    reply = {"role": "assistant", "content": ask(running, session, [first])}
    ask(running, session, [first, reply, {"role": "user", "content": said}])


def end_rest(data: Path) -> None:
    """Let the minutes pass that a turn rests between two tries, which a restart does not end."""
    with closing(sqlite3.connect(data / FILE)) as ledger, ledger:
        assert ledger.execute("SELECT MIN(due_at) FROM jobs").fetchone()[0] > time.time()
        ledger.execute("UPDATE jobs SET due_at = 1")


@pytest.mark.slow
def test_product_outlives_every_answer_and_sets_a_turn_aside_over_three_lives(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    due = 0

    def sampled(running: Life, session: str) -> None:
        nonlocal due
        due += 1
        talk(running, session, "Thanks, perfect.")
        until(lambda: read(data, SAMPLES) == [(due,)], session)

    with bad_judge_beside() as judge:
        flags = ("--judge-url", judge.url, "--batch-size", "99")
        for life in range(1, TRIES):
            with product(data, *flags) as running:
                if life == 1:
                    talk(running, "bad", f"{MARK} refusal")
                    until(lambda: running.health()["judge"] == "failing")
                    assert running.health()["status"] == "degraded"
                sampled(running, f"life {life}")
                until(lambda life=life: read(data, FAILED) == [(life,)])
                running.kill()
            end_rest(data)
        with product(data, *flags) as running:
            sampled(running, "last life")
            until(lambda: read(data, ASIDE) == [(1,)])
            for how in ("bad gzip", "brackets", "gzip bomb"):  # the others: in the loop, above
                talk(running, how, f"{MARK} {how}")
                until(lambda how=how: judge.asked[how], how)
                sampled(running, f"after {how}")
            judge.spoilt = "gzip"  # with votes in it, whatever is asked
            done = run("rejudge", "1", directory=data)
            assert done.stdout == "Judged again now: turn 1.\n", done.stderr
            until(lambda: read(data, f"{SAMPLES} WHERE turn_id = 1") == [(1,)])
            assert running.stop() == 0
    names = [event["event"] for event in running.events()]
    assert "part.failed" not in names
    assert names.count("sample.set_aside") == 1
