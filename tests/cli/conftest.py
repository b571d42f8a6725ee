"""A ledger with a turn in every state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stories import every_state


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    directory = tmp_path_factory.mktemp("every") / "data"
    return directory, every_state(directory)
