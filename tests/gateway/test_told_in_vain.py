"""A lesson whose told replies are mostly rejected is told no more: over HTTP, with a ledger."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.gateway.test_told_sessions import PLAIN, judge, named, teach
from tests.support.gateways import World, gateway
from tinker_claw.ledger.figures import read_overview
from tinker_claw.ledger.lessons import ENOUGH, Lesson, State
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import NextState, Vote
from tinker_claw.words import facts

OTHER = "Answer in French."


async def held(world: World, value: Vote, *, by: str = "user") -> tuple[int, ...]:
    """Hold a session whose first reply is judged; return the lessons that it was told."""
    world.say("fine")
    await world.ask("New?", **named(f"held {len(world.turns())}"))
    turn = world.turns()[-1]
    role = "user" if by == "user" else "tool"
    world.ledger.turns.add_next_state(turn.id, NextState(role, "Hm."))
    world.ledger.judgements.add(turn.id, value=value, ballots=(), hints=())
    return turn.told.lessons if turn.told else ()


def only(world: World) -> Lesson:
    (lesson,) = world.ledger.lessons.of_user()
    return lesson


async def test_a_lesson_told_in_vain_ends_and_says_so(tmp_path: Path, renderer: Renderer) -> None:
    """The owner's own verdicts count; another process reads the same of the ledger."""
    async with gateway(tmp_path, renderer, lessons=True) as world:
        await teach(world)
        for _ in range(ENOUGH):
            assert await held(world, -1, by="tool") == (1,), "a tool's verdict is not the owner's"
        for value in (1, -1, 1, -1, -1, 1, -1, -1):
            assert await held(world, value) == (1,)
        assert only(world).state is State.TOLD, "it is looked at when a session begins"
    async with gateway(tmp_path, renderer, lessons=True) as world:
        with capture_logs() as logs:
            assert await held(world, 1) == ()
        assert [one["lesson"] for one in logs if one["event"] == "lesson.in_vain"] == [1]
        assert only(world).state is State.VAIN
        first = world.turns()[0].session_id
        assert world.ledger.lessons.of_session(first) == [], "nor in a session that goes on"
        status = dict(facts(read_overview(tmp_path, 16)))["lessons"]
        assert status == "0 told, 1 told in vain: see `tinker-claw lessons`"


async def test_half_is_enough(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer, lessons=True) as world:
        await teach(world)
        for number in range(3 * ENOUGH):
            assert await held(world, -1 if number % 2 else 1) == (1,)
        assert only(world).state is State.TOLD


async def test_the_owners_word_brings_it_back_for_good_and_a_repeat_does_not(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, lessons=True) as world:
        turn = await teach(world)
        for _ in range(ENOUGH):
            await held(world, -1)
        assert await held(world, 1) == ()
        judge(world, turn, PLAIN.upper())
        assert only(world).state is State.VAIN, "the same sentence again"
        assert [one.id for one in world.ledger.lessons.shown(turn)] == [1], "the judge may know it"
        world.ledger.lessons.rule("keep", None, 1)
        for _ in range(ENOUGH):
            assert await held(world, -1) == (1,)
        assert only(world).state is State.TOLD


@pytest.mark.parametrize("accepted", [ENOUGH + 1, 0])
async def test_a_lesson_that_did_well_outlives_one_told_in_vain_beside_it(
    tmp_path: Path, renderer: Renderer, accepted: int
) -> None:
    async with gateway(tmp_path, renderer, lessons=True) as world:
        await teach(world, "first")
        for _ in range(accepted):
            await held(world, 1)
        await teach(world, "second", OTHER)
        for _ in range(ENOUGH):
            assert {2} <= {*await held(world, -1)}
        assert await held(world, 1) == ((1,) if accepted else ())
