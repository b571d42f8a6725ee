"""Turns that cannot be judged are tried, set aside and taken up again; a judge that fails is not
the fault of its turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes import rated
from tests.support.learning import SHORT, Says, World, world
from tests.support.ledger import judgeable, postpone, sql, sql_connection, tries
from tinker_claw.app.main import guarded
from tinker_claw.billing.budget import Spending
from tinker_claw.billing.prices import Price
from tinker_claw.cli import main
from tinker_claw.errors import JudgeError, OutageError
from tinker_claw.judge.prompts import Schema
from tinker_claw.learner.breaker import UNREADABLE, Breaker
from tinker_claw.learner.rollback import RollbackOperations
from tinker_claw.ledger.database import FILE, Rows, open_read_only
from tinker_claw.ledger.feedback import About, Feedback
from tinker_claw.ledger.jobs import TRIES
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.ledger.prune import from_turn
from tinker_claw.ledger.turn_view import read_contents
from tinker_claw.privacy.redact import Redactor
from tinker_claw.retry import Backoff
from tinker_claw.telemetry import Telemetry
from tinker_claw.turn_state import Reason
from tinker_claw.types import Charge, Message, NextState, Verdict, uncharged
from tinker_claw.words import turn_fields

NEVER = Backoff(1e6, 1e6)
LONG = Backoff(600, 600)
RARE = Backoff(0.1, 0.2)
"""Waits between attempts at a turn; others are judged in between."""


class Moody(Says):
    """A judge that answers nothing readable, or nothing at all, while it is in the mood."""

    mood: str | None = None
    at_once = most_at_once = 0

    async def answers(
        self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
    ) -> list[str]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0)
            text = messages[-1]["content"]
            if "BOOM" in text:
                raise ZeroDivisionError("what nobody thought of")
            if self.mood == "down":
                raise JudgeError("the judge is down")
            if self.mood:
                return ["As an AI, I would rather not."] * n
            return await super().answers(messages, n, schema, charge)
        finally:
            self.at_once -= 1


def set_aside(w: World) -> list[int]:
    found = sql(w.ledger).rows("SELECT id FROM turns WHERE reason = ? ORDER BY id", Reason.UNJUDGED)
    return [row["id"] for row in found]


def test_failures_of_one_outage_count_once_and_waits_grow() -> None:
    judge = Breaker(Backoff(10, 40))
    for at, asks_at in ((100, 110), (101, 110), (109, 110), (110, 130), (111, 130), (130, 170)):
        assert not judge.failed(OutageError("away"), at)
        assert judge.asks_at == asks_at
        assert [judge.lets(now, 0) for now in (asks_at - 1, asks_at)] == [False, True]
        assert not judge.lets(asks_at, 1), "one at a time"
    judge.answered()
    assert (judge.trouble, judge.lets(131, 7)) == (None, True)
    assert not judge.failed(OutageError("away"), 200)
    assert judge.asks_at == 210


def test_a_turn_is_to_blame_if_another_succeeded_since_and_most_do() -> None:
    judge = Breaker(NEVER)
    assert not judge.failed(JudgeError("?"), 1), "none has succeeded"
    judge.answered()
    assert judge.failed(JudgeError("?"), 2)
    assert judge.trouble is None, "the judge is not to blame"
    assert not judge.failed(JudgeError("?"), 3), "none since"
    assert not judge.failed(JudgeError("?"), 3)
    judge.answered()
    assert judge.trouble == UNREADABLE
    assert not judge.failed(JudgeError("?"), 4), "most fail"


async def others_are_judged(w: World) -> None:
    before = w.ledger.samples.queued()
    w.turn("YES")
    await w.until(lambda: w.ledger.samples.queued() > before)


async def judge_others_until(w: World, happened: Any) -> None:
    """Judge readable turns, one behind the other: with pauses the judge would fail as a whole."""
    async with asyncio.timeout(60):
        while not happened():
            await others_are_judged(w)


@pytest.mark.parametrize("said", ["MUMBLE", "UNJUDGEABLE"])
async def test_turn_that_alone_cannot_be_judged_is_set_aside_after_three_tries(
    tmp_path: Path, said: str
) -> None:
    async with world(tmp_path, judge_waits=SHORT, rests=SHORT, batch_size=10_000) as w:
        bad = w.turn(said)
        await judge_others_until(w, lambda: set_aside(w) == [bad])
        assert tries(w.ledger, bad) == TRIES
        assert w.ledger.judgements.verdict(bad) is None, "it is no verdict"
        assert judgeable(w.ledger) == []
        assert w.health.judge.state == "ok"
        text = w.telemetry.exposition().decode()
        assert 'tinker_claw_samples_total{fate="set_aside"} 1.0' in text


async def test_no_try_counts_while_nobody_else_is_judged(tmp_path: Path) -> None:
    async with world(tmp_path, judge_waits=SHORT, rests=SHORT, batch_size=10_000) as w:
        bad = w.turn("MUMBLE")
        await w.until(lambda: w.says.asked > 20)
        assert tries(w.ledger, bad) == 0
        assert w.health.judge.state == "failing"
        assert w.health.snapshot(version=0, waiting=0, batch_size=4)["status"] == "degraded"
        await judge_others_until(w, lambda: tries(w.ledger, bad) == 1)
        asked = w.says.asked
        await w.until(lambda: w.says.asked > asked + 20)
        assert tries(w.ledger, bad) <= 2, "nobody else was judged since"


@pytest.mark.parametrize("mood", ["mumbles", "down"])
async def test_judge_that_fails_as_a_whole_is_failing_and_no_turn_is_to_blame(
    tmp_path: Path, mood: str
) -> None:
    says = Moody()
    async with world(
        tmp_path, endpoint=says, judge_waits=SHORT, rests=SHORT, batch_size=10_000
    ) as w:
        await judge_others_until(w, lambda: w.ledger.samples.queued() == 4)
        says.mood = mood
        turns = [w.turn("YES") for _ in range(20)]
        await w.until(lambda: w.health.judge.state == "failing")
        says.most_at_once = 0
        before = sum(tries(w.ledger, turn) for turn in turns)
        await w.until(lambda: says.most_at_once > 0)
        for _ in range(200):
            await asyncio.sleep(0)
            assert w.health.judge.state == "failing", "it has not answered since"
        assert says.most_at_once == 1, "one turn asks at a time"
        assert sum(tries(w.ledger, turn) for turn in turns) == before
        assert before < 4 + 1, "those in hand when it began"
        says.mood = None
        await w.settled()
        await w.until(lambda: w.health.judge.state == "ok")
        assert set_aside(w) == []
        assert w.ledger.samples.queued() == 24


async def test_while_the_ledger_refuses_the_judge_is_not_asked_about_turn_after_turn(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, judge_waits=NEVER, running=False) as w:
        for _ in range(8):
            w.turn("YES")
        sql(w.ledger).rows("PRAGMA query_only = ON")
        judging = asyncio.create_task(w.judging.run())
        await w.until(lambda: w.health.judge.state == "failing")
        for _ in range(200):
            await asyncio.sleep(0)
        assert w.says.asked == 4, "about those in hand when it began"
        judging.cancel()


async def test_accident_over_one_turn_restarts_judging_and_sets_that_turn_aside(
    tmp_path: Path,
) -> None:
    async with world(
        tmp_path, endpoint=Moody(), judge_waits=SHORT, rests=SHORT, batch_size=10_000, running=False
    ) as w:
        part = w.health.judge
        running = asyncio.create_task(guarded("judging", w.judging.run, part, SHORT))
        poison = w.turn("BOOM")
        await w.until(lambda: part.state == "failed")
        assert part.error == "ZeroDivisionError: what nobody thought of"
        assert part.next_try_s is not None
        await judge_others_until(w, lambda: set_aside(w) == [poison])
        await others_are_judged(w)  # after the last restart
        await w.until(lambda: part.state == "ok")
        assert not running.done()
        running.cancel()


async def test_set_aside_turns_are_taken_up_again_while_the_loop_runs(tmp_path: Path) -> None:
    says = Moody()
    async with world(
        tmp_path, endpoint=says, judge_waits=SHORT, rests=RARE, batch_size=10_000
    ) as w:
        bad = [w.turn("MUMBLE YES"), w.turn("MUMBLE YES")]
        await judge_others_until(w, lambda: set_aside(w) == bad)
        undoing = RollbackOperations(w.parts, w.learner, lambda session: None, w.judging.wake)
        sql_connection(w.ledger).execute("UPDATE next_states SET text = 'YES'")  # it can be read
        before = w.ledger.samples.queued()
        assert undoing.judge_again([bad[1], 999]) == [bad[1]]
        await w.until(lambda: w.ledger.samples.queued() == before + 1)
        assert set_aside(w) == bad[:1]
        assert tries(w.ledger, bad[1]) == 0
        assert undoing.judge_again(None) == bad[:1]
        await w.settled()
        assert undoing.judge_again(None) == []


async def test_command_takes_up_what_was_set_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with world(tmp_path, running=False) as w:
        bad = [w.turn("MUMBLE") for _ in range(3)]
        gone = w.turn("MUMBLE")
        for turn in (*bad, gone):
            postpone(w.ledger, turn, "As an AI, I would rather not.", last=True)
        w.ledger.forget(from_turn(gone))

    def run(*command: str) -> tuple[int, str]:
        status = main.main([*command, "--data-dir", str(tmp_path)])
        seen = capsys.readouterr()
        return status, " ".join((seen.out + seen.err).split())

    capsys.readouterr()
    _, explained = run("explain", str(bad[0]))
    assert f"not trained: {Reason.UNJUDGED}" in explained
    assert "failed 3 of 3 tries to judge it | As an AI, I would rather not." in explained
    assert "As an AI" not in run("explain", str(bad[0]), "--no-text")[1]
    status, text = run("rejudge", str(bad[1]))
    assert (status, text.partition(": ")[2]) == (0, f"turn {bad[1]}.")
    status, text = run("rejudge", str(gone), str(bad[1]))
    assert status == 2
    assert f": turn {bad[1]}, turn {gone}" in text
    status, text = run("rejudge")
    assert (status, text.partition(": ")[2]) == (0, f"turn {bad[0]}, turn {bad[2]}.")
    ledger = Ledger(tmp_path)
    assert judgeable(ledger) == bad
    ledger.close()


async def test_looking_at_a_backlog_does_not_ask_the_ledger_about_each_of_its_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = Moody()
    says.mood = "mumbles"
    async with world(tmp_path, endpoint=says, rests=NEVER, judge_waits=NEVER) as w:
        for _ in range(200):
            w.turn("YES")
        await w.until(lambda: says.most_at_once > 0 and says.at_once == 0)
        for _ in range(50):
            await asyncio.sleep(0)
        asked, verdict = list[int](), w.ledger.judgements.verdict

        def counted(turn: int) -> Verdict | None:
            asked.append(turn)
            return verdict(turn)

        monkeypatch.setattr(w.ledger.judgements, "verdict", counted)
        for _ in range(5):
            w.judging.wake()
            for _ in range(50):
                await asyncio.sleep(0)
        assert len(asked) < 20


class Poor(Spending):
    """A budget without room until there is enough."""

    def __init__(self, ledger: Ledger, telemetry: Telemetry) -> None:
        super().__init__(Price(), ledger.spend, telemetry)
        self.waits, self.enough = asyncio.Event(), asyncio.Event()

    async def room(self) -> None:
        self.waits.set()
        await self.enough.wait()


@pytest.mark.parametrize(
    ("score", "forgets", "reward"), [(None, False, 1.0), (None, True, None), (-1.0, True, None)]
)
async def test_turn_that_changes_while_there_is_no_room_to_ask(
    tmp_path: Path, score: float | None, forgets: bool, reward: float | None
) -> None:
    """A verdict saves the question; what is forgotten is shown to no judge and to no teacher."""
    async with world(tmp_path, spending=Poor) as w:
        turn = w.turn("NO")
        about = About("turn", turn)
        if score is not None:
            assert w.ledger.feedback.give("me", about, Feedback(score, "shorter"))
        assert isinstance(w.spending, Poor)
        await asyncio.wait_for(w.spending.waits.wait(), 60)
        if forgets:
            w.ledger.forget(from_turn(turn))
        else:
            assert w.ledger.feedback.give("me", about, Feedback(1.0))
        w.spending.enough.set()
        other = w.turn("NO", user="another")
        await w.settled()
        assert (w.says.asked, w.base.scored) == (1, []), "about the other turn alone"
        rewards = {sample.turn_id: sample.reward for sample in w.ledger.samples.load()}
        assert rewards == {other: -1} | ({} if reward is None else {turn: reward})


async def test_teacher_that_answers_again_is_asked_about_all_that_wait(tmp_path: Path) -> None:
    async with world(tmp_path, judge_waits=NEVER, batch_size=10_000) as w:
        w.base.away = 2
        first, second = (w.turn("NO, HOW it should be") for _ in range(2))
        await w.until(lambda: w.base.away == 0 and w.health.judge.state == "stalled")
        assert w.ledger.samples.queued() == 0
        third = w.turn("NO, HOW it should be")
        await w.until(lambda: w.ledger.samples.queued() == 3)
        samples = w.ledger.samples.load()
        assert {one.turn_id for one in samples} == {first, second, third}
        assert all(one.teacher for one in samples)


@pytest.mark.parametrize("follows", [True, False])
async def test_answer_about_what_is_forgotten_meanwhile_is_kept_by_nobody(
    tmp_path: Path, *, follows: bool
) -> None:
    """Neither the judge's words, which may quote it, nor an error of the ledger is left."""
    asked, may = asyncio.Event(), asyncio.Event()

    class Slow(Moody):
        async def answers(
            self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
        ) -> list[str]:
            if "MUMBLE" in messages[-1]["content"]:
                asked.set()
                await may.wait()
                return ["What am I to make of MUMBLE?"] * n
            return await super().answers(messages, n, schema, charge)

    async with world(tmp_path, endpoint=Slow(), judge_waits=SHORT, rests=SHORT) as w:
        w.turn("YES")
        await w.settled()
        bad = w.turn("MUMBLE", session="s")
        await asyncio.wait_for(asked.wait(), 60)
        gone = w.turn("YES", session="s") if follows else bad
        w.ledger.forget(from_turn(gone))
        may.set()
        await others_are_judged(w)
        assert sql(w.ledger).column("SELECT answer FROM votes WHERE turn_id = ?", bad) == []
        assert w.health.last_error is None or "ledger" not in w.health.last_error
        assert w.health.records.state == "ok"


async def test_a_denied_call_is_a_tool_s_rejection_and_no_judge_is_asked(tmp_path: Path) -> None:
    """What the program says of a reason is no hint and no lesson, and a stopped run is neutral."""
    rejected = "Error: The user doesn't want to proceed with this tool use. The tool use was "
    reason = "rejected (eg. none). To tell you how to proceed, the user said:\nHOW: in French"
    async with world(tmp_path, batch_size=10_000, lessons="on") as w:
        denied = NextState.of_tools([("Bash", rejected + reason)])
        no = w.turn("", role="tool", state=denied, client="Claude Code")
        stop = NextState.of_tools([("exec", "aborted by user after 1.5s")])
        stopped = w.turn("", role="tool", state=stop, client="Codex")
        await w.settled()
        judgements = w.ledger.judgements
        found = [judgements.verdict(no), judgements.verdict(stopped)]
        assert [verdict and verdict.value for verdict in found] == [-1, 0]
        assert (w.says.asked, judgements.hints(no), w.ledger.lessons.of_user()) == (0, (), [])
        assert w.ledger.samples.queued() == 1
        with open_read_only(tmp_path / FILE) as rows:
            told = "\n".join(one for turn in (no, stopped) for one in verdict_of(rows, turn))
        assert told == "-1 by the agent's program\n0 by the agent's program"


async def test_judge_gets_and_leaves_only_redacted_text(tmp_path: Path) -> None:
    secret = "sk-" + "q7Zk2Wm9Xv4Tb8Nc3Rd6"
    asked: list[str] = []

    class Leaks(Says):
        async def answers(
            self, messages: Any, n: int, schema: Schema, charge: Charge = uncharged
        ) -> list[str]:
            asked.append(json.dumps(list(messages)))
            told = rated(-1, "NO, with", f"use {secret} next time", so=f"he said {secret}")
            return [told] * n

    async with world(tmp_path, endpoint=Leaks(), redact=Redactor(["secrets"]).redact) as w:
        w.turn(f"NO, with {secret}")  # as an older release has kept it
        await w.settled()
        assert len(asked) == 1
        assert not any(secret in prompt for prompt in asked)
        kept = sql(w.ledger).rows("SELECT answer FROM votes UNION ALL SELECT text FROM hints")
        assert len(kept) == 4
        assert not any(secret in row[0] for row in kept)
        (sample,) = w.ledger.samples.load()[:1]
        assert sample.teacher is not None
        assert sample.teacher.hint == "use [redacted: API key] next time"


def verdict_of(rows: Rows, turn_id: int) -> list[str]:
    """Values of the fields on a turn's verdict."""
    known = read_contents(rows, turn_id)
    assert known is not None
    names = ("verdict", "hint", "teacher", "failed")
    return [field.value for field in turn_fields(known) if field.name in names]
