"""The experiment's parts, and one run of it through the real product.

Rule: a language model that plays or scores is a stub behind real HTTP; texts from outside are as
hostile as they can be.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response

from examples.demo import DemoError
from examples.demo.client import Client, Request, connected
from examples.demo.judge import HINTS_AI, Case
from examples.demo.options import ROOT
from examples.demo.recipe import grammar
from examples.demo.recipe.grammar import Problem
from examples.demo.scoring import FIRST_WISH
from examples.demo.user import OPENING
from examples.personalize import estimate, figures, judges, report
from examples.personalize.controls import CONTROLS, Presses
from examples.personalize.experiment import TINY, Experiment, Goal, Run, load
from examples.personalize.figures import Row, Spread
from examples.personalize.openclaw import Agent, ThroughOpenClaw
from examples.personalize.played import Model, Played, ScoredExam
from examples.personalize.run import Surroundings, Together, perform, written
from examples.personalize.scenario import Scenario, read
from tinker_claw.app.server import in_background
from tinker_claw.judge.prompts import hint_messages, verdict_messages
from tinker_claw.learner.gate import REFUSED
from tinker_claw.ledger.ledger import Ledger
from tinker_claw.types import NextState

FOLDER = TINY.parent
PROBLEM = Problem("Nora", "pears", "add", 3, 4)
STUDENT = read("student", FOLDER / "tiny" / "student.toml")
TEACHER = read("teacher", FOLDER / "tiny" / "teacher.toml")
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>\n```\n| # [a](javascript:b) `'


def replaced(experiment: Experiment, **changes: Any) -> Experiment:
    return replace(experiment, **changes)


# What is run


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_experiment_that_is_shipped_can_be_read(path: Path) -> None:
    experiment = load(path)
    runs = experiment.runs()
    assert len({run.name for run in runs}) == len(runs)
    assert all(experiment.cast(run) for run in runs)


def test_runs_come_seed_by_seed_so_that_one_that_was_cut_short_has_as_many_of_each() -> None:
    seeds = [run.seed for run in load(TINY).runs()]
    assert seeds == sorted(seeds)
    assert load(TINY).runs()[:2] == [
        Run("combine", "student", "learns", 0),
        Run("binary", "student", "learns", 0),
    ]


def test_whoever_chooses_methods_or_scenarios_gets_these_and_no_controls() -> None:
    chosen = load(TINY, methods=["binary"], scenarios=["plain", "never"], seeds=2)
    assert [run.name for run in chosen.runs()] == [
        "binary-plain-0",
        "binary-never-0",
        "binary-plain-1",
        "binary-never-1",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('color = "red"', "there is no color"),
        ('user = "nobody"', "user must be one of"),
        ('about = "x"', "needs corrections, or a persona"),
        ('corrections = ["a"]\nforbid = ["("]', "is no pattern"),
        ('corrections = ["a"]\nscored = "model"', "needs the rule in words"),
        ('questions = "nowhere.jsonl"', "cannot be read"),
        ('user = "plain"\nlater = "nowhere.toml"', "cannot be read"),
        ("= 3", "cannot be read"),
    ],
)
def test_a_scenario_that_cannot_be_is_a_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "one.toml"
    path.write_text(text)
    with pytest.raises(DemoError, match=complaint):
        read("one", path)


def test_a_rule_in_a_file_says_what_is_right(tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text(
        '{"question": "How many?", "answer": "3 and 4 #### 7"}\nAnd how?\n'
    )
    path = tmp_path / "short.toml"
    path.write_text(
        'questions = "asked.jsonl"\nopening = "Hello. {question}"\nmax_words = 4\n'
        'forbid = [\'^- \']\nrequire = ["please"]\ncorrections = ["Shorter!"]\n'
        '[[skills]]\nname = "sums"\nquestion = "1 + 1?"\nexpect = "^2$"\n'
    )
    scenario = read("short", path)
    with_answer, without = scenario.questions
    assert scenario.opens(with_answer) == "Hello. How many?"
    assert scenario.accepts("Please take 7", with_answer)
    for wrong in ("Please take 17", "take 7", "please\n- 7", "please take these 7 now"):
        assert not scenario.accepts(wrong, with_answer)
    assert scenario.accepts("please guess", without)
    exam = scenario.exam(2)
    assert exam.questions()[-1] == "1 + 1?"
    assert "Shorter!" in scenario.speaker().wants.corrections


async def test_whoever_changes_their_mind_has_another_rule_and_the_first_one_is_watched() -> None:
    scenario = read("short", FOLDER / "mind" / "short.toml")
    plain, short = "so, " + "we take 3 and 4, " * 4 + "3 + 4 = 7.", "**x** 3 + 4 = 7"
    user, exam = scenario.speaker(), replace(scenario.exam(2), asked=(PROBLEM, PROBLEM), skills={})
    for step, first, second in ((15, True, False), (16, False, True)):
        assert user.rule(step).accepts(plain, PROBLEM) is first
        assert user.rule(step).accepts(short, PROBLEM) is second
        score = await exam.grade([plain, plain], step)
        assert (score.accepted, score.shares[FIRST_WISH]) == (first, 1.0)
    think = judges.honest([scenario])
    for words in user.rule(16).corrections:
        value, hint = think(Case("user", words, words), Random(0))
        assert value == -1
        assert hint in read("sixty", FOLDER / "mind" / "sixty.toml").hints
    assert read("opening", FOLDER / "mind" / "opening.toml").speaker().later is OPENING


def test_the_ceiling_asks_the_same_with_the_rule_behind_it() -> None:
    plain, told = STUDENT.exam(3).questions(), STUDENT.exam(3, told=True).questions()
    assert told[:3] == [f"{question}\n\n{STUDENT.told}" for question in plain[:3]]
    assert told[3:] == plain[3:]


def test_the_tiny_teacher_wants_title_steps_and_box_and_the_right_equation() -> None:
    good = "**Worked answer**\n1. Note 3 and 4.\n2. Then 3 + 4 = 7.\n**Final Answer:** \\boxed{7}"
    assert TEACHER.accepts(good, PROBLEM)
    for part in ("**", "1. ", "2. ", "\\boxed", "3 + 4 = 7"):
        assert not TEACHER.accepts(good.replace(part, ""), PROBLEM)


# Judges


def case(said: str, reply: str = "a reply") -> Case:
    return Case("user", said, f"{reply}\n{said}")


def test_an_honest_judge_knows_the_words_of_its_scenarios() -> None:
    think, rng = judges.honest([STUDENT, TEACHER]), Random(0)
    for said in TEACHER.corrections:
        assert think(case(said), rng) == (-1, TEACHER.hints[0])
    assert think(case(TEACHER.terse[0]), rng) == (-1, None)
    assert think(case(TEACHER.approvals[0]), rng) == (1, None)
    value, hint = think(case(grammar.CORRECTIONS[0]), rng)
    assert value == -1
    assert hint is not None


def test_a_flipped_judge_says_the_opposite_and_hints_at_another_rule() -> None:
    think, rng = judges.flipped(judges.honest([STUDENT]), STUDENT.other_hints), Random(0)
    assert think(case(grammar.CORRECTIONS[0]), rng) == (1, None)
    value, hint = think(case(grammar.APPROVALS[0]), rng)
    assert value == -1
    assert hint in HINTS_AI


def test_a_shuffled_judge_says_as_often_what_it_says_but_of_other_replies() -> None:
    rng = Random(0)
    think = judges.shuffled(judges.honest([STUDENT]), STUDENT.other_hints)
    truth, said = list[bool](), list[int]()
    for number in range(600):
        good = rng.random() < 0.3
        words = grammar.APPROVALS if good else grammar.CORRECTIONS
        one = case(rng.choice(words), f"reply {number}")
        value, hint = think(one, rng)
        assert think(one, rng) == (value, hint), "its votes on one reply agree"
        assert hint is None or hint in STUDENT.other_hints
        truth.append(good)
        said.append(value)
    assert sum(v == 1 for v in said) / 600 == pytest.approx(0.3, abs=0.08)
    praised = [v == 1 for v, good in zip(said, truth, strict=True) if good]
    others = [v == 1 for v, good in zip(said, truth, strict=True) if not good]
    assert sum(praised) / len(praised) == pytest.approx(sum(others) / len(others), abs=0.12)


async def test_a_lying_judge_answers_the_products_own_prompts_the_same_each_time() -> None:
    """The marks differ from prompt to prompt; the judge's opinion of a case does not."""
    from examples.demo.judge import answer

    think, rng = judges.shuffled(judges.honest([STUDENT]), STUDENT.other_hints), Random(1)
    state = NextState("user", grammar.CORRECTIONS[0])
    for number in range(20):
        answer([dict(m) for m in verdict_messages("q", f"r{number}", state)], rng, think)
    votes = {
        answer([dict(m) for m in verdict_messages("q", "r", state)], rng, think) for _ in range(9)
    }
    hints = {
        answer([dict(m) for m in hint_messages("q", "r", state)], rng, think) for _ in range(9)
    }
    assert len(votes) == len(hints) == 1


async def test_users_who_press_thumbs_do_so_of_every_reply_when_the_session_is_over() -> None:
    pressed = list[dict[str, Any]]()
    app = FastAPI()

    @app.post("/v1/chat/completions")
    def chat(body: dict[str, Any], response: Response) -> dict[str, Any]:
        response.headers["x-request-id"] = f"reply to {body['messages'][-1]['content']}"
        return {"choices": [{"message": {"content": "x"}}]}

    @app.post("/v1/feedback")
    def feedback(body: dict[str, Any]) -> dict[str, Any]:
        pressed.append(body)
        return {}

    async def sessions(url: str, share: float, many: int) -> None:
        async with connected(url, of=partial(Presses, share=share)) as client:
            for number in range(many):
                for said in ("a", "b", "thanks"):
                    message = {"role": "user", "content": f"{number} {said}"}
                    await client.ask(Request((message,), f"s-{number}"))
                assert share < 1 or len(pressed) == 2 * number, "not before it is over"
                await client.tell(f"s-{number}", [False, True])

    async with in_background(app) as url:
        await sessions(url.removesuffix("/v1"), 1.0, 2)
        assert pressed == [
            {"response_id": f"reply to {number} {said}", "score": score}
            for number in range(2)
            for said, score in (("a", -1), ("b", 1))
        ]
        pressed.clear()
        await sessions(url.removesuffix("/v1"), 0.25, 60)
    assert len(pressed) / 120 == pytest.approx(0.25, abs=0.12)


# A model that plays and scores


@dataclass
class Stub:
    """A language model of a few lines behind real HTTP."""

    says: Callable[[list[dict[str, str]]], str]
    asked: list[list[dict[str, str]]] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        def chat(body: dict[str, Any]) -> Any:
            if self.refusals:
                return Response(status_code=self.refusals.pop())
            self.asked.append(body["messages"])
            message = {"role": "assistant", "content": self.says(body["messages"])}
            usage = {"prompt_tokens": 10, "completion_tokens": 2}
            return {"choices": [{"index": 0, "message": message}], "usage": usage}

        return app


@asynccontextmanager
async def model(stub: Stub) -> AsyncGenerator[Model]:
    async with (
        in_background(stub.app()) as url,
        httpx.AsyncClient(base_url=url + "/") as http,
    ):
        yield Model(http, "stub", pause_s=0.001)


def plays(messages: list[dict[str, str]]) -> str:
    """Play a user who is content with text without bold; think first, as models do."""
    last = messages[-1]["content"].rsplit("The assistant:", 1)[-1]
    content = "**" not in last
    said = "Great, please save it." if content else "No, that looks like an AI wrote it."
    return "<think>{hm}</think>Here: " + json.dumps({"content": content, "say": said})


PLAYED = Scenario("played", persona="You are a student.", told="No bold text.", forbid=("x",))


async def test_a_played_user_hears_the_whole_conversation_and_fences_replies() -> None:
    stub = Stub(plays)
    async with model(stub) as played:
        talk = Played(PLAYED, played).begin(Random(0), 0)
        first = await talk.hears(f"**bold** {HOSTILE}")
        second = await talk.hears("plain 3 + 4 = 7")
    assert not first.content
    assert "AI" in first.said
    assert second.content
    system, shown = (message["content"] for message in stub.asked[-1])
    mark = system.split("mark\n")[1].split(";")[0]
    assert shown.count(f"<<{mark}>>") == 4
    assert shown.index(talk.opening) < shown.index("**bold**") < shown.index(first.said)
    assert played.tokens == {"prompt": 20, "completion": 4}


async def test_what_is_no_answer_is_asked_again_and_then_told() -> None:
    answers = iter(["hello", "[1, 2]", '{"content": true, "say": ""}'])
    stub = Stub(lambda _: next(answers), refusals=[503, 429])
    async with model(stub) as played:
        reaction = await Played(PLAYED, played).begin(Random(0), 0).hears("x")
        assert reaction.content
        assert reaction.said, "an empty message would be no next state"
        stub.says = lambda _: "never"
        with pytest.raises(DemoError, match="no JSON object"):
            await played.object("a", "b")
        stub.refusals = [401]
        with pytest.raises(DemoError, match="refused with 401"):
            await played.object("a", "b")


async def test_a_scorer_sees_wish_question_and_reply_and_nothing_of_what_made_it() -> None:
    stub = Stub(
        lambda messages: json.dumps({"score": 0.25 if "**" in messages[1]["content"] else 1})
    )
    scenario = replace(STUDENT, scored="model")
    async with model(stub) as scorer:
        exam = ScoredExam(scenario.exam(2), scenario, scorer)
        count = len(exam.questions())
        scores = [await exam.grade(["**a**", "b", *[""] * (count - 2)], v) for v in (0, 16)]
    assert [score.accepted for score in scores] == [0.625, 0.625]
    unmarked = [
        "\n".join(m["content"] for m in asked).replace(_mark(asked), "") for asked in stub.asked
    ]
    assert sorted(unmarked[:2]) == sorted(unmarked[2:])
    assert len(unmarked) == 4


def _mark(messages: list[dict[str, str]]) -> str:
    return messages[1]["content"].split("<<")[1].split(">>")[0]


async def test_a_score_that_is_no_number_is_an_error() -> None:
    async with model(Stub(lambda _: '{"score": "high"}')) as scorer:
        exam = ScoredExam(STUDENT.exam(1), STUDENT, scorer)
        with pytest.raises(ExceptionGroup) as raised:
            await exam.grade([""] * len(exam.questions()), 0)
    assert "gave no score" in str(raised.value.exceptions[0])


async def test_one_exam_of_several_people_has_the_mean_and_the_share_of_each() -> None:
    exam = Together({"student": STUDENT.exam(2), "teacher": TEACHER.exam(2)})
    count = len(exam.questions())
    problems = STUDENT.exam(2).asked
    replies = [f"so, {problem.equation}." for problem in problems] + [""] * (count - 2)
    score = await exam.grade(replies, 0)
    assert (score.accepted, score.shares["student"], score.shares["teacher"]) == (0.5, 1.0, 0.0)
    assert score.shares["sums"] == 0.0


STAND_IN = """\
import json, pathlib, sys
said = sys.argv[sys.argv.index("-m") + 1]
session = sys.argv[sys.argv.index("--session-id") + 1]
with open("said.txt", "a") as file:
    file.write(json.dumps([session, said]) + "\\n")
print("a line of the log")
print(json.dumps({"payloads": [{"text": "I have read it."}, {"text": None}]}))
"""


async def test_a_user_talks_through_openclaw_whose_workspace_has_the_homework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "claw.py").write_text(STAND_IN)
    agent = Agent((sys.executable, "claw.py"), tmp_path)
    nobody = Client(httpx.AsyncClient(base_url="http://127.0.0.1:9"))
    client = ThroughOpenClaw(nobody, agent)
    first = {"role": "user", "content": "3 + 4? $(touch owned); -m x"}
    reply = {"role": "assistant", "content": "7"}
    assert await client.ask(Request((first,), "s-1")) == "I have read it."
    await client.ask(
        Request((first, reply, {"role": "user", "content": "Save it."}), "s-1", last=True)
    )
    (_, opening), (session, saving) = map(
        json.loads, (tmp_path / "said.txt").read_text().splitlines()
    )
    assert (tmp_path / "homework" / "s-1.txt").read_text().strip() == first["content"]
    assert "homework/s-1.txt" in opening
    assert (session, saving) == ("s-1", "Save it. (The file is homework/s-1.txt.)")
    with pytest.raises(DemoError, match="did not answer"):
        await client.ask(Request((first,), "exam", kind="side"))
    (tmp_path / "claw.py").write_text("raise SystemExit(3)")
    with pytest.raises(DemoError, match="status 3"):
        await client.ask(Request((first,), "s-2"))


# What came out


def ended(
    out: Path,
    run: Run,
    scores: dict[int, float],
    *,
    firsts: tuple[bool, ...] = (False, True, True, True),
    text: str = "a reply",
    shares: dict[str, float] | None = None,
    **more: Any,
) -> None:
    """Write the report of a possible run."""
    points = [
        {"step": step, "sessions": 9 * step, "score": score, "sums": 1.0, "lists": 0.9}
        | {"work": 1.0, "alike": 0.1, "characters": 80.0 - step, **(shares or {})}
        for step, score in scores.items()
    ]
    points.append(points[-1] | {"at_sessions": 36})
    folder = out / run.name
    folder.mkdir(parents=True)
    found = {
        "curve": points,
        "whole": True,
        "learner": "waiting",
        "error": None,
        "firsts": list(firsts),
        "verdicts": {"+1": 5, "-1": 6},
        "hints": 4,
        "usd": 0.0,
        "overruled": 0,
        "replies": {"0": [[text, text]], str(max(scores)): [[text, text]]},
        "hint_texts": [[text, 4]],
        "seconds": 60.0,
        "commit": "abc",
        "date": "2026-11-22",
        "cores": 2,
        "load": 1.0,
        **more,
    }
    (folder / "report.json").write_text(json.dumps(found))


def tiny(**changes: Any) -> Experiment:
    return replaced(load(TINY), **changes)


def test_sessions_are_counted_to_the_third_right_first_reply_in_a_row() -> None:
    assert figures.until_right([True, True, False, True, True, True, False]) == 6
    assert figures.until_right([True, True, False, True]) is None
    row = Row("m", "s", "learns", (0, 1), ({"firsts": [True] * 3}, {"firsts": [False] * 9}))
    spread, never = row.until_right() or pytest.fail("there are runs")
    assert (spread.mean, never) == (6.0, 1)


def test_an_interval_is_students_and_one_seed_has_none() -> None:
    spread = Spread.of([1.0, 2.0, 3.0])
    assert spread is not None
    assert spread.half == pytest.approx(4.30 / 3**0.5)
    one = Spread.of([1.0])
    assert one is not None
    assert one.half is None
    assert str(one) == "1.00"


def test_goals_are_met_or_not_or_not_run(tmp_path: Path) -> None:
    for seed, at_8 in ((0, 0.8), (1, 0.9)):
        ended(tmp_path, Run("combine", "student", "learns", seed), {0: 0.2, 8: at_8, 12: 0.9})
        ended(tmp_path, Run("combine", "student", "flipped", seed), {0: 0.2, 8: 0.1, 16: 0.0})
    experiment = tiny()
    found = figures.rows(experiment, tmp_path)
    told = [figures.reached(goal, found, 128).met for goal in experiment.goals]
    # 0.85 after 8; after 12, where it ended, 0.90 is not 0.93; no teacher; skills; both controls;
    # nobody who is to be held, and no ledger that counts alarms
    assert told == [True, False, None, True, True, None, *[None] * 4]
    risen = [Row("combine", "student", "flipped", (0,), found[0].runs[:1])]
    goal = Goal("combine student flipped", 8, within=2)
    assert figures.reached(goal, risen, 128).met is False


def guarded(steps: int, alarm: str | None = None, **more: Any) -> dict[str, Any]:
    """Figures of gate and guard, as read from a ledger."""
    held = {} if alarm is None else {"held": "a reason", "alarm": alarm}
    return {"guard": {"steps": steps, "refused": 0, "warned": {}} | held | more}


@pytest.mark.parametrize(
    ("steps", "alarm", "sessions", "met"),
    [
        (4, "verdicts", 48, True),
        (5, "verdicts", 48, False),
        (4, "gate", 48, False),
        (4, "verdicts", 49, False),
        (4, None, 48, False),
    ],
)
def test_a_liar_is_to_be_held_in_time_and_by_name_with_every_seed(
    tmp_path: Path, steps: int, alarm: str | None, sessions: int, met: bool
) -> None:
    lying = "flipped, audited"
    ended(tmp_path, Run("combine", "student", lying, 0), {0: 0.2}, **guarded(1, "verdicts"))
    run, firsts = Run("combine", "student", lying, 1), (False,) * sessions
    ended(tmp_path, run, {0: 0.2, 4: 0.1}, firsts=firsts, **guarded(steps, alarm))
    found = figures.rows(tiny(), tmp_path)
    (goal,) = (goal for goal in tiny().goals if goal.of.endswith(lying))
    assert figures.reached(goal, found, 128).met is met
    lines = "\n".join(report.markdown(report.contents(tiny(), tmp_path, "")))
    assert f"{'2' if alarm else '1'} of 2 | verdicts, {alarm or '-'} | 1, {steps} | 4, " in lines
    assert "cannot be told from a user of the opposite taste" in lines


@pytest.mark.parametrize(("refused", "met"), [(0, True), (2, False)])
def test_false_alarms_are_those_of_runs_in_which_nobody_lies(
    tmp_path: Path, refused: int, met: bool
) -> None:
    warned: dict[str, Any] = {"warned": {"length": 3}, "refused": refused}
    ended(tmp_path, Run("combine", "student", "learns", 0), {0: 0.2}, **guarded(300, **warned))
    ended(tmp_path, Run("binary", "student", "learns", 0), {0: 0.2}, **guarded(100, "length"))
    ended(tmp_path, Run("combine", "student", "garbage", 0), {0: 0.2}, **guarded(1, "praise"))
    (goal,) = (goal for goal in tiny().goals if goal.what == "false alarms")
    found = figures.rows(tiny(), tmp_path)
    assert figures.reached(goal, found, 128).met is met
    content = report.contents(tiny(), tmp_path, "")
    assert content["alarms"] == (
        f"In 400 steps of 2 honest runs there were {1 + refused} false alarms: 1 holds of learning "
        f"(length 1), and {refused} versions that the gate refused. What a version had lost indeed "
        "counts as one, too. Steps before which there was a warning: length 3."
    )
    report.write(tiny(), tmp_path, "")
    assert content["alarms"] in (tmp_path / report.PAGE).read_text()


def test_what_a_report_of_an_earlier_commit_does_not_say_its_ledger_does(tmp_path: Path) -> None:
    run = Run("combine", "student", "learns", 0)
    ended(tmp_path, run, {0: 0.2})
    ledger = Ledger(tmp_path / run.name / "run")
    try:
        steps = ledger.steps
        base = steps.add_first_version(state_ref="s", sampler_ref="a")
        noted: dict[str, Any] = {"alarms": {"length": "WARN", "stop": "WARN"}}
        steps.commit(steps.begin(base.id, []), base, state_ref="s", sampler_ref="b", metrics=noted)
        steps.void(steps.begin(base.id, []), f"{REFUSED}: a reason")
        steps.void(steps.begin(base.id, []), "the service was away", outage=True)
    finally:
        ledger.close()
    counted = figures.alarms(figures.rows(tiny(), tmp_path))
    assert (counted.steps, counted.refused, counted.false) == (1, 1, 1)
    assert counted.warned == {"length": 1, "stop": 1}


def test_alarms_of_a_user_who_lies_are_no_false_ones(tmp_path: Path) -> None:
    experiment = load(TINY, scenarios=["plain", "garbage"], methods=["combine"], seeds=1)
    for run in experiment.runs():
        ended(tmp_path, run, {0: 0.2}, **guarded(2, "praise"))
    assert figures.alarms(figures.rows(experiment, tmp_path)).runs == 1


def test_methods_are_told_apart_only_where_the_interval_says_so(tmp_path: Path) -> None:
    for seed in range(3):
        scores = {"combine": 0.9 + seed / 100, "binary": 0.5 + seed / 100, "opd": 0.6 + seed / 3}
        for method, score in scores.items():
            ended(tmp_path, Run(method, "student", "learns", seed), {0: 0.2, 16: score})
    found = figures.differences(figures.rows(tiny(), tmp_path), [16])
    apart = {(one.better, one.worse): one.told_apart for one in found}
    assert apart[("combine", "binary")] is True
    assert not any(told for pair, told in apart.items() if "opd" in pair)
    lines = list(report.markdown(report.contents(tiny(), tmp_path, "")))
    assert any("told apart" in line and "not" in line for line in lines)


class Seen(HTMLParser):
    """The elements that a browser would find in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags = set[str]()
        self.attributes = list[tuple[str, str]]()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_nothing_that_anybody_wrote_becomes_part_of_the_page(tmp_path: Path) -> None:
    scenario = replace(STUDENT, about=HOSTILE)
    experiment = tiny(scenarios={"student": scenario}, name=HOSTILE)
    for seed in range(2):
        ended(
            tmp_path,
            Run("combine", "student", "learns", seed),
            {0: 0.2, 8: 0.5, 16: 0.9},
            text=HOSTILE,
            commit=HOSTILE,
        )
    report.write(experiment, tmp_path, HOSTILE)
    seen = Seen()
    seen.feed((tmp_path / report.PAGE).read_text())
    assert not seen.tags & {"script", "img", "iframe", "object", "link", "a", "form", "base"}
    names = {name for name, _ in seen.attributes}
    assert not {name for name in names if name.startswith("on")} | (names & {"src", "href"})
    assert seen.text.count("alert(1)") >= 4, "it is shown, as text"
    assert "default-src 'none'" in dict(seen.attributes)["content"] or any(
        "default-src 'none'" in value for _, value in seen.attributes
    )


def test_nothing_that_anybody_wrote_leaves_its_place_in_the_markdown(tmp_path: Path) -> None:
    ended(tmp_path, Run("combine", "student", "learns", 0), {0: 0.2, 16: 0.9}, text=HOSTILE)
    report.write(tiny(), tmp_path, "a command")
    fence, outside = "", list[str]()
    for line in (tmp_path / report.MARKDOWN).read_text().splitlines():
        if not fence and line.startswith("```"):
            fence = line.removesuffix("text")
        elif fence and line == fence:
            fence = ""
        elif not fence:
            outside.append(line)
    assert not fence
    told = "\n".join(outside)
    assert "<script>" not in told.replace("\\<script\\>", "")
    assert "](javascript" not in told.replace("\\](javascript", "")


def test_the_report_has_curves_replies_hints_counts_command_and_commit(tmp_path: Path) -> None:
    experiment = tiny()
    for run in experiment.runs():
        learned = {0: 0.2, 4: 0.4, 8: 0.86, 16: 0.95}
        ended(
            tmp_path,
            run,
            {0: 0.9} if run.condition == "told" else learned,
            shares=dict.fromkeys(experiment.cast(run), 0.7),
        )
    for path in report.write(experiment, tmp_path, "python -m examples.personalize"):
        text = path.read_text()
        for part in ("python -m examples.personalize", "abc", "a reply", "0.95 ± 0.00", "hints"):
            assert part in text
    page = (tmp_path / report.PAGE).read_text()
    assert page.count("<svg") == 4
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page
    report.write(experiment, tmp_path, "")
    assert "python -m examples.personalize" in (tmp_path / report.PAGE).read_text()


def test_a_run_that_was_cut_short_is_none_that_has_ended(tmp_path: Path) -> None:
    run = Run("combine", "student", "learns", 0)
    assert written(tmp_path, run) is None
    ended(tmp_path, run, {0: 0.2}, whole=False)
    assert written(tmp_path, run) is None


def test_time_and_cost_are_told_before_it_starts(tmp_path: Path) -> None:
    experiment = tiny()
    (line,) = estimate.lines(experiment, tmp_path, experiment.runs())
    assert line.startswith("59 runs, 0 are there already; about 59 minutes")
    ended(tmp_path, Run("combine", "student", "learns", 0), {0: 0.2, 16: 0.9}, seconds=1600.0)
    (line,) = estimate.lines(experiment, tmp_path, experiment.runs()[1:])
    assert "hours" in line
    settings = tmp_path / "service.toml"
    settings.write_text('[run]\nmodel_name = "Qwen/Qwen3-8B"\n')
    played = replaced(load(FOLDER / "real.toml"), config=settings)
    told = "\n".join(estimate.lines(played, tmp_path / "none", played.runs()))
    for part in (
        "not known before a run has learned",
        "steps at about $",
        "plays the users is asked",
    ):
        assert part in told, told
    assert "scores is asked" in told


# Through the real product


def experiment_in(tmp_path: Path, **changes: Any) -> Experiment:
    small: dict[str, Any] = {"steps": 1, "sessions": 2, "questions": 4}
    return replaced(load(TINY), **small | changes)


@pytest.mark.slow
async def test_a_model_plays_a_user_of_the_real_product_and_another_scores(tmp_path: Path) -> None:
    def both(messages: list[dict[str, str]]) -> str:
        scores = "rate how far" in messages[0]["content"]
        return json.dumps({"score": 0.5}) if scores else plays(messages)

    scenario = replace(
        STUDENT,
        user=None,
        persona="You are a student.",
        scored="model",
        opening="I need help with a homework question. {question} Please show the work.",
    )
    stub, lines = Stub(both), list[str]()
    experiment = experiment_in(tmp_path, scenarios={"student": scenario})
    run = Run("binary", "student", "learns", 0)
    async with model(stub) as played:
        await perform(run, experiment, Surroundings(tmp_path, lines.append, played, played))
    found = written(tmp_path, run)
    assert found is not None
    assert found["curve"][0]["score"] == 0.5
    assert found["curve"][-1]["step"] >= 1
    assert sum(found["verdicts"].values()) > 0
    assert any("session" in line for line in lines)


@pytest.mark.slow
async def test_several_people_have_keys_of_their_own_on_one_policy(tmp_path: Path) -> None:
    experiment = experiment_in(
        tmp_path, together={"student": STUDENT, "teacher": TEACHER}, joint=("combine", 1)
    )
    run = Run("combine", "joint", "joint", 0)
    await perform(run, experiment, Surroundings(tmp_path, lambda _: None))
    found = written(tmp_path, run)
    assert found is not None
    assert {"student", "teacher", "sums"} <= found["curve"][-1].keys()
    row = figures.rows(experiment, tmp_path)[0]
    assert row.among == ("student", "teacher")
    with closing(sqlite3.connect(tmp_path / run.name / "run" / "ledger.sqlite3")) as ledger:
        people = {name for (name,) in ledger.execute("SELECT DISTINCT user FROM sessions")}
    assert {"student", "teacher"} <= people


@pytest.mark.slow
def test_users_nobody_should_learn_from_in_haste_do_no_harm_in_two_steps(tmp_path: Path) -> None:
    users = ("garbage",)
    command = [sys.executable, "-m", "examples.personalize", "--scenarios", *users]
    command += ["--methods", "combine", "--seeds", "1", "--steps", "2", "--out", str(tmp_path)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for user in users:
        found = written(tmp_path, Run("combine", user, "learns", 0))
        assert found is not None
        # On a busy machine there are more steps than two; of one, if learning was held after it.
        first, *_, last = [point for point in found["curve"] if point["step"] <= 2]
        assert last["characters"] == pytest.approx(first["characters"], rel=0.2)
        assert min(last["sums"], last["lists"]) >= 0.95
        assert f"combine {user}" in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize("condition", ["flipped, with feedback", "flipped, audited"])
async def test_a_flipped_judge_is_found_where_somebody_else_has_an_opinion(
    tmp_path: Path, condition: str
) -> None:
    run = Run("combine", "student", condition, 0)
    assert CONTROLS[condition].guarded
    await perform(run, experiment_in(tmp_path, steps=8), Surroundings(tmp_path, lambda _: None))
    found = written(tmp_path, run)
    assert found is not None
    assert found["learner"] == "held"
    assert figures.held_by(found) == "verdicts"
    assert "contradicted by the auditor or the user" in found["guard"]["held"]


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_and_learns_what_is_wanted(tmp_path: Path) -> None:
    """This fails where the sign of the advantages is wrong."""
    command = [sys.executable, "-m", "examples.personalize", "--scenarios", "student.toml"]
    command[-1] = str(FOLDER / "tiny" / "student.toml")
    command += ["--methods", "combine", "--seeds", "1", "--steps", "8", "--sessions", "36"]
    command += ["--questions", "64", "--out", str(tmp_path)]
    folder = tmp_path / "combine-student-0"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as one:
        state = folder / "progress.json"
        before: dict[str, Any] = {"births": [], "scores": {}}
        while len(before["births"]) < 3 or "0" not in before["scores"]:
            assert one.poll() is None
            time.sleep(0.2)
            before = json.loads(state.read_text()) if state.is_file() else before
        os.kill(one.pid, signal.SIGKILL)  # its server lives on
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    found = json.loads((folder / "report.json").read_text())
    base_before = before["scores"]["0"]["accepted"]
    assert found["curve"][0]["score"] == pytest.approx(base_before, abs=1e-4), "not asked again"
    row = figures.rows(load(TINY, methods=["combine"], scenarios=[command[4]], seeds=1), tmp_path)[
        0
    ]
    base, learned = row.at_step(0), row.at_step(8)
    assert base is not None
    assert learned is not None
    assert learned.mean - base.mean >= 0.2
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert "0 runs, 1 are there already" in again.stdout
    assert (tmp_path / "report.html").is_file()
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(tmp_path) not in processes.stdout


def test_a_gateway_that_runs_already_is_for_one_run_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples.personalize.__main__ import main

    assert main(["--url", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 1
    assert "holds one policy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ((), "USER_API_KEY"),
        (("--scorer-url", "http://other/v1"), ""),
        (("--scorer-url", "http://other/v1", "--scorer-key", "OTHER"), "OTHER"),
    ],
)
def test_another_host_is_not_sent_the_key_of_the_model_that_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], key: str
) -> None:
    from examples.personalize import __main__ as command

    keys: list[str] = []

    @asynccontextmanager
    async def model(url: str | None, name: str | None, key: str) -> AsyncGenerator[None]:
        keys.append(key)
        if len(keys) == 2:
            raise DemoError("both are known")
        yield

    monkeypatch.setattr(command, "_model", model)
    said = ["--user-url", "http://one/v1", *flags, "--out", str(tmp_path)]
    assert command.main(said) == command.EXIT_FAILED
    assert keys == ["USER_API_KEY", key]
