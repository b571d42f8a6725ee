"""Strict tools are served like any other, and what follows a call judges it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import pydantic_function_tool
from openai.types.chat import ChatCompletionFunctionToolParam
from pydantic import BaseModel

from tests.support import agent_sdks
from tests.support.gateways import MODEL, World


class GetWeather(BaseModel):
    city: str
    days: int


TOOL: ChatCompletionFunctionToolParam = pydantic_function_tool(GetWeather)


def calling(arguments: str, name: str = "GetWeather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def test_a_strict_tool_is_served_and_a_call_that_breaks_it_is_trained(world: World) -> None:
    assert TOOL["function"].get("strict") is True, "as the SDK makes it"
    user: Any = {"role": "user", "content": "And the weather?"}
    for arguments in ('{"city": "Oslo", "days": 2}', '{"city": "Oslo"}'):
        world.say(calling(arguments), "fine")
        asked: list[Any] = [user]
        done = await world.openai.chat.completions.create(model=MODEL, messages=asked, tools=[TOOL])
        message = done.choices[0].message
        (call,) = message.tool_calls or ()
        assert call.type == "function"
        assert json.loads(call.function.arguments) == json.loads(arguments), "as it was sampled"
        result = {"role": "tool", "tool_call_id": call.id, "content": "error: which days?"}
        asked += [message.to_dict(), result]
        stream = await world.openai.chat.completions.create(
            model=MODEL, messages=asked, tools=[TOOL], stream=True
        )
        async for _ in stream:
            pass
    assert world.column("reason") == [None] * 4, "it is trained like any other"
    assert world.next_states()[3] is not None, "by what follows it"


@pytest.mark.slow
@pytest.mark.parametrize("name", agent_sdks.PROGRAMS)
async def test_agent_frameworks_call_their_first_tool(world: World, name: str) -> None:
    world.say(calling('{"a": 3, "b": 4}', "add"), "It is 7.")
    assert await asyncio.to_thread(agent_sdks.run, name, world.url) == "It is 7."
    world.say(calling('{"a": 3, "b": 4, "c": 5}', "add"), calling('{"a": 3, "b": 4}', "add"), "7")
    assert await asyncio.to_thread(agent_sdks.run, name, world.url) == "7"
    assert world.column("kind") == ["main"] * 5
    assert world.next_states()[3] is not None, "it is told what was wrong, and that judges it"
