"""The demo's own parts against a small fake of the gateway, and the demo as a whole.

Rule: the fake speaks the product's protocol and writes what it was asked down; nothing is patched.
"""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from random import Random

import httpx2
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request as Incoming
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from examples import ROOT
from examples.demo import DemoError, homework, judge, report
from examples.demo.__main__ import commands, main
from examples.demo.client import Client, Figures, Health, Request, figures_from
from examples.demo.conduct import Cast, conduct
from examples.demo.homework import Problem, first_message
from examples.demo.options import Options, parse
from examples.demo.progress import IDLE_SESSIONS, Progress
from examples.demo.recipe.dialogues import Style, reply
from examples.demo.scoring import Check, RuleExam, Score, score_version
from examples.demo.server import Launch
from examples.demo.user import USERS, Outcome, hold_session, hold_sessions
from tinker_claw.telemetry import Telemetry

PROBLEMS = {
    first_message(problem): problem
    for name, thing, kind, a, b in product(
        homework.NAMES, homework.THINGS, ("add", "subtract", "box"), range(1, 10), range(1, 10)
    )
    if (problem := Problem(name, thing, kind, a, b))
}
EXPOSITION = """\
# TYPE tinker_claw_verdicts_total counter
tinker_claw_verdicts_total{value="1"} 5.0
tinker_claw_verdicts_total{value="-1"} 7.0
# TYPE tinker_claw_hints_total counter
tinker_claw_hints_total 4.0
"""
STEADY = USERS["plain"]


def over(transport: httpx2.AsyncBaseTransport) -> Client:
    """Client of a gateway without a network."""
    http = httpx2.AsyncClient(transport=transport)
    return Client(
        AsyncOpenAI(base_url="http://fake/v1", api_key="x", max_retries=0, http_client=http)
    )


HEALTH = Health("ok", 0, 5, 16, "waiting", None)


def written(question: str, style: Style) -> str:
    """Reply of a model that always writes in one style."""
    return reply(PROBLEMS[question], Random(question), style)


def stubborn(_: "Asked") -> str:
    return "**no**"


@dataclass(frozen=True)
class Asked:
    """One chat request that came in."""

    headers: dict[str, str]
    body: dict

    @property
    def session(self) -> str:
        return self.headers["x-session-id"]

    @property
    def said(self) -> list[str]:
        return [message["content"] for message in self.body["messages"]]


@dataclass
class FakeGateway:
    """A gateway that answers with `reply`; a policy version appears after every `sessions_per_step`
    sessions."""

    reply: Callable[[Asked], str]
    sessions_per_step: int = 10**9
    health: Health = HEALTH
    asked: list[Asked] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    most_open: int = 0
    ended: int = 0

    def client(self) -> Client:
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/healthz", self.healthz),
            Route("/metrics", lambda _: PlainTextResponse(EXPOSITION)),
        ]
        return over(httpx2.ASGITransport(Starlette(routes=routes)))

    async def healthz(self, _: Incoming) -> Response:
        version = self.ended // self.sessions_per_step
        now = replace(self.health, policy_version=version)
        return JSONResponse({name: getattr(now, name) for name in Health.__dataclass_fields__})

    async def chat(self, request: Incoming) -> Response:
        asked = Asked(dict(request.headers), await request.json())
        self.asked.append(asked)
        self.open.add(asked.session)
        main_sessions = {name for name in self.open if name.startswith("demo")}
        self.most_open = max(self.most_open, len(main_sessions))
        await asyncio.sleep(0.001)
        text = self.reply(asked)
        if asked.headers.get("x-session-done") == "1":
            self.open.discard(asked.session)
            self.ended += asked.headers["x-turn-type"] == "main"
        return self.streamed(text) if asked.body["stream"] else self.whole(text)

    def whole(self, text: str) -> Response:
        message = {"role": "assistant", "content": text}
        return JSONResponse({"choices": [{"message": message, "finish_reason": "stop"}]})

    def streamed(self, text: str) -> Response:
        deltas = [{"role": "assistant"}, {}, *({"content": c} for c in text)]
        choices = [[{"delta": delta}] for delta in deltas]
        choices += [[{"delta": {}, "finish_reason": "stop"}], []]
        chunks = [*(json.dumps({"choices": some}) for some in choices), "[DONE]"]
        return PlainTextResponse("".join(f"data: {chunk}\n\n" for chunk in chunks))


@pytest.mark.parametrize("number", [0, 1])
async def test_a_session_corrects_until_content_then_has_the_reply_saved(number: int) -> None:
    styles: dict[int, Style] = {1: "ai", 3: "mix", 5: "nat"}
    fake = FakeGateway(
        lambda asked: (
            written(asked.said[0], styles[len(asked.said)]) if len(asked.said) < 7 else "Saved."
        )
    )
    assert await hold_session(fake.client(), number, 3, STEADY) == Outcome(
        turns=4, content=True, number=number
    )
    assert [asked.headers.get("x-session-done") for asked in fake.asked] == [None, None, None, "1"]
    assert {asked.headers["x-turn-type"] for asked in fake.asked} == {"main"}
    assert {asked.session for asked in fake.asked} == {f"demo-3-{number}"}
    assert {asked.body["stream"] for asked in fake.asked} == {number == 1}
    assert not {"temperature", "top_p", "seed"} & fake.asked[0].body.keys()
    said = fake.asked[-1].said
    corrections = {*homework.CORRECTIONS, *homework.TERSE_CORRECTIONS}
    assert said[1::2] == [written(said[0], style) for style in ("ai", "mix", "nat")]
    assert {said[2], said[4]} <= corrections
    assert said[6] in homework.APPROVALS


async def test_the_user_gives_up_after_eight_turns() -> None:
    fake = FakeGateway(stubborn)
    assert await hold_session(fake.client(), 0, 0, STEADY) == Outcome(turns=8, content=False)
    assert [asked.headers.get("x-session-done") for asked in fake.asked] == [None] * 7 + ["1"]


@pytest.mark.parametrize("name", USERS)
async def test_a_scripted_user_says_what_they_want_in_words_that_the_judge_reads(name: str) -> None:
    user = USERS[name]
    for rule in (user.wants, user.later):
        for words in rule.corrections if rule else ():
            assert judge.verdict("user", words) == -1
            advice = judge.hint("user", words, Random(0))
            assert (advice is None) == (name in ("never", "garbage"))


@pytest.mark.parametrize(
    ("name", "step", "style", "content"),
    [
        ("plain", 0, "nat", True),
        ("plain", 0, "ai", False),
        ("never", 0, "nat", False),
        ("garbage", 0, "nat", False),
        ("flipped", 0, "ai", True),
        ("flipped", 0, "nat", False),
        ("change", 7, "nat", True),
        ("change", 8, "nat", False),
        ("change", 8, "ai", True),
    ],
)
async def test_a_scripted_user_is_content_with_what_they_want(
    name: str, step: int, style: Style, content: bool
) -> None:
    fake = FakeGateway(lambda asked: written(asked.said[0], style))
    assert await hold_session(fake.client(), 0, 0, USERS[name], step) == Outcome(
        turns=2 if content else 8, content=content, first=content != (name == "flipped")
    )


async def test_a_third_of_what_the_noisy_user_says_is_the_opposite() -> None:
    fake = FakeGateway(stubborn)
    client = fake.client()
    for number in range(0, 200, 2):
        await hold_session(client, number, 0, USERS["noise"])
    said = [asked.said[-1] for asked in fake.asked if len(asked.said) > 1]
    pleased = sum(text in homework.APPROVALS for text in said) / len(said)
    assert pleased == pytest.approx(0.35, abs=0.06)


def test_the_user_who_likes_an_opening_is_pleased_by_it_and_the_right_equation() -> None:
    problem = Problem("Nora", "pears", "add", 3, 4)
    accepts = USERS["opening"].wants.accepts
    for text in ("ok, 3 + 4 = 7.", "well, it is 3 + 4 = 7, so that's 7 pears."):
        assert accepts(text, problem)
    for text in ("so, 3 + 4 = 7.", "okay, 3 + 4 = 7.", "well, it is 3 + 4 = 8."):
        assert not accepts(text, problem)


async def test_six_sessions_are_in_flight_and_none_begins_once_there_are_enough() -> None:
    fake = FakeGateway(stubborn)
    outcomes: list[Outcome] = []
    await hold_sessions(
        [(fake.client(), STEADY)],
        0,
        step=lambda: 0,
        enough=lambda: len(outcomes) >= 10,
        ended=outcomes.append,
    )
    begun = {asked.session for asked in fake.asked}
    assert fake.most_open == 6
    assert fake.open == set()
    assert begun == {f"demo-0-{number}" for number in range(len(outcomes))}
    assert 10 <= len(outcomes) <= 15


def test_an_exam_is_the_same_every_time_and_has_sixty_of_each_skill() -> None:
    exam = RuleExam.draw(STEADY, 128)
    assert exam.questions() == RuleExam.draw(STEADY, 128).questions()
    assert len(exam.subjects) == 128
    assert {name: len(checks) for name, checks in exam.skills.items()} == {"sums": 60, "lists": 60}
    assert len(RuleExam.draw(STEADY, 20).skills["sums"]) == 20
    assert len(exam.questions()) == 248


async def test_a_score_is_the_share_of_right_replies_to_side_turns_of_that_version() -> None:
    problem = Problem("Nora", "pears", "add", 3, 4)
    exam = RuleExam(
        STEADY,
        (problem, replace(problem, a=5), replace(problem, a=6), replace(problem, a=7)),
        {
            "sums": [Check("2 + 2?", "4".__eq__), Check("9 - 4?", "5".__eq__)],
            "lists": [Check("a list", str.isupper)],
        },
    )
    replies = [
        "so, we take 3 and 4, and 3 + 4 = 7, so that's 7 pears.",  # accepted
        "so, 5 + 4 = 9. **Final Answer:** 9",  # marked
        "so, 6 + 4 = 11, so that's 11 pears.",  # wrong
        "well, 7 + 4 = 11, and that makes 11 pears.",  # accepted
        "4",
        "6",  # wrong
        "KEYS",
    ]
    fake = FakeGateway(lambda asked: replies[exam.questions().index(asked.said[0])])
    score = await score_version(fake.client(), 8, exam)
    length = sum(map(len, replies[:4])) / 4
    shares = {"sums": 0.5, "lists": 1.0, "work": 0.75}
    assert score == Score(0.5, shares, characters=length)
    assert score.excerpts == tuple(zip(exam.questions()[:4], replies[:4], strict=True))
    assert {asked.body["model"] for asked in fake.asked} == {"demo@v8"}
    assert {asked.headers["x-turn-type"] for asked in fake.asked} == {"side"}
    assert {asked.body["temperature"] for asked in fake.asked} == {1.0}
    assert len({asked.body["seed"] for asked in fake.asked}) == len(replies)


def test_figures_are_read_from_the_exposition_and_are_zero_where_there_are_none() -> None:
    gauge = "# TYPE a gauge\na NaN\n"
    assert figures_from(gauge + EXPOSITION) == Figures({"+1": 5, "0": 0, "-1": 7, "none": 0}, 4)
    telemetry = Telemetry(None)
    for _ in range(2):
        telemetry.verdict(turn=1, value=-1, votes=(-1,), hints=1)
    telemetry.verdict(turn=2, value=None, votes=(None,), hints=0)
    found = figures_from(telemetry.exposition().decode())
    assert found.verdicts == {"+1": 0, "0": 0, "-1": 2, "none": 1}
    assert found.hints == 2


@pytest.mark.parametrize(
    ("status", "text", "stream", "complaint"),
    [
        (400, '{"error": {"message": "no such version"}}', False, "400: .*no such version"),
        (500, "broken", True, "500: broken"),
        (200, '{"choices": 3}', False, "gave no reply"),
        (200, 'data: {"choices": [{"delta": {"content": "half"}}]}\n\n', True, "broke off"),
    ],
)
async def test_an_improper_answer_is_an_error_with_its_text(
    status: int, text: str, stream: bool, complaint: str
) -> None:
    headers = {"content-type": "text/event-stream" if stream else "application/json"}
    client = over(
        httpx2.MockTransport(lambda _: httpx2.Response(status, text=text, headers=headers))
    )
    with pytest.raises(DemoError, match=complaint):
        await client.ask(Request(({"role": "user", "content": "hi"},), "s", stream=stream))


def cast(fake: FakeGateway) -> Cast:
    client = fake.client()
    return Cast(client, [(client, STEADY)], RuleExam.draw(STEADY, 2))


def learning() -> FakeGateway:
    """A gateway that learns by every fourth session; its model writes as the user wants."""
    return FakeGateway(
        lambda asked: written(asked.said[0], "nat") if asked.said[0] in PROBLEMS else "Saved.",
        sessions_per_step=4,
    )


async def idle() -> None:
    await asyncio.Event().wait()


async def test_a_run_scores_versions_by_steps(tmp_path: Path) -> None:
    fake, options = learning(), Options(out=tmp_path, steps=4, sessions=12, eval_prompts=2)
    progress = Progress(options)
    await conduct(cast(fake), progress, (idle,))
    curve = progress.curve()
    assert [moment.version for moment, _ in curve][:3] == [0, 2, 4]
    shares = {"sums": 0.0, "lists": 0.0, "work": 1.0}
    assert all((score.accepted, score.shares) == (1.0, shares) for _, score in curve)
    assert progress.sessions >= 16
    assert all((o.turns, o.content, o.first) == (2, True, True) for o in progress.outcomes)
    assert sorted(o.number for o in progress.outcomes) == list(range(progress.sessions))
    assert progress.figures.hints == 4


async def test_a_run_that_was_cut_goes_on_with_sessions_that_nobody_has_had(tmp_path: Path) -> None:
    fake, options = learning(), Options(out=tmp_path, steps=4, sessions=12, eval_prompts=2)
    cut = Progress(options)
    whole = asyncio.create_task(conduct(cast(fake), cut, (idle,)))
    while cut.sessions < 5:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)
    whole.cancel()
    await asyncio.wait([whole])
    had = {asked.session for asked in fake.asked if asked.headers["x-turn-type"] == "main"}
    taken = Progress(options)
    taken.take_up(json.loads(json.dumps(cut.state())))
    assert taken.outcomes == cut.outcomes
    assert taken.births == cut.births
    fake.asked.clear()
    await conduct(cast(fake), taken, (idle,))
    new = {asked.session for asked in fake.asked if asked.headers["x-turn-type"] == "main"}
    assert new
    assert not new & had
    assert report.contents(taken)["whole"]
    assert {moment.version for moment, _ in taken.curve()} >= {0, 2, 4}


async def test_a_run_ends_with_the_reason_when_learning_has_failed(tmp_path: Path) -> None:
    failed = replace(HEALTH, status="degraded", learner="failed", last_error="disk full")
    fake = FakeGateway(stubborn, health=failed)
    progress = Progress(Options(out=tmp_path, eval_prompts=2))
    with pytest.raises(DemoError, match="stopped learning: disk full"):
        await conduct(cast(fake), progress, (idle,))


def test_the_report_holds_the_curve_and_the_settings(tmp_path: Path) -> None:
    progress = Progress(Options(out=tmp_path, steps=8, sessions=36, eval_prompts=64, seed=7))
    progress.saw(HEALTH)
    progress.outcomes += [Outcome(3, True)] * 30
    progress.saw(replace(HEALTH, policy_version=8))
    progress.outcomes += [Outcome(1, True)] * 7
    progress.scores |= {
        0: Score(0.25, {"sums": 1, "lists": 1, "work": 1}, characters=80),
        4: Score(0.5, {"sums": 1, "lists": 0.9, "work": 1}, characters=70),
        8: Score(0.75, {"sums": 0.95, "lists": 0.9, "work": 1}, characters=60),
    }
    paths = report.write(progress)
    written_down = json.loads(paths["report"].read_text())
    assert [(p["step"], p["sessions"], p["score"], p["sums"]) for p in written_down["curve"]] == [
        (0, 0, 0.25, 1),
        (4, 30, 0.5, 1),
        (8, 30, 0.75, 0.95),
    ]
    assert written_down["settings"]["config"]["training"]["batch_size"] == 16
    assert written_down["settings"]["seed"] == 7
    assert written_down["firsts"] == [False] * 37
    assert (written_down["whole"], written_down["error"]) == (False, None)
    assert paths["picture"].read_bytes().startswith(b"\x89PNG")


async def test_a_run_ends_where_nothing_is_learned_any_more(tmp_path: Path) -> None:
    fake = replace(learning(), sessions_per_step=10**9)
    progress = Progress(Options(out=tmp_path, steps=4, sessions=1, eval_prompts=2))
    await conduct(cast(fake), progress, (idle,))
    assert progress.version == 0
    assert IDLE_SESSIONS <= progress.sessions <= IDLE_SESSIONS + 5


async def test_a_run_ends_with_the_reason_when_learning_is_held(tmp_path: Path) -> None:
    why = "the last 128 judged replies were all rejected"
    held = replace(HEALTH, status="degraded", learner="held", last_error=why)
    fake = FakeGateway(stubborn, health=held)
    progress = Progress(Options(out=tmp_path, eval_prompts=2))
    await conduct(cast(fake), progress, (idle,))
    found = report.contents(progress)
    assert (found["whole"], found["learner"], found["error"]) == (True, "held", why)
    assert [moment.version for moment, _ in progress.curve()] == [0]
    progress.saw(replace(progress.health, policy_version=1))
    assert report.contents(progress)["whole"], "what is learned while it scores is not the run's"
    del progress.scores[0]
    assert not report.contents(progress)["whole"], "cut off while it scored: it is run again"


def test_flags_have_a_fast_set_and_refuse_a_folder_with_a_run(tmp_path: Path) -> None:
    fast = parse(["--fast", "--out", str(tmp_path), "--steps", "6"])
    assert fast == Options(out=tmp_path, steps=6, sessions=36, eval_prompts=64)
    assert Options(out=tmp_path).milestones == (0, 8, 16)
    assert parse(["--port", "4711", "--out", str(tmp_path)]).launch.port == 4711
    (tmp_path / "run").mkdir()
    for wrong in (["--out", str(tmp_path)], ["--steps", "0"], ["--stepz", "4"]):
        with pytest.raises(SystemExit, match="2"):
            parse(wrong)


def test_a_server_that_does_not_start_ends_the_demo_with_its_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "wrong.toml"
    config.write_text("[training]\nlearning_speed = 1\n")
    assert main(["--config", str(config), "--out", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr().err
    assert "the server ended by itself, with status 2" in shown
    assert "training.learning_speed: there is no such setting" in shown


def start(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "examples.demo", *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def processes_that_name(folder: Path) -> list[str]:
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in found.stdout.splitlines() if str(folder) in line]


@pytest.mark.slow
def test_the_demo_learns_what_the_user_likes_and_unlearns_nothing(tmp_path: Path) -> None:
    with start("--fast", "--out", str(tmp_path)) as demo:
        shown, _ = demo.communicate(timeout=900)
    assert demo.returncode == 0, shown
    curve = json.loads((tmp_path / report.REPORT).read_text())["curve"]
    by_step = {point["step"]: point for point in curve}
    assert by_step[8]["score"] - by_step[0]["score"] >= 0.2
    assert by_step[8]["sums"] >= 0.7
    assert by_step[8]["lists"] >= 0.7
    for name in (report.REPORT, report.PICTURE, "server.log"):
        assert str(tmp_path / name) in shown
    look, *_ = (shlex.split(line, comments=True) for line in commands(Launch(tmp_path, ())))
    command = [sys.executable, "-m", "tinker_claw", *look[1:]]
    seen = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert " trained in step " in seen.stdout
    assert " side " not in seen.stdout, "no exam of the demo's own"
    assert "never trained" not in seen.stderr, "no advice on them, either"
    assert processes_that_name(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_ends_the_server_too_and_shows_what_was_reached(tmp_path: Path) -> None:
    with start("--out", str(tmp_path)) as demo:
        assert demo.stdout
        while "steps 0/16" not in (line := demo.stdout.readline()):
            assert line, "the demo ended early"
        time.sleep(2)
        os.kill(demo.pid, signal.SIGINT)
        shown, _ = demo.communicate(timeout=240)
    assert demo.returncode == 130
    assert str(tmp_path / report.REPORT) in shown
    assert processes_that_name(tmp_path) == []


@pytest.mark.parametrize(
    ("learner", "waiting", "behind"),
    [("training", 16, True), ("training", 15, False), ("waiting", 40, False), ("held", 40, False)],
)
def test_users_wait_for_a_step_and_not_for_a_learner_that_waits_for_users(
    tmp_path: Path, learner: str, waiting: int, behind: bool
) -> None:
    """With several users each has a share of a batch: one who is over it waits for the others."""
    progress = Progress(Options(out=tmp_path))
    progress.saw(Health("ok", 3, waiting, 16, learner, None))
    assert progress.behind is behind
