"""Whether hints teach, asked of the demo's real model by a user who corrects it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.taught import OPENS, PLAIN, Wish, course

STEPS = 12
"""Of 16 turns; within so many it is found out, and mostly within four."""


@pytest.mark.slow
@pytest.mark.parametrize(("wish", "teaches"), [(PLAIN, True), (OPENS, False)])
async def test_whether_hints_teach_is_found_out_within_a_few_steps_turns(
    tmp_path: Path, wish: Wish, teaches: bool
) -> None:
    async with course(tmp_path / "run", wish, batch_size=100_000) as run:

        def known() -> bool:
            return run.scorer.known("me").teaches is not None

        await run.talk(lambda: known() or run.turns > 16 * STEPS)
        found = run.scorer.known("me")
        assert found.teaches is teaches, found
        assert run.turns <= 16 * STEPS
