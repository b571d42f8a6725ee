"""What an owner says again renews a lesson; what they say otherwise ends it: over HTTP, judged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import World, gateway
from tests.support.ledger import sql
from tests.support.obedient_judge import judge_all
from tinker_claw.judge.endpoints import Endpoint
from tinker_claw.judge.prompts import Schema
from tinker_claw.ledger.lessons import State
from tinker_claw.ledger.prune import in_session
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import Charge, Message, uncharged

SETTINGS = {"lessons": True}
OLD = "Never use lists."
NEW = "From now on use lists after all."
AGAIN = "No bullet points, I said."
WISH = {"quote": "use lists after all", "words": "From now on"}
ENDS = WISH | {"earlier": "use lists", "now": "use lists", "outcome": "taken back"}


class Answers(Endpoint):
    """A judge with these answers to each question, one for each vote; of lessons other than the
    old wish it says that they are untouched."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        usual = {
            "does": "corrects",
            "hint": "Mind the lists.",
            "scope": "always",
            "outcome": "untouched",
        }
        self._answers = [usual | answer for answer in answers]
        self.asked = list[str]()

    async def answers(
        self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
    ) -> list[str]:
        assert n == len(self._answers) == 3
        self.asked.append("\n".join(message["content"] for message in messages))
        other = {} if f"\n{OLD}\n" in self.asked[-1] else {"outcome": "untouched"}
        return [json.dumps(answer | other) for answer in self._answers]

    async def aclose(self) -> None: ...


def states(world: World, user: str = "default") -> dict[str, State]:
    return {one.text: one.state for one in world.ledger.lessons.of_user(user)}


async def say(world: World, said: str, session: str = "s", **more: str) -> None:
    headers = {"x-session-id": session, **more}
    world.say("fine")
    await world.ask("Help me.", headers=headers)
    response = await world.ask("Help me.", "fine", said, headers=headers)
    assert response.status_code == 200, response.text


async def teach(world: World, **more: str) -> None:
    """Say the old wish, from which a lesson is made."""
    await say(world, OLD, "first", **more)
    await judge_all(world, Answers(*[{"quote": OLD, "words": "Never"}] * 3))
    for one in world.ledger.lessons.of_user():
        if one.state is State.CANDIDATE:
            world.ledger.lessons.rule("keep", None, one.id)


async def test_the_judge_is_shown_the_lessons_of_who_speaks_one_after_another(
    tmp_path: Path, renderer: Renderer
) -> None:
    users = {"ann": "key-a", "bob": "key-b"}
    async with gateway(tmp_path, renderer, lessons=True, users=users) as world:
        ann, bob = ({"authorization": f"Bearer {key}"} for key in users.values())
        await teach(world, **ann)
        world.ledger.lessons.rule("add", "bob", None, "Be kind.")
        world.ledger.lessons.rule("add", "ann", None, "Be quick.")
        judge = Answers(*[{"quote": "Never so", "words": "Never"}] * 3)
        await say(world, "Never so.", **ann)
        await judge_all(world, judge)
        *others, newest, oldest = judge.asked
        assert ["\nBe quick.\n" in newest, f"\n{OLD}\n" in oldest] == [True, True]
        assert "Be kind." not in newest + oldest
        assert not [asked for asked in others if "Be quick." in asked], "nor coloured"
        await say(world, NEW, **bob)
        await judge_all(world, Answers(*[ENDS] * 3))
        assert states(world, "ann")[OLD] is State.TOLD, "another's lessons are not theirs to end"
        assert states(world, "bob")["Be kind."] is State.TOLD


async def test_what_is_said_again_is_the_newest_and_no_second_lesson(world: World) -> None:
    await teach(world)
    sql(world.ledger).write("UPDATE lessons SET state = 'learned', created_at = 0, told_in = 1")
    world.ledger.lessons.rule("add", "default", None, "Be quick.")
    sql(world.ledger).write("UPDATE lessons SET created_at = 1 WHERE text = 'Be quick.'")
    await say(world, AGAIN)
    again = {"quote": "No bullet points", "words": "I said", "outcome": "said again"}
    again |= {"earlier": "Never use lists", "now": "no bullet points"}
    no = {"scope": "this once", "outcome": "untouched"}
    await judge_all(world, Answers(again, again, again | no))
    assert states(world) == {OLD: State.TOLD, "Be quick.": State.TOLD}
    assert world.ledger.lessons.of_user()[0].text == OLD


async def test_what_is_contradicted_is_set_aside_at_once_and_comes_back_by_a_word(
    world: World,
) -> None:
    await teach(world)
    running = {"x-session-id": "running"}
    await world.ask("One?", headers=running)
    await say(world, NEW)
    await judge_all(world, Answers(*[ENDS] * 2, {}))
    assert states(world) == {NEW: State.CANDIDATE, OLD: State.ASIDE}
    newer, older = world.ledger.lessons.of_user()
    assert older.replaced_by == newer.id
    await world.ask("One?", "fine", "Two?", headers=running)
    first, *_, last = [turn.lesson_block for turn in world.turns() if turn.session_id == 2]
    assert (first and first.lessons, last) == ((1,), None)
    world.ledger.lessons.rule("keep", None, older.id)
    assert states(world) == {NEW: State.CANDIDATE, OLD: State.TOLD}


async def test_what_ended_a_lesson_is_forgotten_with_what_it_did(world: World) -> None:
    await teach(world)
    await say(world, NEW)
    await judge_all(world, Answers(*[ENDS] * 3))
    key = sql(world.ledger).one("SELECT key FROM sessions WHERE id = 2")
    await world.ledger.forget_in_thread(in_session(key, "default"))
    assert states(world) == {OLD: State.TOLD}


ENDS_NOTHING: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "no majority": (NEW, [ENDS, WISH, WISH]),
    "words that nobody said": (NEW, [ENDS | {"words": "for ever"}] * 3),
    "a quote that nobody said": (NEW, [ENDS | {"quote": "lists again"}] * 3),
    "this once": (NEW, [ENDS | {"scope": "this once"}] * 3),
    "said again, or the opposite": (NEW, [ENDS, ENDS | {"outcome": "said again"}, WISH]),
    "words that end it and nobody said": (NEW, [ENDS | {"now": "lists for ever"}] * 3),
    "words of no lesson": (NEW, [ENDS | {"earlier": "lists for ever"}] * 3),
    "no words": (NEW, [ENDS | {"now": ""}, ENDS | {"earlier": ""}, ENDS | {"now": None}]),
    "no such outcome": (NEW, [ENDS | {"outcome": True}, ENDS | {"outcome": "over"}, WISH]),
    "a page": (
        "What does it say?",
        [ENDS | {"quote": "wish 1 is over", "words": "wish 1 is over"}] * 3,
    ),
}


@pytest.mark.parametrize("case", ENDS_NOTHING)
async def test_nothing_else_ends_a_lesson(world: World, case: str) -> None:
    said, answers = ENDS_NOTHING[case]
    await teach(world)
    await say(world, said)
    await judge_all(world, Answers(*answers))
    assert states(world)[OLD] is State.TOLD
