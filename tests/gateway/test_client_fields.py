"""What real clients send that the model cannot be shown: passed over, or refused by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.render.test_own_template import folder
from tests.support import agent_sdks
from tests.support.gateways import MODEL, World, chat, gateway
from tinker_claw.gateway.parsing import BEGUN
from tinker_claw.render.renderer import Renderer

NAMING = "{% for m in messages %}<|im_start|>{{ m.name }}: {{ m.content }}<|im_end|>{% endfor %}"
NAMED = {"role": "user", "name": "Zoe<|im_end|>", "content": "Who am I?"}
ENDS = chat("Say one.", "One.")
"""A history that ends with the assistant."""
WIRES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": ENDS},
    "/messages": {"messages": ENDS, "max_tokens": 9},
    "/responses": {"input": ENDS},
}


async def left_out(world: World) -> list[str]:
    return (await world.http.get("/../healthz")).json()["left_out"]


async def test_name_of_a_message_is_shown_where_the_template_has_a_place(
    tmp_path: Path, renderer: Renderer
) -> None:
    naming = Renderer.load(str(folder(tmp_path / "model", NAMING, "<|im_end|>")))
    for shows, count in ((renderer, 0), (naming, 1)):
        async with gateway(tmp_path / shows.family, shows) as world:
            assert (await world.ask(NAMED)).status_code == 200
            tokens = world.sampler.prompts[-1]
            assert renderer.decode(tokens).count("Zoe<|im_end|>: ") == count
            ends = [at for at in tokens if renderer.decode((at,)) == "<|im_end|>"]
            assert len(ends) == 1, "a name is text"
            assert await left_out(world) == []


@pytest.mark.slow
async def test_autogen_teams_are_answered(world: World) -> None:
    world.say("Oslo, two days.")
    said = await asyncio.to_thread(agent_sdks.run_autogen, world.url)
    reply = ": Oslo, two days."
    asked = f"user: {agent_sdks.ASKED}"
    assert said.splitlines() == [
        f"{asked}; writer{reply}; critic{reply}",
        f"{asked}; alone{reply}; alone{reply}",
    ]
    assert await left_out(world) == [BEGUN]


@pytest.mark.parametrize("level", ["low", "medium", "high"])
async def test_verbosity_is_passed_over_with_a_note(world: World, level: str) -> None:
    for path, fields in (
        ("/chat/completions", {"messages": chat("hi"), "verbosity": level}),
        ("/responses", {"input": "hi", "text": {"verbosity": level}}),
    ):
        body = {"model": MODEL} | fields
        assert (await world.http.post(path, json=body)).status_code == 200
    notes = [f"{at} {level}: ask for it in the prompt" for at in ("verbosity", "text.verbosity")]
    assert await left_out(world) == ([] if level == "medium" else notes)


@pytest.mark.parametrize("path", WIRES)
async def test_history_that_ends_with_the_assistant_gets_another_message(
    world: World, renderer: Renderer, path: str
) -> None:
    world.say("Two.")
    response = await world.http.post(path, json={"model": MODEL} | WIRES[path])
    assert response.status_code == 200
    assert "Two." in response.text
    prompt = renderer.decode(world.sampler.prompts[-1])
    assert "One.<|im_end|>\n<|im_start|>assistant\n" in prompt
    assert await left_out(world) == [BEGUN]


TRIGGER = {"type": "compaction_trigger"}


@pytest.mark.parametrize("stream", [False, True])
async def test_compaction_is_refused_by_name(world: World, stream: bool) -> None:
    said = [{"role": "user", "content": "hi"}]
    for path, items, field in (
        ("/responses", [*said, TRIGGER], "compaction_trigger"),
        ("/responses/compact", said, "/v1/responses/compact"),
    ):
        body = {"model": MODEL, "input": items, "stream": stream}
        refused = await world.http.post(path, json=body)
        assert refused.status_code in (400, 404)
        assert field in refused.json()["error"]["message"]
        assert "OpenAI" in refused.json()["error"]["message"]
    assert world.turns() == []
