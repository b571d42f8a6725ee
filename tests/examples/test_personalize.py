"""The experiment's parts, and one run of it through the real product.

Rule: a language model that plays or scores is a stub behind real HTTP; texts from outside are as
hostile as they can be.
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fastapi import FastAPI, Response
from openai import AsyncOpenAI

from examples import ROOT
from examples.demo import DemoError, homework
from examples.demo.homework import Problem
from examples.demo.judge import HINTS_AI, Case, create_app
from examples.personalize import judges, report
from examples.personalize.experiment import TINY, Run, load
from examples.personalize.played import TRIES, Model, Played, ScoredExam
from examples.personalize.run import written
from examples.personalize.scenario import Scenario, read
from tinker_claw.app.server import in_background
from tinker_claw.errors import ConfigError

FOLDER = TINY.parent
PROBLEM = Problem("Nora", "pears", "add", 3, 4)
STUDENT = read("student", FOLDER / "tiny" / "student.toml")
TEACHER = read("teacher", FOLDER / "tiny" / "teacher.toml")
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>\n```\n| # [a](javascript:b) `'


# What is run


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_experiment_that_is_shipped_can_be_read(path: Path) -> None:
    experiment = load(path)
    runs = experiment.runs()
    assert len({run.name for run in runs}) == len(runs)
    assert {run.scenario for run in runs} == experiment.scenarios.keys()


def test_runs_come_seed_by_seed_and_are_those_that_were_chosen() -> None:
    """One that was cut short has as many of each."""
    assert load(TINY).runs()[:2] == [
        Run("combine", "student", "learns", 0),
        Run("binary", "student", "learns", 0),
    ]
    chosen = load(TINY, methods=["binary"], scenarios=["plain", "never"], seeds=2)
    assert [run.name for run in chosen.runs()] == [
        f"binary-{scenario}-{seed}" for seed in (0, 1) for scenario in ("plain", "never")
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('color = "red"', "color: there is no such setting"),
        ('user = "nobody"', "user: must be one of"),
        ('about = "x"', "needs corrections, or a persona"),
        ('corrections = ["a"]\nforbid = ["("]', "is no pattern"),
        ('corrections = ["a"]\nscored = "model"', "needs the rule in words"),
        ('questions = "nowhere.jsonl"', "cannot be read"),
        ("= 3", "is not valid TOML"),
    ],
)
def test_a_scenario_that_cannot_be_is_a_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "one.toml"
    path.write_text(text)
    with pytest.raises((DemoError, ConfigError), match=complaint):
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


def test_the_ceiling_asks_the_same_with_the_rule_behind_it() -> None:
    plain, told = STUDENT.exam(3).questions(), STUDENT.exam(3, with_rule=True).questions()
    assert told[:3] == [f"{question}\n\n{STUDENT.rule}" for question in plain[:3]]
    assert told[3:] == plain[3:]


# Judges


def case(said: str, reply: str = "a reply") -> Case:
    return Case("user", said, f"{reply}\n{said}")


def test_an_honest_judge_knows_the_words_of_its_scenarios_and_a_flipped_one_lies() -> None:
    think, rng = judges.honest([STUDENT, TEACHER]), Random(0)
    for said in TEACHER.corrections:
        assert think(case(said), rng) == (-1, TEACHER.hints[0])
    assert think(case(TEACHER.terse[0]), rng) == (-1, None)
    assert think(case(TEACHER.approvals[0]), rng) == (1, None)
    value, hint = think(case(homework.CORRECTIONS[0]), rng)
    assert (value, hint is not None) == (-1, True)
    flipped = judges.flipped(judges.honest([STUDENT]), STUDENT.other_hints)
    assert flipped(case(homework.CORRECTIONS[0]), rng) == (1, None)
    value, hint = flipped(case(homework.APPROVALS[0]), rng)
    assert value == -1
    assert hint in HINTS_AI


def test_a_shuffled_judge_says_as_often_what_it_says_but_of_other_replies() -> None:
    rng = Random(0)
    think = judges.shuffled(judges.honest([STUDENT]), STUDENT.other_hints)
    truth, said = list[bool](), list[int]()
    for number in range(600):
        good = rng.random() < 0.3
        words = homework.APPROVALS if good else homework.CORRECTIONS
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
        AsyncOpenAI(base_url=url, api_key="x", max_retries=TRIES) as sdk,
    ):
        yield Model(sdk, "stub")


def plays(messages: list[dict[str, str]]) -> str:
    """Play a user who is content with text without bold; think first, as models do."""
    last = messages[-1]["content"].rsplit("The assistant:", 1)[-1]
    content = "**" not in last
    said = "Great, please save it." if content else "No, that looks like an AI wrote it."
    return "<think>{hm}</think>Here: " + json.dumps({"content": content, "say": said})


PLAYED = Scenario(name="played", persona="You are a student.", rule="No bold text.", forbid=("x",))


async def test_a_played_user_hears_the_whole_conversation_and_fences_replies() -> None:
    stub = Stub(plays)
    async with model(stub) as played:
        talk = Played(PLAYED, played).begin(Random(0), 0)
        first = await talk.hears(f"**bold** {HOSTILE}")
        second = await talk.hears("plain 3 + 4 = 7")
    assert not first.content
    assert "AI" in first.message
    assert second.content
    system, shown = (message["content"] for message in stub.asked[-1])
    mark = system.split("mark\n")[1].split(";")[0]
    assert shown.count(f"<<{mark}>>") == 4
    assert shown.index(talk.opening) < shown.index("**bold**") < shown.index(first.message)


async def test_what_is_no_answer_is_asked_again_and_then_told() -> None:
    answers = iter(["hello", "[1, 2]", '{"content": true, "say": ""}'])
    stub = Stub(lambda _: next(answers), refusals=[503, 429])
    async with model(stub) as played:
        reaction = await Played(PLAYED, played).begin(Random(0), 0).hears("x")
        assert reaction.content
        assert reaction.message, "an empty message would be no next state"
        stub.says = lambda _: "never"
        with pytest.raises(DemoError, match="no JSON object"):
            await played.object("a", "b")
        stub.refusals = [401]
        with pytest.raises(DemoError, match="401"):
            await played.object("a", "b")


async def test_a_scorer_sees_wish_question_and_reply_and_nothing_of_what_made_it() -> None:
    stub = Stub(
        lambda messages: json.dumps({"score": 0.25 if "**" in messages[1]["content"] else 1})
    )
    scenario = STUDENT.model_copy(update={"scored": "model"})
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
        with pytest.raises(DemoError, match="gave no score"):
            await exam.grade([""] * len(exam.questions()), 0)


# What came out


def ended(
    out: Path,
    run: Run,
    scores: dict[int, float],
    *,
    firsts: tuple[bool, ...] = (),
    **more: Any,
) -> None:
    """Write the report of a possible run."""
    points = [
        {"step": step, "sessions": 9 * step, "score": score, "sums": 1.0, "lists": 0.9}
        | {"work": 1.0, "characters": 80.0 - step}
        for step, score in scores.items()
    ]
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
        "replies": {"0": [["a", "b"]], str(max(scores)): [["a", "b"]]},
        "hint_texts": [["a hint", 4]],
        "seconds": 60.0,
        "commit": "abc",
        "date": "2026-11-22",
        "cores": 2,
        "load": 1.0,
        **more,
    }
    (folder / "report.json").write_text(json.dumps(found))


def test_sessions_are_counted_to_the_third_right_first_reply_in_a_row() -> None:
    assert report.until_right([True, True, False, True, True, True, False]) == 6
    assert report.until_right([True, True, False, True]) is None


def test_the_report_has_every_score_the_means_over_seeds_and_a_plot(tmp_path: Path) -> None:
    experiment = load(TINY)
    _, empty, _ = report.write(experiment, tmp_path)
    assert "0 of 42 runs have ended" in empty.read_text()
    for run in experiment.runs():
        if run.condition == "flipped":
            continue
        firsts = (False,) * 9 if run.seed else (False, True, True, True)
        scores = {0: 0.2, 8: 0.5, 16: 0.9 + run.seed / 100}
        ended(tmp_path, run, {0: 0.9} if run.condition == "told" else scores, firsts=firsts)
    paths = report.write(experiment, tmp_path)
    scores, markdown, picture = (path.read_bytes() for path in paths)
    lines = list(csv.DictReader(scores.decode().splitlines()))
    assert [line["score"] for line in lines if line["condition"] == "told"] == ["0.9"] * 2
    learned = [line for line in lines if (line["method"], line["scenario"]) == ("opd", "teacher")]
    assert [line["seed"] for line in learned] == [str(n) for n in range(5) for _ in range(3)]
    told = markdown.decode()
    assert "37 of 42 runs have ended" in told
    row = next(line for line in told.splitlines() if line.startswith("| combine-student |"))
    assert row.split(" | ")[1:5] == ["5", "0.20 ± 0.00", "0.50 ± 0.00", "0.92 ± 0.02"]
    assert "| 4 (4 never) |" in row
    assert "combine-student-flipped" not in told
    assert picture.startswith(b"\x89PNG")


def test_a_run_that_was_cut_short_is_none_that_has_ended(tmp_path: Path) -> None:
    run = Run("combine", "student", "learns", 0)
    assert written(tmp_path, run) is None
    ended(tmp_path, run, {0: 0.2}, whole=False)
    assert written(tmp_path, run) is None


# Through the real product


@pytest.mark.slow
async def test_the_papers_experiment_runs_by_its_command_with_a_model_as_the_user(
    tmp_path: Path,
) -> None:
    """Its file, its recipe and a persona, as the docs have them; the model is small."""
    stub = Stub(plays)
    async with in_background(stub.app()) as url:
        command = ["-m", "examples.personalize", str(FOLDER / "real.toml")]
        command += ["--config", str(ROOT / "configs" / "demo.toml"), "--flags=--recipe paper"]
        command += ["--user-url", url, "--user-model", "someone", "--max-tokens", "100"]
        command += ["--scenarios", "real/student.toml", "--methods", "combine", "--seeds", "1"]
        command += ["--steps", "1", "--sessions", "2", "--questions", "4", "--out", str(tmp_path)]
        program = await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        said, _ = await program.communicate()
    assert program.returncode == 0, said.decode()
    (asked, *_), persona = stub.asked, read("student", FOLDER / "real" / "student.toml").persona
    assert persona.strip() in asked[0]["content"]
    ledger = tmp_path / "combine-student-0" / "run" / "ledger.sqlite3"
    with closing(sqlite3.connect(ledger)) as rows:
        ((rule,),) = rows.execute("SELECT metrics ->> 'rule' FROM steps WHERE id = 1")
        heard = rows.execute("SELECT text FROM next_states WHERE text LIKE '%an AI wrote it.'")
        assert len(heard.fetchall()) > 0
    assert (json.loads(rule)["recipe"], json.loads(rule)["gate"]) == ("paper", "off")


@pytest.mark.slow
def test_a_user_nobody_should_learn_from_does_no_harm_in_two_steps(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.personalize", "--scenarios", "garbage"]
    command += ["--methods", "combine", "--seeds", "1", "--steps", "2", "--out", str(tmp_path)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    found = written(tmp_path, Run("combine", "garbage", "learns", 0))
    assert found is not None
    # On a busy machine there are more steps than two; of one, if learning was held after it.
    first, *_, last = [point for point in found["curve"] if point["step"] <= 2]
    assert last["characters"] == pytest.approx(first["characters"], rel=0.2)
    assert min(last["sums"], last["lists"]) >= 0.95
    assert "combine-garbage" in shown.stdout


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
    experiment = load(TINY, methods=["combine"], scenarios=[command[4]], seeds=1)
    (runs,) = report.rows(experiment, tmp_path).values()
    (base,), (learned,) = report.at_step(runs, 0), report.at_step(runs, 8)
    assert learned - base >= 0.2
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert "0 runs, 1 are there already" in again.stdout
    assert (tmp_path / report.PICTURE).is_file()
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(tmp_path) not in processes.stdout


@pytest.mark.slow
async def test_a_judge_at_an_address_stands_beside_the_rule_also_after_a_kill(
    tmp_path: Path,
) -> None:
    rule = judges.honest([TEACHER])

    def takes_terse_words_for_consent(case: Case, rng: Random) -> tuple[int, str | None]:
        value, hint = rule(case, rng)
        return (value, hint) if hint else (1, None)

    command = ["-m", "examples.personalize", "--scenarios", str(FOLDER / "tiny" / "teacher.toml")]
    command += ["--methods", "combine", "--seeds", "1", "--steps", "3", "--sessions", "1"]
    command += ["--questions", "4", "--at-once", "2", "--out", str(tmp_path), "--flags"]
    folder = tmp_path / "combine-teacher-0"
    async with in_background(create_app(0, takes_terse_words_for_consent)) as url:
        command.append(f"--judge-url={url} --batch-size=4 --gate=off")
        start = partial(asyncio.create_subprocess_exec, sys.executable, *command, cwd=ROOT)
        one = await start(start_new_session=True)
        while not (folder / "run" / "metrics.jsonl").is_file():  # after the first step
            assert one.returncode is None
            await asyncio.sleep(0.2)
        one.kill()
        await one.wait()
        again = await start(stdout=subprocess.PIPE)
        shown = (await again.communicate())[0].decode()
    assert again.returncode == 0, shown
    found = written(tmp_path, Run("combine", "teacher", "learns", 0))
    assert found is not None
    assert found["curve"][-1]["step"] >= 3
    rows = {
        line.split(" | ")[0]: [int(cell) for cell in line.strip(" |").split(" | ")[1:]]
        for line in shown.splitlines()
        if line.startswith(("| asks for", "| rejects", "| accepts"))
    }
    rejected, neutral, accepted, unread, hints = rows["| asks for something"]
    assert rejected == hints > 0
    assert neutral == accepted == unread == 0
    assert rows["| rejects"][0] == 0
    assert rows["| rejects"][2] > 0
    assert sum(sum(row[:4]) for row in rows.values()) == sum(found["verdicts"].values())
    assert "Accepted after 0 steps: " in shown
    assert " of 4" in shown
