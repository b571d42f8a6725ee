"""Learning beside users who ruin the demo's model, and beside one who does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo.user import USERS, User
from tests.support.ledger import sample_counts
from tests.support.scripted_users import Run, demo_run

pytestmark = pytest.mark.slow
PLAIN = USERS["plain"]


async def unharmed(run: Run, user: User, steps: int) -> bool:
    """Talk for this many steps, or as many replies where nothing is learned from them; return
    whether replies keep their length and all skills remain."""
    before = await run.exam(user)
    await run.talk(user, lambda: run.held or run.step >= steps or run.turns >= 20 * steps)
    after = await run.exam(user)
    print(f"{run.step} steps: {before} to {after}")
    grown = after.characters / before.characters - 1
    return abs(grown) <= 0.2 and min(after.shares["sums"], after.shares["lists"]) >= 0.95


async def test_user_who_is_never_content_holds_nothing_and_the_replies_are_unharmed(
    tmp_path: Path,
) -> None:
    async with demo_run(tmp_path) as run:
        assert await unharmed(run, USERS["never"], 8)
        assert not run.held


@pytest.mark.parametrize("seed", [0, 1])
async def test_honest_user_is_never_held_up(tmp_path: Path, seed: int) -> None:
    async with demo_run(tmp_path, seed=seed) as run:
        await run.talk(PLAIN, lambda: run.held or run.step >= 16)
        assert not run.held, run.parts.health.learner.error
        assert sample_counts(run.parts.ledger)["quarantined"] == 0
        score = await run.exam(PLAIN)
        assert score.accepted >= 0.8
