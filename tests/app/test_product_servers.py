"""The product with inference servers: it serves through them, publishes to them, and never fails.

The servers speak vLLM's dialect over the demo model (`inference_servers`); `make test-vllm` does
the same with a real one.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from local_gpu.model.load import open_base
from local_gpu.sample.http import Deadlines
from local_gpu.sample.member import PoolOptions
from tests.support.clients import HELLO, ask, learn, talking
from tests.support.inference_servers import InferenceServer, inference_servers, stoppable
from tests.support.ledger import read
from tests.support.lives import Life, product
from tinker_claw.shipped import MODEL_DIR

pytestmark = pytest.mark.slow
FLAGS = ("--learning-rate", "3e-3", "--lora-rank", "16", "--batch-size", "4")


@contextmanager
def demo_servers(count: int) -> Iterator[list[InferenceServer]]:
    base = open_base(str(MODEL_DIR), device="cpu", dtype="float32", threads=1)
    with inference_servers(base, count, model="demo-base", context=4096) as servers:
        yield servers


def until(running: Life, come: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the health once the condition holds; requests go on meanwhile, as they find out."""
    deadline = time.monotonic() + 180
    for number in itertools.count():
        ask(running, f"asking-{number}", [HELLO])
        if come(health := running.health()):
            return health
        assert time.monotonic() < deadline, health
        time.sleep(0.2)


def test_it_learns_through_servers_and_no_request_fails_while_it_publishes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with demo_servers(2) as servers:
        urls = ",".join(server.url for server in servers)
        with product(data, *FLAGS, "--sampler-urls", urls) as running:
            with talking(running.url, clients=3, kind="side") as callers:
                callers.wanted.set()
                learn(running, 3, range(0, 60))
                before = len(callers.seen)
                servers[1].restart()  # it has no adapters now
                learn(running, 4, range(100, 160))
            assert before > 0
            assert callers.broken == 0, callers.errors
            assert until(running, lambda told: told["servers"] == "ok")["status"] == "ok"
            servers[1].stop()
            health = until(running, lambda told: told["servers"] == "away")
            assert health["status"] == "degraded"
            assert servers[1].url in health["servers_error"]
            assert "the others do their work" in health["meaning"]
            ask(running, "one-server", [HELLO])
            servers[1].start()
            assert until(running, lambda told: told["servers"] == "ok")["status"] == "ok"
            assert running.stop() == 0
        steps = [event for event in running.events() if event["event"] == "step"]
        assert len(steps) >= 4
        assert all(step["agrees"] is not False for step in steps)
        refs = [ref for (ref,) in read(data, "SELECT sampler_ref FROM versions ORDER BY id")]
        for server in servers:
            changes = server.log.changes
            assert ("load", refs[-1]) in changes, "every server got the newest"
            unloaded = {name for what, name in changes if what == "unload"}
            assert unloaded >= set(refs[1:3]) or server is servers[1], "it forgot them by itself"
            assert not any(server.log.most_running.values()), "none was unloaded while in use"
            assert not server.adapters, "and none stays behind when the gateway stops"


def test_a_server_that_hangs_leaves_and_comes_back_and_no_client_notices(tmp_path: Path) -> None:
    with stoppable("demo") as stands_still, demo_servers(1) as (other,):
        urls = f"{stands_still.url},{other.url}"
        flags = (*FLAGS, "--sampler-urls", urls)
        quick = {
            "tinker_claw.gateway.respond:KEEPALIVE_S": 0.5,
            "local_gpu.sample.member:PoolOptions": partial(PoolOptions, still_s=15),
            "local_gpu.sample.vllm:Deadlines": partial(
                Deadlines, first_token_s=40, between_tokens_s=40
            ),
        }
        with product(tmp_path / "data", *flags, constants=quick) as running:
            with talking(running.url, clients=4, kind="side") as callers:
                callers.wanted.set()
                stands_still.stop()
                before = len(callers.seen)
                health = until(running, lambda told: told["servers"] == "away")
                assert f"{stands_still.url} hangs" in health["servers_error"]
            assert len(callers.seen) >= before + 4
            assert callers.broken == 0, callers.errors
            other.stop()  # nobody is left
            deltas: list[dict[str, Any]] = []
            waiting = threading.Thread(target=stream, args=(running, deltas))
            waiting.start()
            deadline = time.monotonic() + 60
            while deltas.count({}) < 4 and time.monotonic() < deadline:
                time.sleep(0.1)
            assert deltas.count({}) >= 4, "it is kept alive"
            stands_still.go_on()
            waiting.join(180)
            assert any(delta.get("content") for delta in deltas), "and answered"
            other.start()
            assert until(running, lambda told: told["servers"] == "ok")["status"] == "ok"
            assert running.stop() == 0


def stream(running: Life, deltas: list[dict[str, Any]]) -> None:
    """Collect a streamed reply as it comes, keep-alives included."""
    body = {"model": "demo", "messages": [HELLO], "max_tokens": 20, "stream": True}
    with httpx.stream("POST", f"{running.url}/chat/completions", json=body, timeout=240) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                deltas.append(json.loads(line.removeprefix("data: "))["choices"][0]["delta"])
