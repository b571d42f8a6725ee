"""Lessons in prompts: who is told, where, and that the client never sees it."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.render.test_own_template import TEMPLATES, folder
from tests.support.gateways import World, chat, gateway, served
from tests.support.ledger import sql
from tests.support.openclaw import BOB, info, message
from tinker_claw.gateway.lessons import MOST_TOKENS
from tinker_claw.ledger.figures import read_overview
from tinker_claw.ledger.lessons import MOST, State, read_lessons
from tinker_claw.ledger.prune import from_turn
from tinker_claw.render.renderer import Renderer
from tinker_claw.turn_state import Reason
from tinker_claw.types import LessonBlock, NextState, Vote, Wish
from tinker_claw.wishes import FRAME
from tinker_claw.words import run_fields

SETTINGS = {"lessons": True}
PLAIN = "Write plain sentences without lists."
SYSTEM = {"role": "system", "content": "Be kind."}


def named(session: str, **more: str) -> dict[str, dict[str, str]]:
    return {"headers": {"x-session-id": session, **more}}


async def teach(world: World, session: str = "first", text: str = PLAIN, **more: str) -> int:
    """Let a user correct a reply, and judge that; return the turn corrected."""
    world.say("fine")
    await world.ask("Help me.", **named(session, **more))
    await world.ask("Help me.", "fine", "No lists, ever!", **named(session, **more))
    turn = world.turns()[-2].id
    judge(world, turn, text)
    return turn


def judge(world: World, turn: int, text: str = PLAIN, words: str = "No lists, ever") -> None:
    """Judge a reply, and keep the wish that followed it."""
    value: Vote = -1
    candidate = world.ledger.judgements.add(
        turn,
        value=value,
        ballots=(),
        hints=[text],
        wish=Wish(text, words),
    )
    if candidate is not None:
        world.ledger.lessons.rule("keep", None, candidate)


def told_system(*texts: str, system: str = "") -> dict[str, str]:
    """The system message of a session that is told these lessons."""
    lines = "\n".join(
        [FRAME, *(f"- If the message does not ask for the opposite: {text}" for text in texts)]
    )
    return {"role": "system", "content": f"{system}\n\n{lines}" if system else lines}


@pytest.mark.parametrize("agent", [True, False], ids=["behind a system prompt", "as one"])
async def test_lessons_stand_in_the_system_prompt_of_later_sessions(
    tmp_path: Path, renderer: Renderer, agent: bool
) -> None:
    """The same in every request, in the very ids sampled on, and nowhere that the client sees."""
    head = [SYSTEM] if agent else []
    system = told_system(PLAIN, "Be brief.", system=SYSTEM["content"] if agent else "")
    async with gateway(tmp_path, renderer, lessons=True) as world:
        await teach(world)
        world.ledger.lessons.rule("add", "default", None, "Be brief.")
        first, second = chat("One?"), chat("One?", "fine", "Two?")
        for said in (first, second):
            reply = await world.reply({"messages": [*head, *said]}, **{"x-session-id": "later"})
            assert PLAIN not in str(reply)
        opening, following = world.turns()[-2:]
        block = opening.lesson_block
        plain = renderer.prompt([*head, *first])
        whole = renderer.prompt([system, *first], hint_message=1)
        assert opening.prompt == world.sampler.prompts[opening.id - 1] == whole.tokens
        assert opening.hint_at == whole.hint_at
        assert block is not None
        assert block.lessons == (1, 2)
        assert block.without(opening.prompt) == plain.tokens
        # It extends the sampled stream, and its history is known.
        assert following.prompt[: len(opening.prompt)] == opening.prompt
        assert following.lesson_block == block
        assert world.next_states()[opening.id] == NextState("user", "Two?")
    async with gateway(tmp_path, renderer, lessons=True) as world:
        # After a restart the stream is gone: a full render has it at the same place.
        third = chat("One?", "fine", "Two?", "fine", "Three?")
        await world.reply({"messages": [*head, *third]}, **{"x-session-id": "later"})
        again = world.turns()[-1]
        assert again.lesson_block == block
        assert again.prompt == renderer.prompt([system, *third]).tokens
        assert block.without(again.prompt) == renderer.prompt([*head, *third]).tokens


NO_SYSTEM = ["mistral, refuses system", "folds system in"]


@pytest.mark.parametrize("name", [*TEMPLATES])
async def test_every_chat_format_has_a_place_for_lessons(tmp_path: Path, name: str) -> None:
    """One that takes no system prompt has them before the first message of the user. Some add a
    system prompt of their own where there is none."""
    renderer = Renderer.load(str(folder(tmp_path / "model", *TEMPLATES[name])))
    async with gateway(tmp_path / "data", renderer, lessons=True) as world:
        world.ledger.lessons.rule("add", "default", None, PLAIN)
        said = chat("One?", "fine", "Two?")
        for messages in (said[:1], said):
            await world.reply({"messages": messages}, **{"x-session-id": "later"})
        system = told_system(PLAIN)
        whole = [system, *said]
        if name in NO_SYSTEM:
            opening = f"{system['content']}\n\nOne?"
            whole = [{"role": "user", "content": opening}, *said[1:]]
        turns = world.turns()
        for turn, messages in zip(turns, (said[:1], said), strict=True):
            assert turn.lesson_block is not None
            assert turn.lesson_block.without(turn.prompt) == renderer.prompt(messages).tokens
        assert turns[0].prompt == renderer.prompt(whole[: len(whole) - 2]).tokens
        assert turns[1].lesson_block.at == turns[0].lesson_block.at, "so caches hold"
        place = turns[0].lesson_block.at + turns[0].lesson_block.tokens
        assert turns[1].prompt[:place] == turns[0].prompt[:place]


async def test_a_running_session_is_told_nothing_new(world: World) -> None:
    await teach(world)
    await world.ask("Help me.", "fine", "No lists, ever!", "fine", "So?", **named("first"))
    await world.ask("New?", **named("second"))
    told = [turn.lesson_block is not None for turn in world.turns()]
    assert told == [False, False, False, True]


OTHERS: dict[str, tuple[dict[str, str], Any]] = {
    "side call": ({"x-turn-type": "side"}, "One?"),
    "episode": ({"x-turn-type": "episode"}, "One?"),
    "compared sessions": ({"x-group-id": "g", "x-group-size": "2", "x-task-id": "t"}, "One?"),
    "private": ({"x-private": "1"}, "One?"),
    "group": ({}, message(info(BOB, group=True), words="One?")),
}


async def test_nobody_else_is_told(world: World, renderer: Renderer) -> None:
    await teach(world)
    for case, (headers, text) in OTHERS.items():
        response = await world.ask(text, **named(case, **headers))
        assert response.status_code == 200, response.text
        assert PLAIN not in renderer.decode(world.sampler.prompts[-1]), case


async def test_users_of_opposite_wishes_are_told_their_own(
    tmp_path: Path, renderer: Renderer
) -> None:
    users = {"ann": "key-a", "bob": "key-b"}
    wishes = {"ann": PLAIN, "bob": "Write lists and nothing else."}
    async with gateway(tmp_path, renderer, lessons=True, users=users) as world:
        for name, key in users.items():
            await teach(world, text=wishes[name], authorization=f"Bearer {key}")
        for name, key in users.items():
            await world.ask("New?", **named("later", authorization=f"Bearer {key}"))
            told = world.turns()[-1].lesson_block
            (lesson,) = world.ledger.lessons.of_user(name)
            assert lesson.text == wishes[name]
            assert told is not None
            assert told.lessons == (lesson.id,)


@served(lessons=True)
async def test_the_first_time_that_a_lesson_is_told_is_said(world: World) -> None:
    await teach(world)
    with capture_logs() as events:
        for name in ("one", "two"):
            await world.ask("New?", **named(name))
    first = [one for one in events if one["event"] == "lesson.first_told"]
    assert [(one["lesson"], one["session"]) for one in first] == [(1, 2)]
    (lesson,) = read_lessons(sql(world.ledger), None)
    assert lesson["first"] == world.turns()[-2].id


async def test_no_more_is_told_than_fits(world: World) -> None:
    table = world.ledger.lessons
    for n in range(MOST + 2):
        table.rule("add", "default", None, f"Rule {n} is to be kept.")
    await world.ask("New?", **named("s"))
    told = world.turns()[-1].lesson_block
    assert told is not None
    assert len(told.lessons) == MOST
    assert max(told.lessons) == MOST + 2
    for n in range(8):
        table.rule("add", "default", None, f"{n} " + "plain words " * 19)
    await world.ask("New?", **named("t"))
    told = world.turns()[-1].lesson_block
    assert told is not None
    assert told.tokens <= MOST_TOKENS + 8, "with the marks of a message"
    assert len(told.lessons) <= MOST


async def test_a_drop_acts_at_once(world: World) -> None:
    world.ledger.lessons.rule("add", "default", None, PLAIN)
    await world.ask("New?", **named("s"))
    world.ledger.lessons.rule("drop", "default", 1)
    await world.ask("New?", "fine", "More?", **named("s"))
    assert [turn.lesson_block is not None for turn in world.turns()] == [True, False]


async def test_forgetting_the_source_takes_the_lesson_and_its_words(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, lessons=True) as world:
        source = await teach(world)
        await world.ask("New?", **named("later"))
        told = world.turns()[-1]
        assert told.lesson_block is not None
        forgotten = await world.ledger.forget_in_thread(from_turn(source))
        assert forgotten.lesson_turns == (told.id,)
        assert world.ledger.lessons.of_user() == []
        now = world.ledger.turns.get(told.id)
        assert (now.lesson_block, now.hint_at) == (LessonBlock((), 0, 0), None)
        assert now.prompt == told.lesson_block.without(told.prompt)
        assert world.column("reason")[-1] == Reason.FORGOTTEN_LESSON
        await world.ask("New?", "fine", "More?", **named("later"))
        assert world.turns()[-1].lesson_block is None
    with sqlite3.connect(tmp_path / "ledger.sqlite3") as raw:
        dump = "\n".join(raw.iterdump())
    assert PLAIN not in dump


async def test_what_the_judge_takes_for_a_wish_is_told_once_it_is_kept(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, lessons=True) as world:
        await world.ask("Help me.", **named("first"))
        await world.ask("Help me.", "fine", "No lists, ever!", **named("first"))
        wish = Wish(PLAIN, "No lists, ever")
        added: Any = {"value": -1, "ballots": (), "hints": (), "wish": wish}
        for turn in (1, 2):
            candidate = world.ledger.judgements.add(turn, **added)
            assert candidate == (1 if turn == 1 else None), "said again it is no new one"
            (lesson,) = world.ledger.lessons.of_user()
            assert lesson.state is State.CANDIDATE
        await world.ask("New?", **named("second"))
        assert world.turns()[-1].lesson_block is None
        lines = dict(run_fields(read_overview(tmp_path, 16)))
        assert "tinker-claw lessons keep 1" in lines["wish"]
        world.ledger.lessons.rule("keep", None, 1)
        await world.ask("New?", **named("third"))
        assert world.turns()[-1].lesson_block is not None
        assert "wish" not in dict(run_fields(read_overview(tmp_path, 16)))
