"""Clients of the running product: a user who waits until it has learned, and those who never pause.

Rule: a reply counts as seen only when its finish reason and [DONE] were read. One that broke off is
asked for again, with the same messages, as an agent does.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

from examples.demo import homework
from tests.support.ledger import Seen, one
from tests.support.lives import Life

DUE = "SELECT COUNT(*) FROM turns WHERE state = 'judging'"
"""Query of the turns that wait for the judge."""
HELLO = {"role": "user", "content": "Hello"}
Message = dict[str, str]


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
    _hold(lambda messages: ask(running, f"session-{seed}", messages), random.Random(seed), 3)


def _hold(reply_to: Callable[[list[Message]], str | None], rng: random.Random, rounds: int) -> None:
    """Ask for a problem's answer, and say of each reply whether it is right; None: no reply."""
    problem = homework.new_problem(rng)
    messages = [{"role": "user", "content": homework.first_message(problem)}]
    for _ in range(rounds):
        reply = reply_to(messages)
        if reply is None:
            return
        good = homework.accepts(reply, problem)
        said = rng.choice(homework.APPROVALS if good else homework.CORRECTIONS)
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": said},
        ]


def learn(running: Life, version: int, seeds: range) -> None:
    """Talk until the policy version is reached, with a limit that suits a slow machine."""
    for first in range(seeds.start, seeds.stop, 4):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda seed: converse(running, seed), range(first, first + 4)))
        deadline = time.monotonic() + 240
        while (health := running.health())["policy_version"] < version:
            enough = health["samples_waiting"] >= health["batch_size"]
            judged = one(Path(health["data_dir"]), DUE) == 0
            if judged and not enough and health["learner"] != "training":
                break
            assert time.monotonic() < deadline, health
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"version {version} not reached: {running.health()}")


@dataclass
class Talkers:
    """Several sessions at a time, with one address."""

    url: str
    name: str = "s"
    kind: str | None = None
    """Kind of turns that they name; None: none is named, and they are main."""
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
                reply_to = partial(self._insist, http, session)
                _hold(reply_to, rng, rng.randint(2, 4))

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
        headers |= {"X-Turn-Type": self.kind} if self.kind else {}
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
def talking(
    url: str, *, clients: int = 3, seed: int = 0, name: str = "s", kind: str | None = None
) -> Iterator[Talkers]:
    """Run clients on threads of their own, which ask while they are wanted."""
    talkers = Talkers(url, name, kind)
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
