"""A short run of the soak, and checks of its verdicts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.lab.soak import Soak, report

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
