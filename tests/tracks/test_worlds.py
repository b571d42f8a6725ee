"""The tracks' worlds through the product, with the demo's model, which can do nothing in them: its
replies are recorded, its groups end, and nothing breaks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.ledger import one, read
from tests.support.lives import life, until
from tests.tracks.scripted import runner

TRACK = """\
environment = "{}"
model = "demo"
concurrency = 4
group_size = 2
groups = 2
exam_tasks = 1
max_turns = 2
max_tokens = 32
"""
FLAGS = ("--method", "binary", "--prm-m", "1", "--batch-size", "4", "--lora-rank", "4")


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["swe", "gui"])
def test_demo_plays_and_its_groups_end(tmp_path: Path, environment: str) -> None:
    if environment == "gui":
        pytest.importorskip("playwright", reason="playwright is not installed")
        if shutil.which("chromium") is None:
            pytest.skip("chromium is not installed")
    data = tmp_path / "data"
    with life(data, *FLAGS) as gateway:
        assert gateway.serves()
        plays = runner(tmp_path, gateway.url, TRACK.format(environment), os.environ)
        assert plays.wait(timeout=900) == 0, (tmp_path / "runner.log").read_text()
        until(lambda: one(data, "SELECT COUNT(*) FROM groups WHERE over = 1") == 2)
        assert gateway.stop() == 0
    outcomes = read(data, "SELECT score FROM feedback WHERE final = 1")
    assert [row["score"] for row in outcomes] == [-1.0] * 4
    assert one(data, "SELECT COUNT(*) FROM sessions WHERE episode = 2") == 4
    turns = "SELECT COUNT(*) FROM turns JOIN sessions ON sessions.id = session_id WHERE episode = 2"
    assert one(data, turns) >= 4, "every reply was recorded"
    assert one(data, "SELECT COUNT(*) FROM turns WHERE state = 'trained'") == 0, "all ended alike"
    assert "held-out tasks" in (tmp_path / "runner.log").read_text()
