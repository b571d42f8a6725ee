"""Texts of one message, and a user's messages in a row, however a client splits or joins them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.day.npm import npm
from tests.formats.test_histories import ROUTES, assistant, prompt, user
from tests.support.gateways import World, gateway
from tests.support.openclaw import (
    CLOCK,
    HEARTBEAT,
    POLL,
    TRACE,
    openclaw,
    own_prompts,
    runtime,
    stamped,
)
from tests.support.openclaw import assistant as replied
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
async def test_text_parts_are_lines_of_the_prompt(world: World, wire: str) -> None:
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
async def test_pieces_of_a_reply_are_joined_as_they_are(world: World, wire: str) -> None:
    kind = "output_text" if wire == "responses" else "text"
    pieces = [part | {"type": kind} for part in parts("Bees", " dance.")]
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


async def corrected(
    world: World, wire: str, before: list[Body], later: list[Body]
) -> list[NextState | None]:
    """Stop a message, send another, and correct the reply to it; return what follows each reply."""
    begun = len(world.turns())
    world.say("Bees dance.", "Ants walk.", "Ants.")
    head = [user(f"{ASKED} {begun}"), assistant("Bees dance.")]
    await prompt(world, wire, head[:1])
    await prompt(world, wire, [*head, *before])
    await prompt(world, wire, [*head, *later, assistant("Ants walk."), user(CORRECTED)])
    return [world.ledger.turns.next_state(turn.id) for turn in world.turns()[begun:]]


@pytest.mark.parametrize("wire", ROUTES)
@pytest.mark.parametrize("before", FORMS)
async def test_a_correction_behind_an_unanswered_message_reaches_the_reply_to_both(
    world: World, wire: str, before: str
) -> None:
    for later, form in FORMS.items():
        sent = FORMS[before](STOPPED, INSTEAD)
        states = await corrected(world, wire, sent, form(STOPPED, INSTEAD))
        assert states[1:] == [NextState("user", CORRECTED), None], (before, later)
    assert set(world.column("lost")) == {None}


@pytest.mark.parametrize(
    ("wire", "note"),
    [
        ("messages", "[Request interrupted by user]"),
        ("responses", "<turn_aborted>\nThe user interrupted the previous turn.\n</turn_aborted>"),
    ],
)
async def test_an_interruption_between_two_messages_is_part_of_neither(
    world: World, wire: str, note: str
) -> None:
    """As Claude Code and Codex write it, whose clients split and join what stands around it."""
    before = [user(STOPPED), user(note), user(INSTEAD)]
    forms = [before, [user(parts(STOPPED, note, INSTEAD))], [user(STOPPED), user(INSTEAD)]]
    for later in (*forms, [user(parts(STOPPED, note)), user(INSTEAD)]):
        states = await corrected(world, wire, before, later)
        assert states[1] == NextState("user", CORRECTED), later


async def test_other_words_in_a_row_are_another_history(world: World) -> None:
    before = FORMS["apart"](STOPPED, INSTEAD)
    states = await corrected(world, "chat", before, FORMS["parts"](STOPPED, "No: of flies."))
    assert states[1] is None
    assert world.column("lost")[2] == 1


SHORT = "[OpenClaw exec completion]\nDisable automatic completion turns with tools.exec.x=false."


def shown_later(short: str) -> dict[str, list[Body]]:
    """A silent prompt of OpenClaw's own and the user's next words, as later histories show them."""
    words = user(stamped(CORRECTED))
    return {
        "gone": [words],
        "kept": [user(stamped(short)), replied("NO_REPLY"), words],
        "without its reply": [user(stamped(short)), words],
        "in one message": [user(parts(stamped(short), CORRECTED))],
        "joined": [user(f"{stamped(short)}\n{CORRECTED}")],
    }


async def seen_through(world: World, name: str, prompt: str, forms: dict[str, list[Body]]) -> None:
    """Correct a reply after a prompt of OpenClaw's own that was answered in silence."""
    for (now, told), later in zip(forms.items(), [*forms][1:] + [*forms][:1], strict=True):
        line = runtime(f"agent:main:explicit:{name}-{now}-{later}", f"{name}-{now}-{later}")
        before, done = replied("Bees dance."), len(world.turns())
        world.say("Bees dance.", "NO_REPLY", "Bees.", "Bye.")
        await world.reply(openclaw(ASKED, line=line), **TRACE)
        await world.reply(openclaw(ASKED, before, user(prompt), line=line), **TRACE)
        await world.reply(openclaw(ASKED, before, *told, line=line), **TRACE)
        last = [before, *forms[later], replied("Bees."), user(stamped("Thanks."))]
        await world.reply(openclaw(ASKED, *last, line=line), **TRACE)
        turns = world.turns()[done:]
        states = [world.ledger.turns.next_state(turn.id) for turn in turns]
        texts = [state and state.text for state in states]
        assert texts == [CORRECTED, None, "Thanks.", None], (name, now, later)
        assert set(world.column("lost")) == {None}


@pytest.mark.parametrize(
    ("prompt", "short"),
    [
        (f"An async command has completed.{CLOCK}", SHORT),
        (HEARTBEAT["content"], POLL),
    ],
    ids=["exec", "heartbeat"],
)
async def test_a_correction_behind_a_silent_prompt_reaches_the_reply_before(
    world: World, prompt: str, short: str
) -> None:
    await seen_through(world, "silent", prompt, shown_later(short))


@pytest.mark.openclaw
@pytest.mark.slow
@pytest.mark.skipif(npm() is None, reason="npm is not installed: OpenClaw cannot be run")
async def test_openclaws_own_prompts_are_seen_through(tmp_path: Path, renderer: Renderer) -> None:
    """Their texts are built by the package: live, and the short forms of later histories."""
    built = own_prompts(CORRECTED)
    async with gateway(tmp_path, renderer, context_tokens=8192) as world:
        for number, (source, text, short) in enumerate(built.events):
            await seen_through(world, f"{source}{number}", text, shown_later(short))
        forms = shown_later(built.steering)
        del forms["joined"]
        await seen_through(world, "steering", stamped(built.steering), forms)
        world.say("Bees dance.", "Bees.")
        line = runtime("agent:main:explicit:steered", "steered")
        await world.reply(openclaw(ASKED, line=line), **TRACE)
        said = [replied("Bees dance."), user(stamped(built.steered))]
        await world.reply(openclaw(ASKED, *said, line=line), **TRACE)
        assert world.next_states()[world.turns()[-2].id] == NextState("user", CORRECTED)
