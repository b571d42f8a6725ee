"""Runs of a track: requests to a gateway, a busy or refusing gateway, and kills.

Rule: the fake gateway speaks the product's protocol and writes down what it was asked; the product
itself is asked in the slow tests.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from examples import StoppedError
from examples.tracks import TrackError, client, report
from examples.tracks.__main__ import main
from examples.tracks.client import Answer, Gateway, Place, Reply
from examples.tracks.environments import environment
from examples.tracks.episode import Episode, Seen
from examples.tracks.runner import Run
from examples.tracks.state import opened
from examples.tracks.tool_call import Sum, ToolCall
from examples.tracks.track import Track
from tests.support.ledger import one, read
from tests.support.lives import ROOT, life, until
from tests.support.ports import free_port
from tests.tracks.scripted import runner
from tinker_claw.app.server import in_background

TRACK = Track(environment="tool-call", concurrency=3, group_size=2, groups=3, steps=5, exam_tasks=2)


@dataclass
class FakeGateway:
    """A gateway whose model can do sums: it calls the calculator first, and answers with its
    result."""

    refusals: list[Response | None] = field(default_factory=list)
    """Answers to the next requests in place of a reply; None: a reply."""
    waiting: list[int] = field(default_factory=list)
    """Numbers of waiting samples at the next looks; then nothing waits."""
    asked: list[tuple[dict[str, str], Any]] = field(default_factory=list)
    """Headers and bodies of requests."""
    outcomes: list[tuple[str, Any]] = field(default_factory=list)
    looks: int = 0
    late: str | None = None
    """Why outcomes do not count."""
    told: dict[str, str] = field(default_factory=dict)
    """Further fields of its health."""

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append((dict(request.headers), body))
        if self.refusals and (refusal := self.refusals.pop(0)) is not None:
            return refusal
        last = {"role": "", "content": "", **body["messages"][-1]}
        message: dict[str, Any] = {"role": "assistant", "content": f"It is {last['content']}."}
        if last["role"] == "user":
            found = re.search(r"What is (.*)\?", last["content"])
            arguments = json.dumps({"expression": found[1] if found else "1"})
            function = {"name": "calculator", "arguments": arguments}
            calls = [{"id": "call-1", "type": "function", "function": function}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        done = len(self.outcomes) // TRACK.group_size
        return JSONResponse(
            {
                "id": "chatcmpl-1",
                "choices": [{"message": message, "finish_reason": "stop"}],
                "system_fingerprint": f"v{done}",
                "usage": {"completion_tokens": 5},
            }
        )

    async def feedback(self, request: Request) -> Response:
        told = await request.json()
        if told["session"] not in {headers["x-session-id"] for headers, _ in self.asked}:
            return JSONResponse({"error": {"message": "You have no such turn."}}, 404)
        self.outcomes.append((request.headers["idempotency-key"], told))
        return JSONResponse({"counts": self.late is None, "because": self.late})

    async def health(self, _: Request) -> Response:
        self.looks += 1
        waiting = self.waiting.pop(0) if self.waiting else 0
        return JSONResponse({"samples_waiting": waiting, "meaning": "So it is.", **self.told})

    def gateway(self, track: Track = TRACK) -> Gateway:
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/messages", self.chat, methods=["POST"]),
                Route("/v1/feedback", self.feedback, methods=["POST"]),
                Route("/healthz", self.health),
            ]
        )
        return Gateway(httpx.AsyncClient(transport=httpx.ASGITransport(app)), track)

    def of(self, kind: str) -> list[Any]:
        """Bodies of the requests of this turn type, without exams of a named version."""
        return [
            body
            for headers, body in self.asked
            if kind == ("exam" if "@" in body.get("model", "") else headers["x-turn-type"])
        ]


async def play(fake: FakeGateway, folder: Path, track: Track = TRACK, env: Any = None) -> list[str]:
    said: list[str] = []
    with opened(folder) as state:
        state.begin(track)
        world = env or environment(track)
        await Run(track, world, fake.gateway(track), state, said.append).train()
        said += report.lines(track, state)
    return said


def stored(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "state.sqlite3")) as reader:
        return reader.execute(query).fetchall()


async def test_groups_of_tries_are_played_and_told(tmp_path: Path) -> None:
    fake = FakeGateway()
    said = await play(fake, tmp_path)
    assert len(fake.outcomes) == 6
    for key, told in fake.outcomes:
        assert told == {"session": key, "score": 1.0, "final": True, "source": "client"}
    episodes = [(h, b) for h, b in fake.asked if "x-group-id" in h]
    assert len(episodes) == 12
    sizes = Counter((h["x-group-id"], h["x-group-size"]) for h, _ in episodes)
    assert sorted(sizes.values()) == [4, 4, 4]
    for headers, body in episodes:
        assert body["model"] == "demo"
        assert body["temperature"] == 1.0
        assert "seed" not in body
        assert headers["x-session-id"].startswith(headers["x-group-id"])
    last = next(body["messages"] for _, body in episodes if len(body["messages"]) == 3)
    assert [message["role"] for message in last] == ["user", "assistant", "tool"]
    assert last[2]["tool_call_id"] == last[1]["tool_calls"][0]["id"]
    assert "v0 solves 1.00 of 2 held-out tasks" in said
    assert "v3 solves 1.00 of 2 held-out tasks" in said
    assert "3 tasks, 2 tries each: 6 episodes, 12 replies. Versions v0 to v3." in said


async def test_an_environment_that_fails_in_one_episode_is_named_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    class Broken(Sum):
        async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
            raise KeyError(name)

    class Second(ToolCall):
        def task(self, number: int) -> Sum:
            task = super().task(number)
            return Broken(task.expression) if number == 1 else task

    fake = FakeGateway()
    said = await play(fake, tmp_path, env=Second(seed=0))
    assert len(fake.outcomes) == 4
    broken = [line for line in said if line.startswith("The environment tool-call, task ")]
    assert len(broken) == 2
    for line in broken:
        assert line.endswith(": the tool calculator failed: KeyError('calculator').")
    assert stored(tmp_path, "SELECT COUNT(*) FROM episodes WHERE score IS NULL") == [(2,)]


async def test_exams_ask_for_a_version_by_name_and_train_nothing(tmp_path: Path) -> None:
    fake = FakeGateway()
    await play(fake, tmp_path)
    exams = fake.of("exam")
    assert Counter(body["model"] for body in exams) == {"demo@v0": 4, "demo@v3": 4}
    first = [[b["messages"][0], b["seed"]] for b in exams if len(b["messages"]) == 1]
    assert sorted(map(str, first[:2])) == sorted(map(str, first[2:])), "the same for both"
    asked = len(fake.asked)
    await play(fake, tmp_path)
    assert len(fake.asked) == asked + 2, "it asks which version serves, and tries nothing again"
    assert len(fake.outcomes) == 6


async def test_no_group_is_begun_while_too_many_samples_wait(tmp_path: Path) -> None:
    fake = FakeGateway(waiting=[0, 64, 200])
    await play(fake, tmp_path, replace(TRACK, groups=2))
    assert fake.looks == 4
    assert len(fake.outcomes) == 4


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"learner": "held", "learner_error": "An alarm rang."}, "An alarm rang"),
        ({"learner": "paused", "spending_paused": "All is spent."}, "All is spent"),
        ({"status": "paused", "meaning": ""}, "budget is spent"),  # who is told no more
    ],
)
async def test_where_nothing_is_learned_nobody_plays_on_and_the_run_says_why(
    tmp_path: Path, told: dict[str, str], why: str
) -> None:
    fake, track = FakeGateway(told=told), replace(TRACK, exam_tasks=0)
    with pytest.raises(TrackError, match=f"{why}.*the same command goes on"):
        await play(fake, tmp_path, track)
    assert fake.outcomes == []
    fake.told = {}
    await play(fake, tmp_path, track)
    assert len(stored(tmp_path, "SELECT 1 FROM episodes WHERE reported")) == 6


async def test_run_ends_with_the_step_that_was_wanted(tmp_path: Path) -> None:
    fake = FakeGateway()
    await play(fake, tmp_path, replace(TRACK, steps=2, groups=100))
    assert 4 <= len(fake.outcomes) <= 10, "what was begun is brought to its end"
    assert len(fake.outcomes) % 2 == 0


async def test_what_a_busy_gateway_does_not_take_is_sent_again_as_it_was() -> None:
    busy = JSONResponse({"error": {}}, 429, {"retry-after": "0"})
    fake = FakeGateway(refusals=[busy, JSONResponse({"error": {}}, 503)])
    gateway = fake.gateway()
    body = gateway.completion([{"role": "user", "content": "Hi"}])
    reply = Reply.of(await gateway.ask(Place("s", "t", "g"), "chat/completions", body))
    assert reply.calls
    assert len(fake.asked) == 3
    assert fake.asked[0] == fake.asked[1] == fake.asked[2]


async def test_a_gateway_that_is_away_is_said_to_be_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "GIVE_UP_S", 0.5)
    track = replace(TRACK, url=f"http://127.0.0.1:{free_port()}/v1")
    async with client.connected(track) as gateway:
        for _ in range(2):
            with pytest.raises(TrackError, match="takes no request any more"):
                await gateway.ask(Place("s", "t", "g"), "chat/completions", {})
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(r"http://127\.0\.0\.1:\d+ does not answer \(.+\), and is asked again", line)


async def test_a_proxy_is_not_between_a_track_and_its_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    app = FastAPI(routes=[Route("/healthz", health)])
    async with in_background(app) as url, client.connected(replace(TRACK, url=url)) as gateway:
        assert await gateway.health() == {"status": "ok"}


async def test_a_refusal_ends_the_run_in_the_gateways_words_and_it_goes_on_later(
    tmp_path: Path,
) -> None:
    track = replace(TRACK, concurrency=1, groups=1, exam_tasks=0)
    refusal = JSONResponse({"error": {"message": "no such model"}}, 404)
    fake = FakeGateway(refusals=[None, None, refusal])
    with pytest.raises(ExceptionGroup) as caught:
        await play(fake, tmp_path, track)
    assert caught.group_contains(TrackError, match="no such model", depth=2)
    assert stored(tmp_path, "SELECT COUNT(*) FROM replies") == [(1,)]
    assert fake.outcomes == []

    await play(fake, tmp_path, track)
    assert [key for key, _ in fake.outcomes] == [
        session for (session,) in stored(tmp_path, "SELECT session FROM episodes ORDER BY try")
    ]
    first = [b for b in fake.of("episode") if len(b["messages"]) == 1]
    assert len(first) == 2, "what was answered is not asked again"


TOO_LONG = JSONResponse({"error": {"code": "context_length_exceeded"}}, 400)


@pytest.mark.parametrize(
    ("refusals", "max_turns", "scores"),
    [([None, None, TOO_LONG], 5, [-1.0, 1.0]), ([], 1, [-1.0, -1.0])],
)
async def test_an_episode_that_does_not_end_within_context_or_turns_has_failed(
    tmp_path: Path, refusals: list[Response | None], max_turns: int, scores: list[float]
) -> None:
    track = replace(TRACK, concurrency=1, groups=1, exam_tasks=0, max_turns=max_turns)
    fake = FakeGateway(refusals=refusals)
    await play(fake, tmp_path, track)
    assert [told["score"] for _, told in fake.outcomes] == scores


async def test_a_task_longer_than_the_context_ends_the_run(tmp_path: Path) -> None:
    fake = FakeGateway(refusals=[None, TOO_LONG])
    with pytest.raises(ExceptionGroup) as caught:
        await play(fake, tmp_path, replace(TRACK, concurrency=1, exam_tasks=0))
    assert caught.group_contains(TrackError, match="context_length_exceeded", depth=2)
    assert fake.outcomes == []


class Breaks:
    """A third-party program that says hello; every second one breaks."""

    def __init__(self, number: int) -> None:
        self.name = f"number {number}"

    async def play(self, episode: Episode) -> float | None:
        reply = await episode.reply([{"role": "user", "content": f"Hello, {self.name}"}])
        episode.rewind()
        again = await episode.reply([{"role": "user", "content": f"Hello, {self.name}"}])
        assert again == reply, "it is not asked again"
        if episode.trains and episode.place.session.endswith("-1"):
            return None
        return 0.25 if episode.version is None else -0.5


class Over:
    """A program whose world is over before anything is asked."""

    name = "over"

    async def play(self, episode: Episode) -> float | None:
        return -1.0


class Programs:
    tools = ()

    def __init__(self, *first: Any) -> None:
        self._first = first
        """Programs of the first tasks."""

    def task(self, number: int) -> Any:
        return self._first[number] if number < len(self._first) else Breaks(number)

    held_out = task


async def test_a_program_plays_by_itself_and_one_that_broke_has_no_outcome(tmp_path: Path) -> None:
    fake = FakeGateway()
    said = await play(fake, tmp_path, env=Programs())
    assert [told["score"] for _, told in fake.outcomes] == [0.25] * 3
    assert len(fake.of("episode")) == 6
    assert sum("it broke, and has no outcome" in line for line in said) == 3
    assert "3 episodes broke, and have no outcome." in said
    assert "| v0 | 2 | 0.00 | 0.00 to 0.66 |" in said
    await play(fake, tmp_path)
    assert len(fake.outcomes) == 3, "it is over"


async def test_an_outcome_that_is_not_trained_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    fake, track = FakeGateway(late="the episode is over"), replace(TRACK, groups=2, exam_tasks=0)
    said = await play(fake, tmp_path, track, Programs(Over()))
    lost = [line.partition("its outcome is not trained: ")[2] for line in said]
    assert sorted(filter(None, lost)) == [
        "the episode is over",
        *["the gateway has no reply of it"] * 2,
    ]
    assert len(stored(tmp_path, "SELECT 1 FROM episodes WHERE reported")) == 4


async def test_what_was_answered_is_given_again_in_its_order_until_something_else_is_asked(
    tmp_path: Path,
) -> None:
    fake = FakeGateway()
    with opened(tmp_path) as state:
        for asked in ((1, 2), (1, 2, 3), (1, 4, 2)):
            episode = Episode(fake.gateway(), state, Place("s", "t", "g"), Seen())
            for number in asked:
                said = await episode.ask("messages", {"number": number, "messages": [{}]})
                assert said.status == 200
    # The second asks for 3 alone; the third for 4, and for 2 again, which comes after another.
    assert [body["number"] for body in fake.of("episode")] == [1, 2, 3, 4, 2]


async def test_whoever_plays_an_episode_says_no_outcome(tmp_path: Path) -> None:
    fake = FakeGateway()
    with opened(tmp_path) as state:
        episode = Episode(fake.gateway(), state, Place("s", "t", "g"), Seen())
        for path in ("feedback", "../v1/feedback", "messages/../feedback"):
            said = await episode.ask(path, {"session": "s", "score": 1.0, "final": True})
            assert said.status == 404
    assert not fake.outcomes


def test_a_version_and_tokens_are_read_from_any_dialect() -> None:
    stream = (
        'data: {"system_fingerprint":"v7","choices":[{"delta":{"content":"\\"v9\\""}}]}\n\n'
        'data: {"system_fingerprint":"v7","usage":{"completion_tokens":12}}\n\ndata: [DONE]\n\n'
    )
    answer = Answer(200, "text/event-stream", stream)
    assert (answer.version, answer.tokens) == (7, 12)
    answer = Answer(200, "application/json", '{"usage": {"input_tokens": 3, "output_tokens": 4}}')
    assert (answer.version, answer.tokens) == (None, 4)


def test_a_folder_holds_one_run_and_one_runner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path) as state:
        state.begin(TRACK)
        state.begin(replace(TRACK, steps=9, url="http://elsewhere/v1"))
        with pytest.raises(TrackError, match=r"holds a run with other settings.*--out"):
            state.begin(replace(TRACK, seed=1))
        with pytest.raises(StoppedError, match="another run is at work"), opened(tmp_path):
            pass
    assert main(["run", str(tmp_path / "nothing.toml"), "--out", str(tmp_path / "o")]) == 1
    assert "cannot be read" in capsys.readouterr().err


FLAGS = ("--model-name", "demo-tracks", "--method", "binary", "--prm-m", "1",
         "--batch-size", "4", "--lora-rank", "4", "--learning-rate", "1e-3")  # fmt: skip
EASY = """\
environment = "tool-call"
model = "demo-tracks"
concurrency = 4
group_size = 4
groups = 5
exam_tasks = 2
max_tokens = 40
[options]
numbers = 3
digits = 1
"""


@contextmanager
def rules() -> Iterator[str]:
    """Run the demo's judge in a process of its own; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "examples.demo.judge", "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_killed_runner_and_killed_gateway_change_nothing_but_time(tmp_path: Path) -> None:
    data, port = tmp_path / "data", free_port()
    told = "SELECT COUNT(*) FROM feedback WHERE final = 1"
    with rules() as judge:
        flags = (*FLAGS, "--judge-url", judge)
        with life(data, *flags, port=port) as doomed:
            assert doomed.serves()
            first = runner(tmp_path, doomed.url, EASY, os.environ)
            until(lambda: one(data, told) >= 3)
            first.send_signal(signal.SIGKILL)
            assert first.wait() == -signal.SIGKILL
            before = dict(read_scores(tmp_path))
            second = runner(tmp_path, doomed.url, EASY, os.environ)
            until(lambda: one(data, told) >= 8)
            doomed.kill()
        with life(data, *flags, port=port) as again:
            finished(tmp_path, second, data)
            assert again.stop() == 0
    after = dict(read_scores(tmp_path))
    assert before.items() <= after.items(), "what had ended ended once"
    whole(tmp_path, data)


def finished(folder: Path, playing: subprocess.Popen[bytes], data: Path) -> None:
    """Wait until the track is over and everything of it is learned."""
    assert playing.wait(timeout=300) == 0, (folder / "runner.log").read_text()
    until(lambda: one(data, "SELECT COUNT(*) FROM sessions WHERE episode = 1") == 0)
    until(lambda: one(data, "SELECT COUNT(*) FROM turns WHERE state = 'queued'") == 0)
    until(lambda: one(data, "SELECT COUNT(*) FROM steps WHERE status = 'intent'") == 0)


def whole(folder: Path, data: Path) -> None:
    """Check that every episode has one outcome, every group was trained once, and the report says
    so."""
    scores = dict(read_scores(folder))
    assert len(scores) == 20
    rows = read(
        data,
        "SELECT sessions.key, score FROM feedback "
        "JOIN sessions ON sessions.id = session_id WHERE final = 1",
    )
    # A session has one outcome, which is the one that the runner wrote down.
    assert sorted(tuple(row) for row in rows) == sorted(scores.items())
    assert one(data, "SELECT COUNT(*) FROM sessions WHERE episode = 2") == 20
    assert {tuple(row) for row in read(data, "SELECT size, over FROM groups")} == {(4, 1)}
    assert one(data, "SELECT COUNT(*) FROM groups") == 5
    # Exactly the runner's replies were trained, each of them once.
    trained = read(
        data,
        "SELECT sessions.key, COUNT(*) AS n, COUNT(DISTINCT turn_id) AS turns "
        "FROM samples JOIN turns ON turns.id = turn_id "
        "JOIN sessions ON sessions.id = session_id WHERE state = 'trained' GROUP BY session_id",
    )
    kept = dict(stored(folder / "out", "SELECT session, COUNT(*) FROM replies GROUP BY session"))
    assert trained
    assert all(row["n"] == row["turns"] <= kept[row["key"]] for row in trained)
    assert max(kept.values()) > 1, "somebody called the calculator"
    # A group goes into one step, and a step makes one version.
    grouped = read(
        data,
        "SELECT COUNT(DISTINCT samples.step_id) AS steps FROM samples "
        "JOIN turns ON turns.id = turn_id JOIN sessions ON sessions.id = session_id "
        "WHERE state = 'trained' GROUP BY group_id",
    )
    assert {row["steps"] for row in grouped} == {1}
    steps = one(data, "SELECT COUNT(*) FROM steps WHERE status = 'committed'")
    assert one(data, "SELECT COUNT(*) FROM versions") == steps + 1
    assert one(data, "SELECT COUNT(DISTINCT step_id) FROM samples") == steps
    told = (folder / "out" / "report.md").read_text()
    assert told.startswith("# tool-call, demo-tracks\n")
    assert "5 tasks, 4 tries each: 20 episodes" in told
    assert "| v0 | 2 |" in told
    assert "held-out tasks" in (folder / "runner.log").read_text()


def read_scores(folder: Path) -> list[tuple[str, float]]:
    return stored(folder / "out", "SELECT session, score FROM episodes WHERE score IS NOT NULL")
