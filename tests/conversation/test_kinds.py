"""Kinds of requests, in 100 first messages of three languages that were written before the rule."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tinker_claw.kinds import kind_of

FILE = Path(__file__).parents[1] / "data" / "kinds.jsonl"


def test_kinds_of_first_messages_are_found_or_unsure() -> None:
    """Where none is right, one would be told lessons for something else."""
    found = Counter[str]()
    for line in FILE.read_text().splitlines():
        written = json.loads(line)
        kind = kind_of(written["text"])
        found["right" if kind == written["kind"] else "unsure" if not kind else "wrong"] += 1
    print(dict(found))
    assert found.total() == 100
    assert found["wrong"] <= 5
    assert found["right"] >= 80


def test_a_request_that_shows_two_kinds_or_is_long_is_unsure() -> None:
    assert kind_of("Summarise this: Dear Ann, the Python script fails …") == "summaries"
    assert kind_of("Summarise this recipe for lentil soup.") == ""
    assert kind_of("What does it say?\n\nWrite an email, then fix the Python code.") == ""
    assert kind_of("x" * 1000 + " Solve 3x = 9") == ""
