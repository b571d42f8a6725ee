"""The official `openai` client's Responses against the gateway, sync and async."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.formats.test_openai_client import TWO_CALLS
from tests.support.fakes import UNTIL_TOLD, Script
from tests.support.gateways import MODEL, gateway, spell
from tinker_claw.render.renderer import Renderer

ASKED: Any = {"model": MODEL, "input": "look"}
TOOLS: Any = [
    {"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("read", "ls")
]


async def test_whole_and_streamed_replies(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.sampler.say(Script(spell(renderer, TWO_CALLS), cached_tokens=3))
        responses = world.openai.responses
        whole = await responses.create(**ASKED, tools=TOOLS)
        async with responses.stream(**ASKED, tools=TOOLS) as stream:
            seen = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        for response in (whole, streamed):
            thought, said, read, ls = response.output
            assert thought.content[0].text == "hm"  # type: ignore[union-attr]
            assert (said.type, response.output_text) == ("message", "Looking.")
            assert [(c.name, c.arguments) for c in (read, ls)] == [  # type: ignore[union-attr]
                ("read", '{"path":"a b"}'),
                ("ls", "{}"),
            ]
            assert response.usage is not None
            turn = world.turns()[0]
            assert response.usage.input_tokens == len(turn.prompt)
            assert response.usage.output_tokens == len(turn.completion.tokens)
        assert seen[0] == "response.created"
        assert seen[-1] == "response.completed"
        assert "response.output_text.delta" in seen
        counted = await responses.input_tokens.count(**ASKED, tools=TOOLS)
        assert counted.input_tokens == len(world.turns()[0].prompt)
        assert len(world.turns()) == 2


async def test_clients_learn_of_errors_in_their_own_classes(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, patience_s=0, context_tokens=60) as world:
        create = world.openai.responses.create
        with pytest.raises(openai.BadRequestError) as refused:
            await create(**ASKED, tools=[{"type": "web_search"}])
        assert refused.value.param == "tools[0]"
        with pytest.raises(openai.NotFoundError):
            await create(model="gpt", input="hi")
        with pytest.raises(openai.BadRequestError) as long:
            await create(model=MODEL, input="go on and on " * 30)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as unknown:
            await world.openai.responses.retrieve("resp_1")
        assert unknown.value.code == "unknown_url"
        world.sampler.away = UNTIL_TOLD
        with pytest.raises(openai.InternalServerError, match="is away"):
            await create(**ASKED)
        stream = await create(**ASKED, stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.failed"
        assert "is away" in str(last.response.error)
