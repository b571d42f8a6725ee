"""A short run of the soak, and checks of its verdicts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
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
        ({}, []),
        ({"rss_bytes": 400 * 300.0}, []),
        ({"rss_bytes": 400 * 600.0}, ["600 rss_bytes more with every turn"]),
        ({"ledger_bytes": 400 * 8000.0}, ["8000 ledger_bytes more with every turn"]),
        ({"descriptors": 0.4}, ["17.6 more descriptors"]),
        ({"threads": 0.1}, ["4.4 more threads"]),
        ({"silence_ms": 1000.0}, ["/healthz was silent for more than 30 s"]),
    ],
)
def test_what_grows_with_the_turns_is_wrong(
    tmp_path: Path, grows: dict[str, float], said: list[str]
) -> None:
    assert report(soaked(tmp_path, **grows))["wrong"] == said


def test_one_step_is_no_growth(tmp_path: Path) -> None:
    soak = soaked(tmp_path)
    after = [replace(look, rss_bytes=look.rss_bytes + 30_000_000) for look in soak.looks[40:]]
    soak.looks[40:] = after
    assert report(soak)["wrong"] == []


def test_a_request_that_fails_is_wrong_only_while_nothing_else_is(tmp_path: Path) -> None:
    soak = soaked(tmp_path)
    soak.spans["storm"] = (soak.began + 100, soak.began + 140)
    soak.traffic.failed = [(soak.began + at, "503 no room") for at in (97, 120, 143)]
    assert report(soak)["wrong"] == []
    soak.traffic.failed.append((soak.began + 300, "503 no room"))
    assert report(soak)["wrong"] == [
        "1 requests failed while nothing was wrong: 503 no room",
    ]
