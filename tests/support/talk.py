"""A user who talks to the running product, and waits until it has learned from him."""

from __future__ import annotations

import random
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from examples.demo.recipe import grammar
from tests.support.processes import Running

DUE = "SELECT COUNT(*) FROM turns JOIN next_states ON turn_id = id WHERE settled = 0"
"""Query of the turns that wait for the judge."""
HELLO = {"role": "user", "content": "Hello"}


def ask(running: Running, session: str, messages: list[dict[str, str]]) -> str:
    response = httpx.post(
        f"{running.url}/chat/completions",
        json={"model": "demo", "messages": messages, "max_tokens": 100},
        headers={"X-Session-Id": session},
        timeout=240,
    )
    response.raise_for_status()
    return response.json()["choices"][0]["message"]["content"]


def converse(running: Running, seed: int) -> None:
    """Hold one short session: a problem, a verdict on the answer, and a second problem."""
    rng = random.Random(seed)
    problem = grammar.new_problem(rng)
    messages = [{"role": "user", "content": grammar.first_message(problem)}]
    for _ in range(2):
        reply = ask(running, f"session-{seed}", messages)
        good = grammar.accepts(reply, problem)
        said = grammar.approval(rng) if good else grammar.correction(rng, directive=True)
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": said},
        ]
    ask(running, f"session-{seed}", messages)


def learn(running: Running, version: int, seeds: range) -> None:
    """Talk until the policy version is reached, with a limit that suits a slow machine."""
    for first in range(seeds.start, seeds.stop, 4):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda seed: converse(running, seed), range(first, first + 4)))
        deadline = time.monotonic() + 240
        while (health := running.health())["policy_version"] < version:
            enough = health["samples_waiting"] >= health["batch_size"]
            judged = rows(Path(health["data_dir"]), DUE) == [(0,)]
            if judged and not enough and health["learner"] != "training":
                break
            assert time.monotonic() < deadline, health
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"version {version} not reached: {running.health()}")


def rows(data: Path, query: str) -> list[tuple[int, ...]]:
    connection = sqlite3.connect(data / "ledger.sqlite3")
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()
