"""What no wire gives is refused by name: several replies, logprobs, JSON, replies kept by id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.support.gateways import MODEL, chat, gateway
from tinker_claw.render.renderer import Renderer

BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": chat("hi")},
    "/responses": {"input": "hi"},
    "/messages": {"messages": chat("hi"), "max_tokens": 9},
}
AS_JSON = {"type": "json_schema", "name": "x", "json_schema": {"name": "x"}, "schema": {}}
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("/chat/completions", "n", {"n": 2}, "send it again for another"),
    ("/chat/completions", "logprobs", {"logprobs": True}, "no logprobs are returned"),
    ("/chat/completions", "top_logprobs", {"top_logprobs": 2}, "no logprobs are returned"),
    ("/chat/completions", "response_format", {"response_format": AS_JSON}, "offer a tool"),
    (
        "/chat/completions",
        "response_format",
        {"response_format": {"type": "json_object"}},
        "offer a tool",
    ),
    ("/responses", "n", {"n": 2}, "not a field"),
    ("/responses", "top_logprobs", {"top_logprobs": 2}, "no logprobs are returned"),
    (
        "/responses",
        "include[0]",
        {"include": ["message.output_text.logprobs"]},
        "not supported; reasoning.encrypted_content alone is",
    ),
    ("/chat/completions", "logit_bias", {"logit_bias": {"5": 1}}, "leave it out"),
    ("/responses", "prompt", {"prompt": {"id": "p"}}, "send instructions and input"),
    ("/responses", "max_tool_calls", {"max_tool_calls": 2}, "leave it out"),
    ("/responses", "truncation", {"truncation": "auto"}, "send a shorter input"),
    ("/responses", "text.format", {"text": {"format": AS_JSON}}, "offer a tool"),
    (
        "/responses",
        "previous_response_id",
        {"previous_response_id": "resp_1"},
        "send the whole conversation as input",
    ),
    ("/messages", "n", {"n": 2}, "not a field"),
    ("/messages", "logprobs", {"logprobs": True}, "not a field"),
    ("/messages", "output_config.format", {"output_config": {"format": AS_JSON}}, "offer a tool"),
]
NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    (
        "/chat/completions",
        {"n": 1, "logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}},
    ),
    (
        "/responses",
        {
            "top_logprobs": 0,
            "previous_response_id": None,
            "store": True,
            "include": ["reasoning.encrypted_content"],
            "text": {"format": {"type": "text"}},
        },
    ),
    ("/messages", {"output_config": {"effort": "high"}}),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_refused_by_name_and_says_what_to_do(
    tmp_path: Path, renderer: Renderer, stream: bool
) -> None:
    async with gateway(tmp_path, renderer) as world:
        for path, field, fields, says in REFUSED:
            body = {"model": MODEL, "stream": stream} | BODIES[path] | fields
            response = await world.http.post(path, json=body)
            told = response.json()["error"]["message"]
            assert response.status_code == 400, (path, field)
            assert field in told
            assert says in told
        assert world.turns() == []


async def test_values_that_ask_for_nothing_are_taken(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        for path, fields in NEUTRAL:
            body = {"model": MODEL} | BODIES[path] | fields
            response = await world.http.post(path, json=body)
            assert response.status_code == 200, response.text
        assert len(world.turns()) == 3


async def test_a_reply_has_one_choice_without_logprobs(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        (choice,) = (await world.ask("hi")).json()["choices"]
        assert (choice["index"], choice["logprobs"]) == (0, None)


class City(BaseModel):
    """What a program asks a reply to be."""

    name: str


SCHEMA = City.model_json_schema()
CALL = ' {"name": "Oslo"}}\n</tool_call>'
CHAT: dict[str, Any] = {"model": MODEL, "messages": chat("hi")}


async def test_the_way_that_a_refusal_of_json_names_works_with_the_sdks(
    tmp_path: Path, renderer: Renderer
) -> None:
    way = r"offer a tool with this schema and name it in tool_choice, which forces a call"
    async with gateway(tmp_path, renderer) as world:
        there = world.openai
        with pytest.raises(openai.BadRequestError, match=way):
            await there.chat.completions.parse(**CHAT, response_format=City)
        with pytest.raises(openai.BadRequestError, match=way):
            await there.responses.parse(model=MODEL, input="hi", text_format=City)
        world.say(CALL)
        function: Any = {"name": "city", "parameters": SCHEMA}
        named: Any = {"type": "function", "function": {"name": "city"}}
        tools: Any = [{"type": "function", "function": function}]
        done = await there.chat.completions.create(**CHAT, tools=tools, tool_choice=named)
        (call,) = done.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert City.model_validate_json(call.function.arguments).name == "Oslo"
        flat: Any = {"type": "function", "name": "city"}
        answer = await there.responses.create(
            model=MODEL, input="hi", tools=[flat | {"parameters": SCHEMA}], tool_choice=flat
        )
        (item,) = [one for one in answer.output if one.type == "function_call"]
        assert City.model_validate_json(item.arguments).name == "Oslo"
        url = world.url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as other:
            asked = CHAT | {"max_tokens": 2000}
            with pytest.raises(anthropic.BadRequestError, match=way):
                await other.messages.parse(**asked, output_format=City)
            tool: Any = {"name": "city", "input_schema": SCHEMA}
            choice: Any = {"type": "tool", "name": "city"}
            said = await other.messages.create(**asked, tools=[tool], tool_choice=choice)
            (use,) = said.content
            assert use.type == "tool_use"
            assert City.model_validate(use.input).name == "Oslo"
            thinks: Any = {"type": "enabled", "budget_tokens": 1024}
            for fields, says in (
                ({"tools": [tool], "tool_choice": choice, "thinking": thinks}, "disable it, or"),
                ({"tool_choice": {"type": "any"}}, "no tools to call; offer functions"),
                (
                    {"tools": [tool], "tool_choice": choice | {"name": "town"}},
                    "town, which is none of the functions offered: city",
                ),
            ):
                with pytest.raises(anthropic.BadRequestError, match=says):
                    await other.messages.create(**asked | fields)
