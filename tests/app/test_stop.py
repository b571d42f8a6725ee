"""SIGTERM and Ctrl-C: requests in flight end, nothing is half done, and every wait has a bound."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.support.clients import HELLO, Talkers, talking
from tests.support.ledger import check, one, read
from tests.support.lives import BOUNDS, Fate, Life, life, until
from tests.support.stories import run
from tinker_claw.gateway.respond import STOPPED

FLAGS = ("--batch-size", "2", "--lora-rank", "4", "--learning-rate", "1e-3")
STEP = "local_gpu.learn.step:LoraOptimizer.step"


@contextmanager
def busy(data: Path, *flags: str, fate: Fate | None = None) -> Iterator[tuple[Life, Talkers]]:
    with life(data, *FLAGS, *flags, fate=fate) as running, talking(running.url) as who:
        assert running.serves()
        who.wanted.set()
        yield running, who
        who.over.set()


def listens(running: Life) -> bool:
    try:
        running.health()
    except httpx.TransportError:
        return False
    return True


def steps(data: Path) -> list[tuple[str, str | None]]:
    return [tuple(row) for row in read(data, "SELECT status, error FROM steps ORDER BY id")]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_replies_in_flight_end_and_the_last_step_is_whole(tmp_path: Path, number: int) -> None:
    data = tmp_path / "data"
    with busy(data) as (running, who):
        until(lambda: running.health()["policy_version"] >= 1)
        before = who.broken
        running.signal(number)
        assert running.ends() == 0
        who.over.set()
    assert who.broken - before <= 3, "of each client, the connection that was kept for the next"
    check(data, who.seen, batch_size=2)
    assert one(data, "SELECT COUNT(*) FROM turns WHERE stop_reason = 'abort'") == 0
    assert ("intent", None) not in steps(data)
    assert running.said().count('"stopped"') == 1
    assert "Traceback" not in running.said()


@pytest.mark.slow
def test_step_that_does_not_end_is_void_and_taken_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with busy(data, fate=Fate(slow={STEP: 600}, constants=BOUNDS)) as (running, who):
        until(lambda: running.health()["learner"] == "training")
        started = time.monotonic()
        running.signal(signal.SIGTERM)
        assert running.ends() == 0
        assert time.monotonic() - started >= 2
    assert steps(data) == [("void", "the gateway was stopped")]
    check(data, who.seen, batch_size=2)
    with busy(data) as (running, who):
        until(lambda: running.health()["policy_version"] >= 1)
        assert running.stop() == 0
    check(data, who.seen, batch_size=2)


@pytest.mark.slow
def test_step_that_ends_soon_is_waited_for(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with busy(data, fate=Fate(slow={STEP: 2})) as (running, _):
        until(lambda: running.health()["learner"] == "training")
        assert running.stop() == 0
    assert steps(data) == [("committed", None)]


def chat_text(url: str) -> Iterator[str]:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    hello: Any = [HELLO]
    for chunk in client.chat.completions.create(model="demo", messages=hello, stream=True):
        yield chunk.choices[0].delta.content or ""


def messages_text(url: str) -> Iterator[str]:
    root = url.removesuffix("/v1")
    client = anthropic.Anthropic(base_url=root, api_key="none", max_retries=0)
    hello: Any = [HELLO]
    for event in client.messages.create(model="demo", messages=hello, max_tokens=99, stream=True):
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            yield event.delta.text


def responses_text(url: str) -> Iterator[str]:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    for event in client.responses.create(model="demo", input="Hello", stream=True):
        if event.type == "response.output_text.delta":
            yield event.delta
        if event.type == "response.failed":
            assert event.response.error is not None
            raise openai.OpenAIError(event.response.error.message)


@pytest.mark.slow
def test_streams_that_do_not_end_get_an_error_event_and_their_turns_a_reason(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    slow = Fate(slow={"local_gpu.sample.embedded:draw": 1.0}, constants=BOUNDS)

    def failure(texts: Iterator[str], begun: Event) -> str:
        try:
            for text in texts:
                if text:
                    begun.set()
        except (openai.OpenAIError, anthropic.AnthropicError) as error:
            return str(error)
        return "it ended well"

    with life(data, *FLAGS, fate=slow) as running, ThreadPoolExecutor(3) as pool:
        assert running.serves()
        texts = [read(running.url) for read in (chat_text, messages_text, responses_text)]
        begun = [Event() for _ in texts]
        failures = [pool.submit(failure, *pair) for pair in zip(texts, begun, strict=True)]
        assert all(event.wait(180) for event in begun)
        running.signal(signal.SIGTERM)
        assert running.ends() == 0
        assert all(str(STOPPED) in found.result() for found in failures)
    assert "Traceback" not in running.said()
    assert "not trained: gateway stopped" in run("explain", "1", directory=data).stdout
    assert one(data, "SELECT COUNT(*) FROM turns WHERE stop_reason = 'abort'") == 3


@pytest.mark.slow
def test_stop_while_the_model_loads(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for numbers in ([signal.SIGTERM], [signal.SIGINT], [signal.SIGINT] * 2):
        once = len(numbers) == 1
        bounds = BOUNDS if once else {}  # the second signal comes before they are reached
        loads = Fate(slow={"local_gpu.backend:_learning": 600}, constants=bounds)
        with life(data, *FLAGS, fate=loads) as running:
            until(running.is_slow)
            assert not running.stops()
            for number in numbers[:-1]:
                running.signal(number)
                until(running.stops)  # or two could be one to it
            running.signal(numbers[-1])
            assert running.ends() == (0 if once else 130)
        assert "Traceback" not in running.said()
    with life(data, *FLAGS) as running:
        assert running.serves()
        assert running.stop() == 0


@pytest.mark.slow
def test_second_ctrl_c_ends_at_once_whatever_is_under_way(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with busy(data, fate=Fate(slow={STEP: 600})) as (running, who):
        until(lambda: running.health()["learner"] == "training")
        running.signal(signal.SIGINT)
        until(lambda: not listens(running))
        assert running.ended is None
        running.signal(signal.SIGINT)
        assert running.ends() == 130
    with life(data, *FLAGS) as again:
        assert again.serves()
        check(data, who.seen, batch_size=2)
        assert steps(data)[0] == ("void", "the process ended before the step was committed")
        assert again.stop() == 0


STARTS = """
import importlib, os, signal, sys

place, number, *words = sys.argv[1:]
module, name = place.split(":")
owner = importlib.import_module(module)
*outer, name = name.split(".")
for part in outer:
    owner = getattr(owner, part)
usual = getattr(owner, name)


def interrupted(*given, **named):
    try:  # as a library does while it is imported, and Python in a destructor
        os.kill(os.getpid(), int(number))
        for _ in range(1000):
            pass
    except BaseException:
        print("swallowed", flush=True)
    return usual(*given, **named)


setattr(owner, name, interrupted)
from tinker_claw.cli.main import main

sys.exit(main(words))
"""
"""Starts the product, and sends it a signal inside of one function."""


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("tinker_claw.cli.main:load_given", signal.SIGINT),
        ("asyncio:run", signal.SIGTERM),
        ("tinker_claw.app.main:configure", signal.SIGINT),
        ("tinker_claw.app.server:Stop.__init__", signal.SIGINT),
        ("tinker_claw.app.server:Stop.__init__", signal.SIGTERM),
        ("tinker_claw.app.server:Stop.calls", signal.SIGINT),
        ("tinker_claw.app.main:listen", signal.SIGTERM),
        ("tinker_claw.app.main:wire", signal.SIGINT),
        ("tinker_claw.app.main:GatewayServer", signal.SIGTERM),
    ],
)
def test_signal_in_a_start_is_never_lost(tmp_path: Path, place: str, number: int) -> None:
    words = ("--model-name", "demo", "--backend", "local", "--port", "0", "--data-dir")
    started = subprocess.run(
        [sys.executable, "-c", STARTS, place, str(int(number)), *words, tmp_path / "data"],
        env=os.environ | {"TINKER_CLAW_GATEWAY__API_KEY": "none", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=240,
        check=False,
    )
    said = (started.stdout + started.stderr).decode()
    assert started.returncode in (0, 128 + number), said
    assert "swallowed" not in said
    assert "Traceback" not in said
