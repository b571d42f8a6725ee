"""A short run of the soak, and checks of its verdicts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.lab.soak import FEWEST_LOOKS, QUIET, Look, Soak, Traffic, report

FAULTS = {
    "kill",
    "poison",
    "judge away",
    "service away",
    "full disk",
    "clock jump",
    "storm",
    "stalled readers",
}


@pytest.mark.slow
def test_learning_moves_again_after_everything_that_may_befall_the_product(tmp_path: Path) -> None:
    soak = Soak(seconds=60, rate=40, folder=tmp_path, say=print)
    asyncio.run(soak.run())
    figures = report(soak)
    assert figures["wrong"] == [], figures
    assert figures["moved_again_after_s"].keys() == FAULTS
    assert figures["answered"] > 200
    assert soak.spans.keys() == FAULTS


def soaked(folder: Path, **grows: float) -> Soak:
    """A soak without faults, in which some figures grow by this much with each look and 400
    turns."""
    soak = Soak(seconds=600, rate=40, folder=folder, say=print)
    soak.traffic = Traffic("http://nowhere", 40)
    for number in range(2 * FEWEST_LOOKS):
        figures: dict[str, Any] = {
            **{"pid": 1, "cpu_s": 0.0, "around_s": 0.0, "rss_bytes": 4e8, "descriptors": 40.0},
            **{"threads": 2.0, "ledger_bytes": 1e7, "silence_ms": 20.0},
            **{"p50_ms": 10.0, "p95_ms": 20.0, "version": number, "fault": QUIET},
        }
        for name, step in grows.items():
            figures[name] += number * step
        soak.looks.append(Look(at=10.0 * number, turns=400 * number, **figures))
    return soak


@pytest.mark.parametrize(
    ("grows", "said"),
    [
        ({"rss_bytes": 400 * 300.0}, []),
        ({"rss_bytes": 400 * 600.0}, ["600 rss_bytes more with every turn"]),
        ({"threads": 0.1}, ["4.4 more threads"]),
        ({"silence_ms": 1000.0}, ["/healthz was silent for more than 30 s"]),
    ],
)
def test_what_grows_with_the_turns_is_wrong(
    tmp_path: Path, grows: dict[str, float], said: list[str]
) -> None:
    assert report(soaked(tmp_path, **grows))["wrong"] == said
