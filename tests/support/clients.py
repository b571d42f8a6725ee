"""Clients of the running product: a user who waits until it has learned, and those who never pause.

Rule: a reply counts as seen only when its finish reason and [DONE] were read. One that broke off is
asked for again, with the same messages, as an agent does.
"""

from __future__ import annotations

import json
import random
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from examples.demo import homework
from tests.support.ledger import Seen
from tests.support.lives import Life

DUE = "SELECT COUNT(*) FROM turns WHERE state = 'judging'"
"""Query of the turns that wait for the judge."""
HELLO = {"role": "user", "content": "Hello"}


def ask(running: Life, session: str, messages: list[dict[str, str]]) -> str:
    response = httpx.post(
        f"{running.url}/chat/completions",
        json={"model": "demo", "messages": messages, "max_tokens": 100},
        headers={"X-Session-Id": session},
        timeout=240,
    )
    response.raise_for_status()
    return response.json()["choices"][0]["message"]["content"]


def converse(running: Life, seed: int) -> None:
    """Hold one short session: a problem, a verdict on the answer, and a second problem."""
    rng = random.Random(seed)
    problem = homework.new_problem(rng)
    messages = [{"role": "user", "content": homework.first_message(problem)}]
    for _ in range(2):
        reply = ask(running, f"session-{seed}", messages)
        good = homework.accepts(reply, problem)
        said = rng.choice(homework.APPROVALS if good else homework.CORRECTIONS)
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": said},
        ]
    ask(running, f"session-{seed}", messages)


def learn(running: Life, version: int, seeds: range) -> None:
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


class Callers:
    """Agents that ask without a pause, from threads of their own, and count the answers."""

    def __init__(self, running: Life, count: int) -> None:
        self.answers: list[int] = []
        self._url = f"{running.url}/chat/completions"
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(count)]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        headers = {"X-Session-Id": f"caller-{number}", "X-Turn-Type": "side"}
        body = {"model": "demo", "messages": [HELLO], "max_tokens": 12}
        with httpx.Client(timeout=180, headers=headers) as client:
            while not self._ended.is_set():
                answer = client.post(self._url, json=body)
                text = (
                    answer.json()["choices"][0]["message"]["content"] if answer.is_success else ""
                )
                self.answers.append(answer.status_code if text else 0)


Message = dict[str, str]


@dataclass
class Talkers:
    """Several sessions at a time, with one address."""

    url: str
    name: str = "s"
    seen: list[Seen] = field(default_factory=list)
    broken: int = 0
    """Number of replies that broke off."""
    errors: list[str] = field(default_factory=list)
    """Answers of the gateway where it refused."""
    wanted: threading.Event = field(default_factory=threading.Event)
    """Event that lets clients ask; while it is clear nobody does."""
    over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sessions: int = 0

    def talk(self, seed: int) -> None:
        """Hold conversations until the end of the test."""
        rng = random.Random(seed)
        with httpx.Client(timeout=180) as http:
            while not self.over.is_set():
                with self._lock:
                    self._sessions += 1
                    session = f"{self.name}-{self._sessions}"
                self._converse(http, session, rng)

    def _converse(self, http: httpx.Client, session: str, rng: random.Random) -> None:
        problem = homework.new_problem(rng)
        messages: list[Message] = [{"role": "user", "content": homework.first_message(problem)}]
        for _ in range(rng.randint(2, 4)):
            reply = self._insist(http, session, messages)
            if reply is None:
                return
            good = homework.accepts(reply, problem)
            said = rng.choice(homework.APPROVALS if good else homework.CORRECTIONS)
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": said},
            ]

    def _insist(self, http: httpx.Client, session: str, messages: list[Message]) -> str | None:
        while not self.over.is_set():
            if not self.wanted.wait(0.05):
                continue
            seen = self.ask(http, session, messages)
            if seen is not None:
                return seen.text
            time.sleep(0.05)
        return None

    def ask(self, http: httpx.Client, session: str, messages: list[Message]) -> Seen | None:
        """Send one request; None: there was no complete reply."""
        try:
            seen = self._stream(http, session, messages)
        except httpx.ConnectError:  # nobody listens
            return None
        except httpx.TransportError:
            seen = None
        with self._lock:
            if seen is None:
                self.broken += 1
            else:
                self.seen.append(seen)
        return seen

    def _stream(self, http: httpx.Client, session: str, messages: list[Message]) -> Seen | None:
        body = {
            **{"model": "demo", "messages": messages, "max_tokens": 60},
            **{"stream": True, "stream_options": {"include_usage": True}},
        }
        text, usage, finished = "", {"prompt_tokens": 0, "completion_tokens": 0}, False
        headers = {"X-Session-Id": session}
        with http.stream(
            "POST", f"{self.url}/chat/completions", json=body, headers=headers
        ) as answer:
            if answer.status_code != 200:
                answer.read()
                self.errors.append(f"{answer.status_code} {answer.text}")
                return None
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    assert finished, "done, and no reason why"
                    return Seen(session, text, usage["prompt_tokens"], usage["completion_tokens"])
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    assert not finished, "an error after the end"
                    self.errors.append(str(event["error"]))
                    return None
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    finished = finished or choice["finish_reason"] is not None
        return None


@contextmanager
def talking(url: str, *, clients: int = 3, seed: int = 0, name: str = "s") -> Iterator[Talkers]:
    """Run clients on threads of their own, which ask while they are wanted."""
    talkers = Talkers(url, name)
    failures: list[BaseException] = []

    def talk(number: int) -> None:
        try:
            talkers.talk(seed * 1000 + number)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=talk, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield talkers
    finally:
        talkers.over.set()
        for thread in threads:
            thread.join(190)
    assert not failures, failures
