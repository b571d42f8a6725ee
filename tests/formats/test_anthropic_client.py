"""The official `anthropic` client against the gateway: what its users rely on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from tests.formats.test_openai_client import TWO_CALLS
from tests.support.fakes import UNTIL_TOLD, Script
from tests.support.gateways import MODEL, World, gateway, spell
from tinker_claw.render.renderer import Renderer

KEY = "the-right-one-12345"
ASKED: Any = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "look"}]}
TOOLS: Any = [{"name": name, "input_schema": {"type": "object"}} for name in ("read", "ls")]
SHOWN: Any = {"type": "adaptive"}


@asynccontextmanager
async def client_of(world: World, **options: Any) -> AsyncIterator[AsyncAnthropic]:
    url = world.url.removesuffix("/v1")
    async with AsyncAnthropic(
        **{"base_url": url, "api_key": KEY, "max_retries": 0} | options
    ) as client:
        yield client


async def test_whole_and_streamed_replies(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer, api_key=KEY) as world, client_of(world) as client:
        world.sampler.say(Script(spell(renderer, TWO_CALLS), cached_tokens=3))
        whole = await client.messages.create(**ASKED, tools=TOOLS, thinking=SHOWN)
        async with client.messages.stream(**ASKED, tools=TOOLS, thinking=SHOWN) as stream:
            seen = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            thought, said, read, ls = message.content
            assert (thought.type, thought.thinking) == ("thinking", "hm")  # type: ignore[union-attr]
            assert (said.type, said.text) == ("text", "Looking.")  # type: ignore[union-attr]
            assert [(b.name, b.input) for b in (read, ls)] == [  # type: ignore[union-attr]
                ("read", {"path": "a b"}),
                ("ls", {}),
            ]
            assert message.stop_reason == "tool_use"
            usage, turn = message.usage, world.turns()[0]
            assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(turn.prompt)
            assert usage.cache_read_input_tokens == 3
            assert usage.output_tokens == len(turn.completion.tokens)
        assert seen[-1] == "message_stop"
        assert seen.count("content_block_start") == seen.count("content_block_stop") == 4
        assert [turn.completion.tokens for turn in world.turns()] == [
            spell(renderer, TWO_CALLS)
        ] * 2
        plain = await client.messages.create(**ASKED, stop_sequences=["ing"], tools=TOOLS)
        assert plain.content[0].type == "text", "thinking was not asked for"
        assert (plain.stop_reason, plain.stop_sequence) == ("stop_sequence", "ing")


async def test_a_prompt_is_counted_and_models_are_listed(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, api_key=KEY) as world, client_of(world) as client:
        asked = {name: value for name, value in ASKED.items() if name != "max_tokens"}
        counted = await client.messages.count_tokens(**asked, tools=TOOLS, system="Be brief.")
        assert world.turns() == []
        await client.messages.create(**ASKED, tools=TOOLS, system="Be brief.")
        assert counted.input_tokens == len(world.turns()[0].prompt)
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).display_name == MODEL


async def test_either_place_of_the_key_is_read(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer, api_key=KEY) as world:
        for options in ({"api_key": KEY}, {"api_key": None, "auth_token": KEY}):
            async with client_of(world, **options) as client:
                assert (await client.messages.create(**ASKED)).content
        async with client_of(world, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError, match="send it as x-api-key"):
                await client.messages.create(**ASKED)


async def test_clients_learn_of_errors_in_their_own_classes(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with (
        gateway(tmp_path, renderer, api_key=KEY, patience_s=0, context_tokens=60) as world,
        client_of(world) as client,
    ):
        create = client.messages.create
        with pytest.raises(anthropic.BadRequestError, match="there are no tools to call"):
            await create(**ASKED, tool_choice={"type": "any"})
        with pytest.raises(anthropic.NotFoundError, match="is not served here") as raised:
            await create(**ASKED | {"model": "claude"})
        assert raised.value.type == "not_found_error"
        long = [{"role": "user", "content": "go on and on " * 30}]
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await create(**ASKED | {"messages": long})
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.list()
        world.sampler.away = UNTIL_TOLD
        with pytest.raises(anthropic.InternalServerError, match="is away") as down:
            await create(**ASKED)
        assert (down.value.status_code, down.value.type) == (503, "overloaded_error")
        with pytest.raises(anthropic.APIStatusError, match="is away"):
            async with client.messages.stream(**ASKED) as stream:
                await stream.get_final_message()
