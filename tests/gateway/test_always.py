"""`/always`: an owner's message holds a wish in later sessions, on every wire."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.test_told_sessions import named, told_system
from tests.support.gateways import MODEL, World, chat, served
from tests.support.ledger import sql
from tests.support.openclaw import BOB, TRACE, assistant, info, message, openclaw, user
from tinker_claw.gateway import always
from tinker_claw.ledger.lessons import State
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import NextState

SETTINGS = {"lessons": True}
WISH = "answer in one sentence"
COMMAND = f"/always {WISH}"
HELD = f"Lessons: number 1 holds from your next session on: {WISH}"
SECRET = "sk-ant-api03-" + "Zq7Xw2Lk9Pb4Rt6Vn8Mc1Hd3Jf5Gs0Ya" * 2 + "AA"


def texts(world: World) -> list[tuple[str, State]]:
    return [(one.text, one.state) for one in world.ledger.lessons.of_user("default")]


WIRES: dict[str, tuple[str, Any]] = {
    "chat": ("/chat/completions", lambda said: {"messages": chat(said)}),
    "responses": ("/responses", lambda said: {"input": said}),
    "messages": ("/messages", lambda said: {"messages": chat(said), "max_tokens": 9}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("wire", WIRES)
async def test_a_bare_command_is_answered_without_the_model_on_every_wire(
    world: World, wire: str, *, stream: bool
) -> None:
    path, body = WIRES[wire]
    for said, answer in (
        ("/always", "Lessons: none yet."),
        (COMMAND, HELD),
        ("/ALWAYS", f"1. {WISH}"),
    ):
        sent = {"model": MODEL, "stream": stream, **body(said)}
        response = await world.http.post(path, json=sent)
        assert response.status_code == 200, response.text
        assert answer in response.text
    assert texts(world) == [(WISH, State.TOLD)]
    assert (world.turns(), world.sampler.prompts) == ([], []), "nothing is asked or trained"


@pytest.mark.parametrize("agent", [False, True], ids=["client", "openclaw"])
async def test_a_command_and_its_answer_are_cut_out_of_the_conversation(
    world: World, renderer: Renderer, *, agent: bool
) -> None:
    """The reply before it is judged by what the user says next."""
    if agent:
        await world.reply(openclaw("hi"), **TRACE)
        answer = (await world.reply(openclaw("hi", assistant("fine"), user(COMMAND)), **TRACE))[
            "content"
        ]
        talk = [assistant("fine"), user(COMMAND), assistant(answer), user("thanks")]
        await world.reply(openclaw("hi", *talk), **TRACE)
    else:
        await world.ask("hi")
        answer = (await world.ask("hi", "fine", COMMAND)).json()["choices"][0]["message"]["content"]
        await world.ask("hi", "fine", COMMAND, answer, "thanks")
    assert answer == HELD
    first, second = world.turns()
    assert world.next_states()[first.id] == NextState("user", "thanks")
    assert agent or second.prompt[: len(first.prompt)] == first.prompt, "extended"
    assert WISH not in renderer.decode(second.prompt)
    assert world.column("lost") == [None, None]
    (lesson,) = world.ledger.lessons.of_user("default")
    assert (lesson.text, lesson.turn_id) == (WISH, first.id)


async def test_a_command_before_a_question_leaves_the_question(
    world: World, renderer: Renderer
) -> None:
    said = f"{COMMAND}\n\nWhat is a fjord?"
    await world.ask(said, **named("first"))
    await world.ask(said, "fine", "More?", **named("first"))
    await world.ask("New?", **named("later"))
    first, second, later = world.turns()
    assert first.prompt == renderer.prompt(chat("\nWhat is a fjord?")).tokens
    assert second.lesson_block is None, "from the next session on"
    assert later.prompt == renderer.prompt([told_system(WISH), *chat("New?")]).tokens
    assert texts(world) == [(WISH, State.TOLD)], "once"


async def test_a_session_that_begins_with_a_command_is_not_told_it(world: World) -> None:
    await world.ask(COMMAND, **named("first"))
    await world.ask(COMMAND, HELD, "What is a fjord?", **named("first"))
    await world.ask("New?", **named("later"))
    assert [turn.lesson_block is not None for turn in world.turns()] == [False, True]


async def test_a_wish_that_is_held_again_lives_again_and_is_the_newest(world: World) -> None:
    for command in (COMMAND, "/always in French"):
        await world.ask(command)
    for state in State:
        sql(world.ledger).write("UPDATE lessons SET state = ?, created_at = 0", state)
        await world.ask(f"{COMMAND.upper()}.")
        assert texts(world)[0] == (f"{WISH.upper()}.", State.TOLD)


OTHERS: dict[str, tuple[str, dict[str, str]]] = {
    "a member of a group": (message(info(BOB, group=True), words=COMMAND), {}),
    "a quotation": (f"> {COMMAND}", {}),
    "within a sentence": (f"What does {COMMAND} do?", {}),
    "another word": (f"/alwaysbe {WISH}", {}),
    "a harness's text": (f"<system-reminder>\n{COMMAND}\n</system-reminder>\n\nHi", {}),
    "a side call": (COMMAND, {"x-turn-type": "side"}),
    "an episode": (COMMAND, {"x-turn-type": "episode"}),
}


async def test_from_anyone_but_the_owner_it_is_text(world: World, renderer: Renderer) -> None:
    for case, (text, headers) in OTHERS.items():
        response = await world.ask(text, **named(case, **headers))
        assert response.status_code == 200, response.text
        assert texts(world) == [], case
        assert WISH in renderer.decode(world.sampler.prompts[-1]), "the model answers it"
    assert len(world.sampler.prompts) == len(OTHERS)


REFUSED: dict[str, tuple[str, dict[str, str]]] = {
    "private": (COMMAND, {"x-private": "1"}),
    "a secret": (f"/always use {SECRET}", {}),
    "a sentence": (f"/always {'very ' * 80}", {}),
    "U+200B": ("/always be\u200bbrief", {}),
}
"""What cannot be held, by a word of the answer."""


async def test_what_cannot_be_held_is_answered_in_a_sentence(world: World) -> None:
    for word, (text, headers) in REFUSED.items():
        response = await world.ask(text, **named(word, **headers))
        answer = response.json()["choices"][0]["message"]["content"]
        assert answer.startswith("Lessons: ")
        assert word in answer
    assert texts(world) == []
    assert world.sampler.prompts == []
    assert SECRET.encode() not in world.ledger.path.read_bytes()


@served(lessons=False)
async def test_lessons_that_are_off_hold_nothing(world: World) -> None:
    assert always.OFF in (await world.ask(COMMAND)).text
    assert texts(world) == []
