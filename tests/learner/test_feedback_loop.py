"""User ratings in the loop: no call of the judge, and no reply trained twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.learner.test_judging import NEVER, Moody
from tests.support.fakes import UNTIL_TOLD, FakeSampler, FakeTrainer
from tests.support.learning import SCORING, SHORT, Says, World, world
from tests.support.ledger import (
    judgeable,
    sample_counts,
    sql,
    sql_connection,
    step_counts,
    tries,
)
from tinker_claw.judge.prompts import Schema
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.prune import from_turn
from tinker_claw.types import Charge, Message, TokenLogprobs, Tokens, Vote, uncharged

MANY = 10_000


def say(w: World, turn: int, score: float, text: str = "") -> None:
    given = w.ledger.feedback.give("me", About("turn", turn), Feedback(score, text))
    assert given is not None
    assert given.unused is None, given.unused
    w.judging.wake()


def rewards(w: World) -> dict[int, Vote | None]:
    return {sample.turn_id: sample.reward for sample in w.ledger.samples.load()}


def unanswered(w: World) -> int:
    """Add a turn that waits for its next state."""
    turn = w.turn("YES")
    sql_connection(w.ledger).execute("DELETE FROM next_states WHERE turn_id = ?", (turn,))
    return turn


@pytest.mark.parametrize(("score", "reward"), [(1.0, 1), (0.4, 0.4), (-0.1, -0.1)])
async def test_a_turn_without_a_next_state_is_queued_and_no_judge_is_asked(
    tmp_path: Path, score: float, reward: float
) -> None:
    async with world(tmp_path, method="binary", batch_size=MANY, running=False) as w:
        turn = unanswered(w)
        say(w, turn, score)
        async with asyncio.TaskGroup() as group:
            judging = group.create_task(w.judging.run())
            await w.until(lambda: w.ledger.samples.queued() == 1)
            judging.cancel()
        assert rewards(w) == {turn: reward}
        assert w.says.asked == 0


async def test_zero_says_that_it_is_not_to_be_trained(tmp_path: Path) -> None:
    async with world(tmp_path, batch_size=MANY) as w:
        turn = w.turn("YES")
        await w.until(lambda: w.ledger.samples.queued() == 1)
        say(w, turn, 0)
        await w.until(lambda: w.why_refused(turn) is not None)
        assert w.why_refused(turn) == "neutral verdict, no hint"
        assert w.ledger.samples.queued() == 0
        say(w, turn, 1)
        await w.until(lambda: w.ledger.samples.queued() == 1)


@pytest.mark.parametrize("answered", [False, True])
async def test_a_reason_goes_to_the_teacher_as_a_hint_does(
    tmp_path: Path, *, answered: bool
) -> None:
    async with world(tmp_path, method="combine", batch_size=MANY) as w:
        turn = w.turn("NO, HOW")
        await w.until(lambda: w.ledger.samples.queued() == 1)
        if not answered:
            turn = unanswered(w)
        asked = w.says.asked
        say(w, turn, -1, "say it in two sentences")
        await w.until(lambda: rewards(w).get(turn) == -1 and not judgeable(w.ledger))
        (sample,) = [s for s in w.ledger.samples.load() if s.turn_id == turn]
        assert sample.teacher is not None
        assert sample.teacher.hint == "say it in two sentences"
        assert w.says.asked == asked
        say(w, turn, 1)
        await w.until(lambda: rewards(w).get(turn) == 1)
        (sample,) = [s for s in w.ledger.samples.load() if s.turn_id == turn]
        assert sample.teacher is None, "no hint, the judge's included, where the user is content"


@pytest.mark.parametrize("mood", ["mumbles", "down"])
async def test_turns_that_rest_because_of_the_judge_go_on_at_once(
    tmp_path: Path, mood: str
) -> None:
    says = Moody()
    says.mood = mood
    async with world(tmp_path, endpoint=says, judge_waits=NEVER, rests=NEVER, batch_size=MANY) as w:
        turns = [w.turn("YES") for _ in range(12)]
        await w.until(lambda: w.health.judge.state == "failing")
        for turn in turns:
            say(w, turn, 1)
        await w.until(lambda: w.ledger.samples.queued() == len(turns))
        assert rewards(w) == dict.fromkeys(turns, 1)


async def test_a_rating_right_after_a_failed_try_ends_the_rest_that_it_would_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = Moody()
    says.mood = "down"
    async with world(tmp_path, endpoint=says, judge_waits=NEVER, rests=NEVER, batch_size=MANY) as w:
        turn, postpone = w.turn("YES"), w.ledger.jobs.postpone

        def rated_after(*job: Any) -> bool:
            kept = postpone(*job)
            say(w, turn, 1)
            return kept

        monkeypatch.setattr(w.ledger.jobs, "postpone", rated_after)
        await w.until(lambda: rewards(w) == {turn: 1})


class Slow(Says):
    """A judge's endpoint that answers when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asks, self.may = asyncio.Event(), asyncio.Event()

    async def answers(
        self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
    ) -> list[str]:
        self.asks.set()
        await self.may.wait()
        return await super().answers(messages, n, schema, charge)


@pytest.mark.parametrize(
    ("said", "found"), [("YES", 1), ("Well.", 0), ("UNJUDGEABLE", None), ("MUMBLE", None)]
)
async def test_what_is_said_while_the_judge_thinks_goes_before_its_answer(
    tmp_path: Path, said: str, found: int | None
) -> None:
    says = Slow()
    async with world(
        tmp_path, method="binary", endpoint=says, judge_waits=NEVER, rests=NEVER, batch_size=MANY
    ) as w:
        turn = w.turn(said)
        await says.asks.wait()
        say(w, turn, -1)
        says.may.set()
        await w.until(lambda: rewards(w) == {turn: -1})
        assert tries(w.ledger, turn) == 0
        judged = sql(w.ledger).one("SELECT judged FROM verdicts WHERE turn_id = ?", turn)
        assert judged == found, "what it found is kept"


@pytest.mark.parametrize(("said", "fails"), [("NO, HOW", 0), ("Well, HOW", 1)])
async def test_what_is_said_while_the_teacher_scores_is_scored_anew(
    tmp_path: Path, said: str, fails: int
) -> None:
    asks, may = asyncio.Event(), asyncio.Event()

    class Teacher(FakeSampler):
        async def logprobs(self, tokens: Tokens, **more: Any) -> TokenLogprobs:
            asks.set()
            await may.wait()
            return await super().logprobs(tokens, **more)

    teacher = Teacher((1,))
    trainer = FakeTrainer(samplers={"base": teacher})
    async with world(tmp_path, method=SCORING, batch_size=MANY, trainer=trainer) as w:
        teacher.fail_logprobs = fails
        turn = w.turn(said)
        await asks.wait()
        say(w, turn, 1)
        may.set()
        await w.until(lambda: rewards(w) == {turn: 1})
        assert w.ledger.samples.load()[0].teacher is None


@pytest.mark.parametrize("forgets", [False, True])
async def test_a_turn_that_waits_for_the_service_no_more_leaves_no_outage_behind(
    tmp_path: Path, *, forgets: bool
) -> None:
    async with world(tmp_path, judge_waits=SHORT, batch_size=MANY) as w:
        w.says.away = UNTIL_TOLD
        turn = w.turn("NO")
        await w.until(lambda: w.health.judge.state == "stalled")
        assert w.health.outages.away == {"judging"}
        if forgets:
            w.ledger.forget(from_turn(turn))
        else:
            say(w, turn, 1)
        await w.until(lambda: w.health.judge.state == "ok" and not w.health.outages.away)


@pytest.mark.parametrize("forgets", [False, True])
async def test_a_batch_that_waits_for_its_step_is_taken_anew(tmp_path: Path, forgets: bool) -> None:
    """A step never trains on a reward that was just taken back, nor on what was just forgotten."""
    async with world(tmp_path, method="binary", batch_size=2, running=False) as w:
        turns = [w.turn("YES"), w.turn("YES")]
        for turn in turns:
            say(w, turn, 1)
        async with asyncio.TaskGroup() as group:
            judging = group.create_task(w.judging.run())
            await w.until(lambda: w.ledger.samples.queued() == 2)
            async with w.learner.between_steps():
                learning = group.create_task(w.learner.run())
                for _ in range(20):
                    await asyncio.sleep(0)  # it has its batch, and waits
                if forgets:
                    w.ledger.forget(from_turn(turns[0]))
                    turns = [turns[1], w.turn("NO")]
                else:
                    say(w, turns[0], -1)
            await w.until(lambda: sample_counts(w.ledger)["trained"] == 2)
            judging.cancel()
            learning.cancel()
        found = sql(w.ledger).pairs("SELECT turn_id, reward FROM samples")
        assert found == dict(zip(turns, (1, -1) if forgets else (-1, 1), strict=True))
        assert step_counts(w.ledger) == {"intent": 0, "committed": 1, "void": 0}
        assert (w.trainer.asked["load_state"], w.health.last_error) == (0, None)


@pytest.mark.parametrize("follows", [None, "and what of Rome?"])
async def test_sdpo_is_told_the_reason_whatever_has_followed(
    tmp_path: Path, follows: str | None
) -> None:
    async with world(tmp_path, method="sdpo", batch_size=MANY) as w:
        turn = w.turn(follows) if follows else unanswered(w)
        if follows:
            await w.settled()
            assert w.why_refused(turn) == "no correction"
        say(w, turn, -1, "two sentences")
        await w.until(lambda: rewards(w) == {turn: -1})
        teacher = w.ledger.samples.load()[0].teacher
        assert teacher is not None
        assert teacher.hint == "two sentences"


@pytest.mark.parametrize(
    ("method", "score", "left"),
    [("opd", -1, "no hint"), ("sdpo", -1, "no correction"), ("binary", 1, None)],
)
async def test_a_rating_after_forgetting_teaches_and_asks_about_no_empty_text(
    tmp_path: Path, method: str, score: int, left: str | None
) -> None:
    async with world(tmp_path, method=method, batch_size=MANY) as w:
        rated, forgotten = w.turn("NO, HOW", session="s"), w.turn("NO, HOW", session="s")
        await w.until(lambda: {rated, forgotten} <= rewards(w).keys())
        w.ledger.forget(from_turn(forgotten))
        asked = w.says.asked
        say(w, rated, score)
        await w.until(lambda: not judgeable(w.ledger))
        assert (w.why_refused(rated), w.says.asked) == (left, asked)
        assert rewards(w) == ({} if left else {rated: score})


async def test_sdft_takes_a_reply_that_was_praised_outright_for_its_example(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, method="sdft", batch_size=MANY) as w:
        corrected = w.turn("NO", session="s")
        await w.until(lambda: w.why_refused(corrected) is not None or bool(rewards(w)))
        better = w.turn("YES", session="s", reply="like this")
        sql_connection(w.ledger).execute("DELETE FROM next_states WHERE turn_id = ?", (better,))
        say(w, better, 1)
        await w.until(lambda: w.ledger.judgements.demonstration(corrected) == "like this")
