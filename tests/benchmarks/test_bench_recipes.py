"""`benchmarks.recipes` measures what each part of the default recipe does to the gradient."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import recipes


@pytest.mark.slow
async def test_every_part_of_the_default_turns_the_papers_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(recipes.ROWS, "nothing", recipes.PAPERS)
    found = await recipes.cosines(tmp_path, 0)
    assert found.pop("nothing") == pytest.approx(1.0, abs=1e-9)
    assert all(0.5 < cosine < 1 - 1e-4 for cosine in found.values()), found
