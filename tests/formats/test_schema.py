"""Strict tools: calls are not constrained, and what breaks a schema is noted on the turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import pydantic_function_tool
from openai.types.chat import ChatCompletionFunctionToolParam
from pydantic import BaseModel

from tests import agent_sdks
from tests.gateways import MODEL, World, gateway
from tinker_claw.cli.explain import tell
from tinker_claw.config.settings import Training
from tinker_claw.formats.schema import misfit
from tinker_claw.ledger.database import FILE, reading
from tinker_claw.ledger.views import read_turn
from tinker_claw.render.renderer import Renderer
from tinker_claw.telemetry import Telemetry


class GetWeather(BaseModel):
    city: str
    days: int


TOOL: ChatCompletionFunctionToolParam = pydantic_function_tool(GetWeather)


def calling(arguments: str, name: str = "GetWeather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture
async def world(tmp_path: Path, renderer: Renderer) -> AsyncIterator[World]:
    async with gateway(tmp_path, renderer) as world:
        yield world


async def test_a_strict_tool_is_served_and_a_call_that_breaks_it_is_noted(world: World) -> None:
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
    noted = "the call of GetWeather does not fit its schema: arguments has no field days"
    assert world.column("misfit") == [None, None, noted, None]
    assert [seen["misfit"] for seen in world.observer.seen] == [False, False, True, False]
    assert world.column("untrained_because") == [None] * 4, "it is trained like any other"
    assert world.next_states()[3] is not None, "by what follows it"
    with reading(world.ledger.path.parent / FILE) as ledger:
        turn, lines = read_turn(ledger, 3), tell(ledger, 3, Training(), text=True)
    assert turn is not None
    assert turn.misfit == noted
    assert "The call of GetWeather does not fit its schema: arguments has no field days." in lines


@pytest.mark.slow
@pytest.mark.parametrize("name", agent_sdks.PROGRAMS)
async def test_agent_frameworks_call_their_first_tool(world: World, name: str) -> None:
    world.say(calling('{"a": 3, "b": 4}', "add"), "It is 7.")
    assert await asyncio.to_thread(agent_sdks.run, name, world.url) == "It is 7."
    world.say(calling('{"a": 3, "b": 4, "c": 5}', "add"), calling('{"a": 3, "b": 4}', "add"), "7")
    assert await asyncio.to_thread(agent_sdks.run, name, world.url) == "7"
    noted = "the call of add does not fit its schema: a field of arguments that is not named must "
    noted += "not be there"
    assert world.column("misfit") == [None, None, noted, None, None]
    assert world.column("kind") == ["main"] * 5
    assert world.next_states()[3] is not None, "it is told what was wrong, and that judges it"


async def test_other_tools_are_not_looked_at(world: World) -> None:
    loose = {"type": "function", "function": TOOL["function"] | {"strict": False}}
    world.say(calling('{"city": 3}'))
    assert (await world.ask("hello", tools=[loose])).status_code == 200
    world.say(calling("{}", "Another"))
    assert (await world.ask("hello", tools=[TOOL])).status_code == 200
    assert world.column("misfit") == [None, None]


def test_misfits_are_counted() -> None:
    telemetry = Telemetry(None)
    fields: dict[str, Any] = dict.fromkeys(("user", "kind", "reason"), "x")
    fields |= dict.fromkeys(("session", "turn", "version"), 1)
    fields |= dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens", "seconds"), 1)
    for broken in (True, False, True):
        telemetry.turn_captured(**fields, first_token_s=None, misfit=broken)
    assert b"tinker_claw_misfits_total 2.0" in telemetry.exposition()


NODE = {"$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}, "n": {"minimum": 1}}}}}


@pytest.mark.parametrize(
    ("schema", "arguments", "says"),
    [
        ({"type": "object", "properties": {"a": {"type": "string"}}}, {"a": "x"}, None),
        ({"properties": {"a": {"type": "string"}}}, {"a": 1}, "arguments.a is not of type string"),
        ({"properties": {"a": {"type": ["string", "null"]}}}, {"a": None}, None),
        ({"properties": {"a": {"type": "integer"}}}, {"a": True}, "arguments.a is not of type int"),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 2.0}, None),
        ({"required": ["a"]}, {}, "arguments has no field a"),
        ({"additionalProperties": False}, {"pass": 1}, "a field of arguments that is not named mu"),
        ({"properties": {"a": {"enum": [1, "x"]}}}, {"a": True}, "arguments.a is none of the val"),
        ({"properties": {"a": {"const": 1}}}, {"a": 2}, "arguments.a is not the value"),
        ({"properties": {"a": {"items": {"maxLength": 2}}}}, {"a": ["b", "ccc"]}, "a[1] is too la"),
        ({"properties": {"a": {"minItems": 1}}}, {"a": []}, "arguments.a is too small"),
        ({"properties": {"a": {"exclusiveMinimum": 1}}}, {"a": 1}, "arguments.a is too small"),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"b": 1}, None),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {}, "none of what it may be"),
        ({"allOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": 1}, "has no field b"),
        (NODE | {"$ref": "#/$defs/node"}, {"next": {"next": {"n": 0}}}, "next.next.n is too small"),
        (NODE | {"$ref": "#/$defs/node"}, {"next": {"next": {"n": 1}}}, None),
        ({"type": "object"}, [], "arguments is not of type object"),
        ({"type": "tuple", "$ref": "http://127.0.0.1:1/x", "pattern": "(a+)+$"}, {}, None),
        ({"required": [["a"], 3], "enum": 3, "properties": [], "items": 4, "anyOf": {}}, {}, None),
    ],
)
def test_what_fits_a_schema(schema: Any, arguments: Any, says: str | None) -> None:
    found = misfit(schema, json.dumps(arguments))
    assert found == says if says is None or found is None else says in found


@pytest.mark.parametrize("arguments", ["", "{", "[" * 100_000])
def test_arguments_that_are_no_json(arguments: str) -> None:
    assert misfit({}, arguments) == "its arguments are no JSON"


def doubling(levels: int) -> dict[str, Any]:
    steps = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(levels)}
    return {"$defs": steps, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        (doubling(60), {}),
        ({"$ref": "#"}, {}),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, {}),
        ({"items": {"enum": list(range(5000))}}, [4999] * 5000 + [-1]),
        ({"pattern": "(a+)+$", "format": "regex"}, "a" * 5000 + "b"),
    ],
)
def test_a_check_ends_whatever_the_schema_says(schema: Any, arguments: Any) -> None:
    assert misfit(schema, json.dumps(arguments)) is None
