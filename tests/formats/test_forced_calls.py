"""Calls that a request forces: begun for the model, sampled to their end, and trained as such."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import renderers
from pydantic import BaseModel

from examples.day.npm import npm
from tests.render.test_prompt_cache import tokenizer_for
from tests.support import agent_sdks
from tests.support.gateways import MODEL, World, gateway, spell
from tests.support.openclaw import assistant, tool
from tinker_claw.render.renderer import Renderer
from tinker_claw.turn_state import Reason
from tinker_claw.types import NextState

SAID: Any = [{"role": "user", "content": "look"}]
NAMES = ("look", "list")
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTIONS = [{"name": name, "description": "Do it.", "parameters": PARAMETERS} for name in NAMES]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
FORCED = {
    "messages": SAID,
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "look"}},
}
REST = ' {"at":  "home"}}\n</tool_call>'
BEGUN = '<think>\n\n</think>\n\n<tool_call>\n{"name": "look", "arguments":'
ANY = '<think>\n\n</think>\n\n<tool_call>\n{"name": "'
"""Beginning that the calls of both tools share."""


async def by_chat(world: World, name: str | None, **more: Any) -> tuple[str, str]:
    """Name and arguments of the call in a reply that must have one."""
    choice: Any = {"type": "function", "function": {"name": name}} if name else "required"
    done = await world.openai.chat.completions.create(
        model=MODEL, messages=SAID, tools=TOOLS, tool_choice=choice, **more
    )
    (reply,) = done.choices
    assert (reply.finish_reason, reply.message.content) == ("tool_calls", None)
    (call,) = reply.message.tool_calls
    return call.function.name, call.function.arguments


async def by_stream(world: World, name: str | None) -> tuple[str, str]:
    choice = {"type": "function", "function": {"name": name}} if name else "required"
    events = await world.events("look", tools=TOOLS, tool_choice=choice)
    deltas = [choice["delta"] for event in events for choice in event.get("choices", ())]
    assert not any(delta.get("content") for delta in deltas)
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
    return call["function"]["name"], call["function"]["arguments"]


async def by_responses(world: World, name: str | None) -> tuple[str, str]:
    done = await world.openai.responses.create(
        model=MODEL,
        input="look",
        tools=[{"type": "function", "strict": None, **function} for function in FUNCTIONS],  # type: ignore[arg-type]
        tool_choice={"type": "function", "name": name} if name else "required",
    )
    (call,) = [item for item in done.output if item.type == "function_call"]
    return call.name, call.arguments


def anthropic_of(world: World) -> anthropic.AsyncAnthropic:
    url = world.url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)


async def by_messages(world: World, name: str | None) -> tuple[str, str]:
    async with anthropic_of(world) as client:
        done = await client.messages.create(
            model=MODEL,
            max_tokens=500,
            messages=SAID,
            tools=[{"name": f["name"], "input_schema": PARAMETERS} for f in FUNCTIONS],
            tool_choice={"type": "tool", "name": name} if name else {"type": "any"},
        )
    (call,) = done.content
    assert (call.type, done.stop_reason) == ("tool_use", "tool_use")
    return call.name, json.dumps(call.input, separators=(",", ":"))


@pytest.mark.parametrize("ask", [by_chat, by_stream, by_responses, by_messages])
async def test_a_forced_call_is_begun_and_the_rest_is_sampled(
    tmp_path: Path, thinker: Renderer, ask: Any
) -> None:
    async with gateway(tmp_path, thinker) as world:
        world.say(REST)
        assert await ask(world, "look") == ("look", '{"at":"home"}')
        world.say('list", "arguments": {}}\n</tool_call>')
        assert await ask(world, None) == ("list", "{}")
        for turn, begun, rest in zip(
            world.turns(),
            (BEGUN, ANY),
            (REST, 'list", "arguments": {}}\n</tool_call>'),
            strict=True,
        ):
            told = thinker.decode(turn.prompt)
            assert told.endswith(f"<|im_start|>assistant\n{begun}"), "given, hence no loss on it"
            assert turn.completion.tokens == spell(thinker, rest), "sampled, hence trained"
            assert len(turn.completion.logprobs) == len(turn.completion.tokens)
            assert turn.completion.topk_ids, "what the method needs is captured"
        assert world.column("reason") == [None, None]
        assert world.column("reply_text") == [
            '[calls look with {"at":"home"}]',
            "[calls list with {}]",
        ]


async def test_what_follows_finds_the_turn_and_goes_on_from_its_tokens(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say(REST)
        (call,) = (await world.reply(FORCED))["tool_calls"]
        world.say("There it is.")
        history = [
            *SAID,
            assistant("", (call["id"], "look", call["function"]["arguments"])),
            tool(call["id"], "a hat"),
        ]
        await world.reply({"messages": history, "tools": TOOLS})
        first, second = world.turns()
        state = world.next_states()[first.id]
        assert state == NextState.of_tools([("look", "a hat")])
        assert second.session_id == first.session_id
        whole = (*first.prompt, *first.completion.tokens)
        assert second.prompt[: len(whole)] == whole, "given and sampled ids, as they were"
        assert first.hint_at is not None
        assert first.hint_at < len(first.prompt)


async def test_it_may_be_asked_to_end_behind_its_call(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say(REST + '\n<tool_call>\n{"name": "list", "arguments": {}}\n</tool_call>')
        assert await by_chat(world, "look", parallel_tool_calls=False) == (
            "look",
            '{"at":"home"}',
        )
        assert world.column("reason") == [Reason.ONE_CALL]


async def test_a_rest_that_is_no_call_comes_whole_as_text(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say(" home")
        message = await world.reply(FORCED)
        assert message["content"] == '<tool_call>\n{"name": "look", "arguments": home'
        assert "tool_calls" not in message


async def test_where_the_format_has_no_calls_it_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_for("qwen3")
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    own = Renderer(tokenizer, renderers.config_from_name("default"))
    async with gateway(tmp_path, own) as world:
        response = await world.ask("look", tools=TOOLS, tool_choice="required")
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tool_choice")
        assert "no call can be forced on this model" in error["message"]
        assert (await world.ask("look", tools=TOOLS)).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", agent_sdks.STRUCTURED)
async def test_clients_get_their_objects_by_a_tool(
    tmp_path: Path, renderer: Renderer, name: str
) -> None:
    if name.startswith("ai-sdk") and npm() is None:
        pytest.skip("npm is not installed")
    async with gateway(tmp_path, renderer) as world:
        world.say(' {"city": "Oslo", "days": 2}}\n</tool_call>')
        told = await asyncio.to_thread(agent_sdks.run_structured, name, world.url)
        assert json.loads(told) == {"city": "Oslo", "days": 2}
        (turn,) = world.turns()
        assert renderer.decode(turn.prompt).endswith('", "arguments":'), "its own tool, forced"
        assert world.column("reason") == [None]


async def test_a_refusal_of_json_names_the_way_to_force_a_call(
    tmp_path: Path, renderer: Renderer
) -> None:
    class City(BaseModel):
        name: str

    way = "name it in tool_choice, which forces a call"
    async with gateway(tmp_path, renderer) as world, anthropic_of(world) as messages:
        with pytest.raises(openai.BadRequestError, match=way):
            await world.openai.chat.completions.parse(
                model=MODEL, messages=SAID, response_format=City
            )
        with pytest.raises(openai.BadRequestError, match=way):
            await world.openai.responses.parse(model=MODEL, input="hi", text_format=City)
        with pytest.raises(anthropic.BadRequestError, match=way):
            await messages.messages.parse(
                model=MODEL, messages=SAID, max_tokens=9, output_format=City
            )
