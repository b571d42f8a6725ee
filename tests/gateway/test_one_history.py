"""The same history, sent small or large, anew or again: prompt, turns and refusals are the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gateway_wires import WIRES, Json, Spoken
from tests.formats.test_known_history import TOOLS, conversation
from tests.support.gateways import MODEL, World, gateway
from tinker_claw.render.renderer import Renderer

JSON = {"content-type": "application/json"}
ASKED, CORRECTED = "And now? \ud83d", "No, that is wrong."
CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>'


async def talk(world: World, wire: Spoken, again: int) -> list[Any]:
    """Talk in three turns, each sent as often; return all that the gateway made of them."""
    said, made = conversation(2)[:-1], list[Any]()
    for asked, spoken in ((ASKED, "fine"), (CORRECTED, f"I look.{CALL}"), ("", "done")):
        world.say(spoken)
        if asked:
            said.append({"role": "user", "content": asked})
        else:
            found = {"role": "tool", "tool_call_id": said[-1]["tool_calls"][0]["id"]}
            said.append(found | {"content": "a.txt"})
        made.append(await refusal(world, wire, said))
        answers = list[bytes]()
        for _ in range(again):
            told = await world.http.post(wire.path, content=body(wire, said), headers=JSON)
            assert told.status_code == 200, told.text
            answers.append(told.content)
        said.append(wire.reply(answers[-1]))
    turns = world.turns()[again - 1 :: again]
    for turn, prompt in zip(turns, world.sampler.prompts[again - 1 :: again], strict=True):
        assert turn.prompt == prompt, "what was recorded is what was sampled from"
    states = [world.next_states()[turn.id] for turn in turns]
    return [*made, [turn.prompt for turn in turns], [turn.request_text for turn in turns], states]


async def refusal(world: World, wire: Spoken, said: Sequence[Json]) -> Any:
    """What is said of this history with a number for its last text."""
    sent = body(wire, [*said[:-1], said[-1] | {"content": "a rare text"}])
    told = await world.http.post(
        wire.path, content=sent.replace(b'"a rare text"', b"7"), headers=JSON
    )
    assert told.status_code == 400
    return told.json()


def body(wire: Spoken, said: Sequence[Json]) -> bytes:
    """A request; half a pair in it is written as JSON escapes it."""
    escaped = [
        one | {"content": one["content"].replace("\ud83d", "HALF")}
        if isinstance(one["content"], str)
        else one
        for one in said
    ]
    return wire.body(escaped, TOOLS, model=MODEL).replace(b"HALF", rb"\ud83d")


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
async def test_neither_size_nor_cache_changes_prompt_turn_or_refusal(
    tmp_path: Path, renderer: Renderer, wire: Spoken, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[Any]()
    for large in (False, True):
        monkeypatch.setattr("tinker_claw.gateway.parsing._LARGE", 1 if large else 10**9)
        monkeypatch.setattr("tinker_claw.gateway.parsing._UNREAD", 1 if large else 10**9)
        for again in (1, 3):
            async with gateway(tmp_path / f"{large} {again}", renderer) as world:
                made.append(await talk(world, wire, again))
    assert all(one == made[0] for one in made)
    *_, texts, states = made[0]
    assert texts[0] == "And now? \ufffd"
    assert [state and (state.role, state.text) for state in states] == [
        ("user", CORRECTED),
        ("tool", "[result 1 of 1, ls]\na.txt"),
        None,
    ]
