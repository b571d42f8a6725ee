"""Texts of one message, and a user's messages in a row, however a client splits or joins them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.formats.test_histories import ROUTES, assistant, prompt, user
from tests.support.gateways import World, gateway
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import NextState

Body = dict[str, Any]
ASKED, STOPPED, INSTEAD = "Write of bees.", "And of wasps.", "No: of ants."
CORRECTED = "No, shorter."


def parts(*texts: str) -> list[Body]:
    return [{"type": "text", "text": text} for text in texts]


def result(wire: str, *texts: str) -> list[Body]:
    """A call of a tool and its result in parts."""
    content, function = parts(*texts), {"name": "ls", "arguments": "{}"}
    if wire == "chat":
        call = {"id": "c1", "type": "function", "function": function}
        tool = {"role": "tool", "tool_call_id": "c1", "content": content}
        return [assistant("", tool_calls=[call]), tool]
    if wire == "messages":
        use = {"type": "tool_use", "id": "c1", "name": "ls", "input": {}}
        found = {"type": "tool_result", "tool_use_id": "c1", "content": content}
        return [assistant([use]), user([found])]
    output = [part | {"type": "input_text"} for part in content]
    return [
        {"type": "function_call", "call_id": "c1"} | function,
        {"type": "function_call_output", "call_id": "c1", "output": output},
    ]


@pytest.mark.parametrize("wire", ROUTES)
async def test_text_parts_are_lines_of_the_prompt(
    tmp_path: Path, renderer: Renderer, wire: str
) -> None:
    async with gateway(tmp_path, renderer) as world:
        shown = await prompt(world, wire, [user(parts("/compact", "Thanks, three"))])
        assert "user\n/compact\nThanks, three<|im_end|>" in shown
        shown = await prompt(world, wire, [user(parts("a\n", "b", "", "\n\nc"))])
        assert "user\na\nb\n\nc<|im_end|>" in shown, "they were lines already"
        found = [user("Look."), *result(wire, "a.txt", "b.txt"), user("So?")]
        assert "a.txt\nb.txt" in await prompt(world, wire, found)
        if wire != "messages":
            system = {"role": "system", "content": parts("Be kind.", "Be brief.")}
            assert "Be kind.\nBe brief." in await prompt(world, wire, [system, user("hi")])


@pytest.mark.parametrize("wire", ROUTES)
async def test_pieces_of_a_reply_are_joined_as_they_are(
    tmp_path: Path, renderer: Renderer, wire: str
) -> None:
    kind = "output_text" if wire == "responses" else "text"
    pieces = [part | {"type": kind} for part in parts("Bees", " dance.")]
    async with gateway(tmp_path, renderer) as world:
        world.say("Bees dance.", "Ok.")
        await prompt(world, wire, [user(ASKED)])
        shown = await prompt(world, wire, [user(ASKED), assistant(pieces), user(CORRECTED)])
        assert "Bees dance.<|im_end|>" in shown
        assert world.next_states()[1] == NextState("user", CORRECTED)


FORMS: dict[str, Callable[[str, str], list[Body]]] = {
    "apart": lambda one, two: [user(one), user(two)],
    "parts": lambda one, two: [user(parts(one, two))],
    "parts and apart": lambda one, two: [user(parts(one)), user(parts(two))],
    "lines": lambda one, two: [user(f"{one}\n{two}")],
    "paragraphs": lambda one, two: [user(f"{one}\n\n{two}")],
    "glued": lambda one, two: [user(f"{one}{two}")],
}


async def corrected(world: World, wire: str, before: list[Body], later: list[Body]) -> None:
    """Stop a message, send another, and correct the reply to it."""
    world.say("Bees dance.", "Ants walk.", "Ants.")
    head = [user(ASKED), assistant("Bees dance.")]
    await prompt(world, wire, head[:1])
    await prompt(world, wire, [*head, *before])
    await prompt(world, wire, [*head, *later, assistant("Ants walk."), user(CORRECTED)])


@pytest.mark.parametrize("wire", ROUTES)
@pytest.mark.parametrize("before", FORMS)
async def test_a_correction_behind_an_unanswered_message_reaches_the_reply_to_both(
    tmp_path: Path, renderer: Renderer, wire: str, before: str
) -> None:
    for later, form in FORMS.items():
        async with gateway(tmp_path / later, renderer) as world:
            sent = FORMS[before](STOPPED, INSTEAD)
            await corrected(world, wire, sent, form(STOPPED, INSTEAD))
            states = world.next_states()
            assert states[2] == NextState("user", CORRECTED), (before, later)
            assert states[3] is None
            assert set(world.column("lost")) == {None}


async def test_other_words_in_a_row_are_another_history(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        before = FORMS["apart"](STOPPED, INSTEAD)
        await corrected(world, "chat", before, FORMS["parts"](STOPPED, "No: of flies."))
        assert world.next_states()[2] is None
        assert world.column("lost")[2] == "edited"
