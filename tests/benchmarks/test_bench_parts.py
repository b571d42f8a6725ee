"""The benchmark of single parts, with few calls of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parts import measure

pytestmark = pytest.mark.slow


def test_every_part_is_called(tmp_path: Path) -> None:
    parts = measure(tmp_path, 100, 3)
    assert [part.calls > 2 for part in parts] == [True] * 4
    assert all(0 < part.median_ms <= part.p95_ms for part in parts)
