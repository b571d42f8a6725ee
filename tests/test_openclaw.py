"""Stock OpenClaw from npm, with nothing but a provider block, against the running product."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from tests.openclaw import OpenClaw, npm
from tests.processes import product

pytestmark = [
    pytest.mark.openclaw,
    pytest.mark.slow,
    pytest.mark.skipif(npm() is None, reason="npm is not installed: OpenClaw cannot be run"),
]

MESSAGES = ("Hello, who are you?", "What is 3 + 4?", "Thanks, that is great.")


def test_three_turns_and_a_second_session_land_in_the_ledger(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with product(data) as running:
        claw = OpenClaw.create(tmp_path / "user", running.url, "demo")
        for session, messages in (("first", MESSAGES), ("second", MESSAGES[:1])):
            for message in messages:
                started = time.monotonic()
                assert claw.say(session, message)
                assert time.monotonic() - started < 90, "a turn, OpenClaw's own start included"
        assert running.health()["policy_version"] == 0
        assert running.stop() == 0

    ledger = sqlite3.connect(data / "ledger.sqlite3")
    ledger.row_factory = sqlite3.Row
    main = ledger.execute("SELECT * FROM turns WHERE kind = 'main' ORDER BY id").fetchall()
    assert len({turn["session_id"] for turn in main}) == 2
    first = [turn for turn in main if turn["session_id"] == main[0]["session_id"]]
    assert [turn["idx"] for turn in first] == list(range(len(first)))
    said = [turn["request_text"] for turn in first]
    assert [text for text in dict.fromkeys(said) if text in MESSAGES] == list(MESSAGES)
    assert said[0] == MESSAGES[0], "timestamp and Runtime line are not the user's words"

    answered = {row["turn_id"]: row for row in ledger.execute("SELECT * FROM next_states")}
    assert all(turn["id"] in answered for turn in first[:-1])
    assert answered[first[-2]["id"]]["text"] == MESSAGES[2]
    assert first[-1]["id"] not in answered

    opening, following = first[0], first[1]
    assert opening["prompt_tokens"] > 5_000, "OpenClaw's own system prompt and tools"
    assert following["cached_tokens"] > 0.8 * opening["prompt_tokens"], "the prefix is reused"
    assert all(turn["kind_reason"] for turn in main)
    ledger.close()
