"""Usefulness of hints, measured on the demo's real model with a user who corrects it."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo.user import USERS
from tests.scripted_users import NAME, demo_run
from tinker_claw.cli.status import board
from tinker_claw.insight import read_overview

STEPS = 36
"""Most steps of 16 turns until it is found out; four are mostly enough where hints help. Where they
do not, twelve were not enough, and once twenty-four: evidence fades, and few such replies are
accepted."""


@pytest.mark.slow
@pytest.mark.parametrize(("user", "teaches"), [("plain", True), ("opening", False)])
async def test_whether_hints_teach_is_found_out_within_a_few_steps_turns(
    tmp_path: Path, user: str, teaches: bool
) -> None:
    async with demo_run(tmp_path / "run", batch_size=100_000) as run:

        def known() -> bool:
            return run.scorer.known(NAME).teaches is not None

        await run.talk(USERS[user], lambda: known() or run.turns > 16 * STEPS)
        found = run.scorer.known(NAME)
        assert found.teaches is teaches, found
        assert run.turns <= 16 * STEPS


@pytest.mark.slow
async def test_opd_alone_says_that_its_hints_teach_nothing_and_does_no_harm(
    tmp_path: Path,
) -> None:
    """It has no reward that could stand in: a few steps use the default weight."""
    said = list[str]()
    async with demo_run(tmp_path / "run", method="opd") as run:

        def found() -> bool:
            if not said and run.scorer.known(NAME).teaches is False:
                said.extend(board(read_overview(tmp_path / "run", 16)))
            return bool(said) or run.turns > 24 * STEPS

        opening = USERS["opening"]
        before = await run.exam(opening, 64)
        await run.talk(opening, found)
        after = await run.exam(opening, 64)
        assert any(line.startswith("hints      for me, they do not help") for line in said)
        assert after.accepted > before.accepted - 0.15, (
            "64 replies each, so a difference has an error of 0.07"
        )
        assert after.characters == pytest.approx(before.characters, rel=0.2)
