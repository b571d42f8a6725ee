"""A lesson with which fewer replies are accepted than without says so, and is not ended by it."""

from __future__ import annotations

import pytest

from tests.gateway.test_told_sessions import PLAIN, named
from tests.support.gateways import World
from tests.support.ledger import sql
from tinker_claw.ledger.lessons import State, read_lessons
from tinker_claw.types import NextState, Vote

SETTINGS = {"lessons": True}


async def hold(world: World, value: Vote, *, by: str = "user") -> None:
    """Hold a session whose first reply is judged."""
    await world.ask("New?", **named(f"held {len(world.turns())}"))
    turn = world.turns()[-1]
    role = "user" if by == "user" else "tool"
    world.ledger.turns.add_next_state(turn.id, NextState(role, "Hm."))
    world.ledger.judgements.add(turn.id, value=value, ballots=(), hints=())


@pytest.mark.parametrize(
    ("untold", "told", "says"),
    [
        (12, 1, "1 of 12 replies were accepted with it, and 12 of 12 without"),
        (1, 1, None),
        (6, 4, None),
        (1, 12, None),
    ],
)
async def test_a_lesson_is_told_in_vain_if_fewer_replies_are_accepted_with_it(
    world: World, untold: int, told: int, says: str | None
) -> None:
    """By the owner's own verdicts, and the test that the headline makes."""
    for number in range(12):
        await hold(world, 1 if number < untold else -1)
    await world.ask(f"/always {PLAIN}")
    for number in range(12):
        await hold(world, 1 if number < told else -1)
        await hold(world, 1, by="tool")
    (lesson,) = read_lessons(sql(world.ledger), None)
    assert (lesson["vain"], lesson["state"]) == (says, State.TOLD)
    assert world.turns()[-1].lesson_block is not None, "what the user holds is told on"
