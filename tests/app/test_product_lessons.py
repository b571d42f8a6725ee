"""Lessons in the running product: the demo's model, the rule judge and its real prompts."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from examples.demo import homework
from tests.support.clients import ask
from tests.support.ledger import read
from tests.support.lives import Life, product, until
from tests.support.stories import run

pytestmark = pytest.mark.slow
FLAGS = ("--gate=off", "--batch-size", "2")
QUESTION = "Leo has 3 apples and gets 4 more. How many apples now? Please solve it for me."

WISH = "answer in ordinary sentences, without bold"


def session(running: Life, name: str, *said: str) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    for text in said:
        reply = ask(running, name, messages)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": text}]
    ask(running, name, messages)


def told(data: Path) -> list[Any]:
    return [row[0] for row in read(data, "SELECT told FROM turns WHERE kind = 'main' ORDER BY id")]


def test_what_was_said_once_is_told_after_a_kill_and_gone_when_forgotten(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with product(data, *FLAGS) as running:
        session(running, "first", f"/always {WISH}")
        running.kill()
    assert read(data, "SELECT text, state FROM lessons") == [(WISH, "told")]
    with product(data, *FLAGS) as running:
        session(running, "second", homework.APPROVALS[0], "And another one.")
        assert [bool(one) for one in told(data)] == [False, True, True, True]
        assert len(set(told(data)[1:])) == 1, "the same place in every request"
        until(lambda: running.health()["policy_version"] >= 1)
        run("pin", "v0", directory=data)
        run("rollback", "v0", directory=data)
        session(running, "third", homework.APPROVALS[0])
        assert told(data)[-1] is not None
        gone = run("forget", "session", "first", "--yes", directory=data)
        assert gone.returncode == 0, gone.stderr
        assert read(data, "SELECT COUNT(*) FROM lessons") == [(0,)]
        assert set(told(data)) == {"[[], 0, 0, []]"}, "told, and nothing of what"
        session(running, "third", homework.APPROVALS[0], "Once more.")
        assert told(data)[-1] is None
        assert running.stop() == 0
    with sqlite3.connect(data / "ledger.sqlite3") as raw:
        assert WISH not in "\n".join(raw.iterdump())
