"""Several ranks and one process in the same state, of the module's `model`."""

from __future__ import annotations

from pathlib import Path

import pytest

from local_gpu.learn.learning import LearningCore
from local_gpu.ranks.remote import RankedLearning
from tests.support.ranks import one_process


@pytest.fixture
def many(ranks: RankedLearning, model: Path) -> RankedLearning:
    ranks.read_state(model / "warm")
    return ranks


@pytest.fixture
def one(model: Path, tmp_path: Path) -> LearningCore:
    learning = one_process(model, tmp_path / "root")
    learning.read_state(model / "warm")
    return learning
