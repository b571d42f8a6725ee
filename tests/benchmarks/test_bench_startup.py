"""The start-up benchmark, with one start of each: it runs and prints its table."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import startup


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it takes two cores")
async def test_every_start_ends_in_an_answer(tmp_path: Path) -> None:
    rows = await startup.run(tmp_path, 1, lambda line: None, litellm=False)
    assert [row.what for row in rows] == ["a bare FastAPI route", "ours, over Tinker"]
    assert all(row.listening_s > 0 and row.first_ms > 0 and row.rss_mb > 0 for row in rows)
    text = io.StringIO()
    startup.show(Console(file=text, width=140), rows)
    assert "ours / a bare FastAPI route: listening" in text.getvalue()
