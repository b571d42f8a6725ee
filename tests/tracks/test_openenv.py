"""Worlds of OpenEnv, unmodified, train through the gateway by the one command.

Rule: the package is the real one, in an environment of its own, and so is the server: a process
that is asked over HTTP and WebSocket. The first world is the one that OpenEnv itself makes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.environments import installed
from tests.support.ledger import one, read
from tests.support.lives import ROOT, life, until
from tests.support.ports import free_port, serving

pytestmark = pytest.mark.slow
WORLDS = ROOT / "tests" / "tracks" / "worlds"


@pytest.fixture(scope="module")
def programs() -> Path:
    return installed("openenv", "openenv==0.10.0")


@contextmanager
def worlds(
    programs: Path, code: Path, folder: Path, app: str, *, port: int, places: int
) -> Generator[subprocess.Popen[bytes]]:
    """Run a server, until it is killed; its log is in the folder."""
    words = [programs / "python", "-m", "uvicorn", app, "--port", str(port)]
    with (folder / "worlds.log").open("ab") as log:
        process = subprocess.Popen(
            [*words, "--app-dir", code, "--log-level", "warning"],
            env=os.environ | {"PLACES": str(places)},
            stdout=log,
            stderr=log,
        )
    try:
        until(lambda: process.poll() is not None or _answers(port))
        assert process.poll() is None, (folder / "worlds.log").read_text()
        yield process
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/schema").is_success
    except httpx.TransportError:
        return False


@contextmanager
def command(
    programs: Path, folder: Path, text: str, url: str, verb: str = "run", *flags: str
) -> Generator[subprocess.Popen[bytes]]:
    """Run the command by the Python that has websockets."""
    (folder / "track.toml").write_text(text)
    words = [verb, folder / "track.toml", "--url", url, "--out", folder / "out", *flags]
    with (folder / "tracks.log").open("ab") as log:
        process = subprocess.Popen(
            [programs / "python", "-m", "examples.tracks", *words],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ends(process: subprocess.Popen[bytes], folder: Path) -> None:
    assert process.wait(timeout=900) == 0, (folder / "tracks.log").read_text()


def stored(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "out" / "state.sqlite3")) as reader:
        return reader.execute(query).fetchall()


ECHO = """\
from openenv.core.env_server.http_server import create_app
from echo_world.models import EchoWorldAction, EchoWorldObservation
from echo_world.server.echo_world_environment import EchoWorldEnvironment
import os

app = create_app(
    EchoWorldEnvironment,
    EchoWorldAction,
    EchoWorldObservation,
    max_concurrent_envs=int(os.environ["PLACES"]),
)
"""
"""App of the echo world. Its own app.py allows one world at a time, and says to increase the
number."""
ECHO_TRACK = """\
environment = "openenv"
model = "demo-tracks"
concurrency = 32
group_size = 8
groups = 4
max_turns = 2
max_tokens = 24
exam_tasks = 4
[options]
url = "http://127.0.0.1:{port}"
instructions = "What is 3 + 4 - 2?"
highest = 2.0
"""


def test_world_that_ships_with_openenv_trains_as_it_is(programs: Path, tmp_path: Path) -> None:
    made = subprocess.run(
        [programs / "openenv", "init", "echo_world"], cwd=tmp_path, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr
    (tmp_path / "serve.py").write_text(ECHO)
    data, port = tmp_path / "data", free_port()
    flags = ("--method", "binary", "--prm-m", "1", "--batch-size", "4", "--lora-rank", "4")
    with (
        worlds(programs, tmp_path, tmp_path, "serve:app", port=port, places=32),
        life(data, "--model-name", "demo-tracks", *flags) as gateway,
    ):
        assert gateway.serves()
        words = programs, tmp_path, ECHO_TRACK.format(port=port), gateway.url
        with command(*words) as killed:
            until(lambda: one(data, "SELECT COUNT(*) FROM feedback WHERE final = 1") >= 3)
            killed.send_signal(signal.SIGKILL)
            assert killed.wait() == -signal.SIGKILL
        with command(*words) as second:
            ends(second, tmp_path)
        until(lambda: one(data, "SELECT COUNT(*) FROM groups WHERE over = 1") == 4)
        until(lambda: one(data, "SELECT COUNT(*) FROM turns WHERE state = 'queued'") == 0)
        until(lambda: one(data, "SELECT COUNT(*) FROM steps WHERE status = 'intent'") == 0)
        newest = one(data, "SELECT MAX(id) FROM versions")
        with command(*words, "eval", "--versions", "0", str(newest)) as examining:
            ends(examining, tmp_path)
        assert gateway.stop() == 0
    told = stored(tmp_path, "SELECT session, score FROM episodes WHERE reported ORDER BY session")
    assert len(told) == 32
    assert len(set(dict(told).values())) > 1, "ten characters earn more than eight"
    rows = read(
        data,
        "SELECT sessions.key, score FROM feedback JOIN sessions ON sessions.id = session_id "
        "WHERE final = 1 AND episode = 2 ORDER BY sessions.key",
    )
    assert [tuple(row) for row in rows] == told
    assert newest >= 1
    exams = dict(stored(tmp_path, "SELECT version, COUNT(*) FROM exams GROUP BY version"))
    assert exams[0] == exams[newest] == 4
    assert f"| v{newest} | 4 |" in (tmp_path / "out" / "report.md").read_text()


class Guesser:
    """A gateway whose model halves the range that is left, and first says 500. Its context has room
    for so many messages."""

    def __init__(self, room: int = 99) -> None:
        self.room = room
        self.asked: list[tuple[dict[str, str], list[dict[str, Any]]]] = []
        self.outcomes: dict[str, list[float]] = {}
        self._lock = Lock()

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        messages = body["messages"]
        with self._lock:
            self.asked.append((dict(request.headers), messages))
        if len(messages) > self.room:
            return JSONResponse({"error": {"code": "context_length_exceeded"}}, 400)
        low, high = 0, 99
        guesses = list[int]()
        for message in messages:
            if message["role"] == "assistant":
                guesses.append(_guess(message))
            elif re.search(r'"more\\?"', message["content"]):
                low = guesses[-1] + 1
            elif re.search(r'"less\\?"', message["content"]):
                high = guesses[-1] - 1
        guess = (low + high) // 2 if guesses else 500
        action = json.dumps({"number": guess})
        message: dict[str, Any] = {"role": "assistant", "content": f"```json\n{action}\n```"}
        named = [tool["function"]["name"] for tool in body.get("tools", ())] or ["act"]
        if len(guesses) % 2 or named != ["act"]:  # as a call, and as a text
            function = {"name": named[0], "arguments": action}
            calls = [{"id": f"call-{len(guesses)}", "type": "function", "function": function}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        return JSONResponse(
            {
                "id": "chatcmpl-1",
                "choices": [{"message": message, "finish_reason": "stop"}],
                "system_fingerprint": "v0",
                "usage": {"completion_tokens": 5},
            }
        )

    async def feedback(self, request: Request) -> Response:
        said = await request.json()
        with self._lock:
            self.outcomes.setdefault(said["session"], []).append(said["score"])
        return JSONResponse({"counts": True})

    async def health(self, _: Request) -> Response:
        return JSONResponse({})


def _guess(message: dict[str, Any]) -> int:
    calls: Sequence[Any] = message.get("tool_calls") or ()
    text = calls[0]["function"]["arguments"] if calls else message["content"]
    found = re.search(r'"number": (\d+)', text)
    assert found is not None
    return int(found[1])


@contextmanager
def served(guesser: Guesser) -> Generator[str]:
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", guesser.chat, methods=["POST"]),
            Route("/v1/feedback", guesser.feedback, methods=["POST"]),
            Route("/healthz", guesser.health),
        ]
    )
    with serving(app) as url:
        yield f"{url}/v1"


GUESS_TRACK = """\
environment = "openenv"
concurrency = 32
group_size = 4
groups = 12
max_turns = 9
exam_tasks = 2
seed = 3
[options]
url = "http://127.0.0.1:{port}"
instructions = "Guess."
lowest = -0.8
highest = 1.0
"""


def test_worlds_that_are_few_and_are_lost_change_nothing_but_time(
    programs: Path, tmp_path: Path
) -> None:
    """Thirty-two episodes share five worlds, whose server is killed on the way."""
    port, guesser = free_port(), Guesser()
    track = GUESS_TRACK.format(port=port)
    with served(guesser) as url, ExitStack() as playing:
        with worlds(programs, WORLDS, tmp_path, "guess:app", port=port, places=5) as doomed:
            process = playing.enter_context(command(programs, tmp_path, track, url))
            until(lambda: len(guesser.outcomes) >= 10)
            doomed.kill()
            doomed.wait()
        with worlds(programs, WORLDS, tmp_path, "guess:app", port=port, places=5):
            ends(process, tmp_path)
    assert len(guesser.outcomes) == 48
    assert all(len(said) == 1 for said in guesser.outcomes.values())
    scores = dict(stored(tmp_path, "SELECT session, score FROM episodes"))
    assert {session: said[0] for session, said in guesser.outcomes.items()} == scores

    episodes = [(h, m) for h, m in guesser.asked if "x-group-id" in h]
    twice = Counter((h["x-session-id"], len(m)) for h, m in episodes)
    assert max(twice.values()) == 1, "what was answered is not asked again"
    first = {h["x-group-id"]: m[0]["content"] for h, m in episodes if len(m) == 1}
    assert len(set(first.values())) == len(first) == 12
    for group, said in first.items():
        assert said.startswith("Guess.\n\n{"), "what the world says is JSON"
        assert json.loads(said.partition("\n\n")[2])["hint"].count("\n") == 1
        (seed,) = re.findall(r"seed (\d+)", said)
        outcome = _outcome(1.0 - 0.1 * (_tries(int(seed)) - 1))
        for session, score in scores.items():
            if session.startswith(f"{group}-"):
                assert score == pytest.approx(outcome)
    wrong = [m[2]["content"] for _, m in episodes if len(m) == 3]
    assert all(re.match("error: number: .*less than 100", said) for said in wrong), wrong[0]
    exams = {m[0]["content"] for h, m in guesser.asked if "exam" in h["x-session-id"]}
    assert len(exams) == 2
    assert not exams & set(first.values())


@pytest.mark.parametrize(("app", "room"), [("tooled", 99), ("app", 2)])
def test_tools_of_a_world_are_the_models_and_a_full_context_ends_an_episode(
    programs: Path, tmp_path: Path, app: str, room: int
) -> None:
    guesser, port = Guesser(room), free_port()
    text = GUESS_TRACK.format(port=port).replace("groups = 12", "groups = 1")
    with (
        served(guesser) as url,
        worlds(programs, WORLDS, tmp_path, f"guess:{app}", port=port, places=8),
        command(programs, tmp_path, text, url) as playing,
    ):
        ends(playing, tmp_path)
    seeds = {seed for _, m in guesser.asked for seed in re.findall(r"seed (\d+)", str(m[0]))}
    assert len(seeds) == 3
    (seed,) = re.findall(r"seed (\d+)", str(next(m for h, m in guesser.asked if "x-group-id" in h)))
    rewards = 1.0 - 0.1 * (_tries(int(seed)) - 1) if room > 2 else 0.0
    outcomes = [score for scores in guesser.outcomes.values() for score in scores]
    assert outcomes == [pytest.approx(_outcome(rewards))] * 4


def _outcome(rewards: float) -> float:
    """Return a sum of rewards on the scale of outcomes."""
    return 2 * (rewards + 0.8) / 1.8 - 1


def _tries(seed: int) -> int:
    """Number of guesses that halving takes."""
    secret, low, high, tries = Random(seed).randrange(100), 0, 99, 1
    while (guess := (low + high) // 2) != secret:
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
        tries += 1
    return tries
