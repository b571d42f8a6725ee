"""Calls, cut calls and counts of thinking as clients of the three wires get them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from renderers import config_from_name

from tests.render.test_prompt_cache import tokenizer_for
from tests.support.gateways import MODEL, World, gateway, spell
from tinker_claw.render.renderer import Renderer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "content": {"type": "string"},
        "lines": {"$ref": "#/$defs/count"},
        "force": {"type": ["boolean", "null"]},
    },
    "$defs": {"count": {"type": "integer"}},
}
THOUGHT = "Let me see.\nTwo of them."
WIRES = ("chat", "responses", "messages")


async def ask(world: World, wire: str, stream: bool, **limit: int) -> Any:
    """Return what the wire's own client makes of a reply."""
    if wire == "chat":
        completions = world.openai.chat.completions
        function = {"name": "write", "parameters": SCHEMA}
        fields: Any = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": function}],
            **limit,
        }
        if not stream:
            return await completions.create(**fields)
        # Their helper takes a cut reply for an error.
        chunks = await completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
        return [chunk async for chunk in chunks]
    if wire == "responses":
        tool = {"type": "function", "name": "write", "parameters": SCHEMA, "strict": False}
        most = limit.get("max_tokens", 500)
        fields = {"model": MODEL, "input": "hi", "tools": [tool], "max_output_tokens": most}
        if not stream:
            return await world.openai.responses.create(**fields)
        events = await world.openai.responses.create(**fields, stream=True)
        return [event async for event in events][-1].response  # type: ignore[union-attr]
    at = world.url.removesuffix("/v1")
    async with AsyncAnthropic(base_url=at, api_key="none", max_retries=0) as client:
        fields = {
            "model": MODEL,
            "max_tokens": 500,
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"name": "write", "input_schema": SCHEMA}],
            **limit,
        }
        if not stream:
            return await client.messages.create(**fields)
        async with client.messages.stream(**fields) as events:
            return await events.get_final_message()


def got(wire: str, reply: Any) -> tuple[str, list[dict[str, Any]], str]:
    """Text, arguments of the calls, and why the reply ended."""
    if wire == "messages":
        texts = [block.text for block in reply.content if block.type == "text"]
        inputs = [block.input for block in reply.content if block.type == "tool_use"]
        return "".join(texts), inputs, reply.stop_reason
    if wire == "responses":
        items = [item for item in reply.output if item.type == "function_call"]
        why = reply.incomplete_details.reason if reply.incomplete_details else ""
        ended = f"{reply.status} {why}".strip()
        return reply.output_text, [json.loads(item.arguments) for item in items], ended
    if isinstance(reply, list):
        deltas = [one.choices[0].delta for one in reply if one.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        text = "".join(delta.content or "" for delta in deltas)
        ended = [one.choices[0].finish_reason for one in reply if one.choices][-1]
    else:
        message, ended = reply.choices[0].message, reply.choices[0].finish_reason
        calls, text = message.tool_calls or (), message.content or ""
    return text, [json.loads(call.function.arguments) for call in calls], ended


@pytest.fixture(scope="module")
def qwen35() -> Renderer:
    return Renderer(tokenizer_for("qwen3.5"), config_from_name("qwen3.5"))


@pytest.fixture
async def world(tmp_path: Path, qwen35: Renderer) -> AsyncIterator[World]:
    async with gateway(tmp_path, qwen35) as world:
        yield world


VALUES = {"path": "12", "content": "\n    def f():\n\tpass\n\n", "lines": 3, "force": None}
WRITTEN = (
    f"{THOUGHT}\n</think>\n\nSo.\n\n<tool_call>\n<function=write>\n<parameter=path>\n12\n"
    f"</parameter>\n<parameter=content>\n{VALUES['content']}\n</parameter>\n<parameter=lines>\n3\n"
    "</parameter>\n<parameter=force>\nNone\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
async def test_arguments_arrive_as_the_model_wrote_them(
    world: World, wire: str, stream: bool
) -> None:
    world.say(WRITTEN)
    text, calls, ended = got(wire, await ask(world, wire, stream))
    assert (text, calls) == ("So.", [VALUES])
    assert ended in ("tool_calls", "completed", "tool_use")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
async def test_a_second_call_that_the_token_limit_cuts_off(
    world: World, qwen35: Renderer, wire: str, stream: bool
) -> None:
    whole = WRITTEN + "\n" + WRITTEN.partition("So.\n\n")[2]
    world.say(whole)
    limit = len(spell(qwen35, whole)) - 9
    text, calls, ended = got(wire, await ask(world, wire, stream, max_tokens=limit))
    assert (text, calls) == ("So.", [VALUES])
    assert ended in ("length", "incomplete max_output_tokens", "max_tokens")
    (turn,) = world.turns()
    assert turn.completion.tokens == spell(qwen35, whole)[:limit], "recorded as sampled"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
async def test_a_call_that_lacks_a_tag_is_text(world: World, wire: str, stream: bool) -> None:
    for damage in ("</parameter>", "<parameter=content>", "<function=write>"):
        broken = WRITTEN.replace(damage, "", 1)
        world.say(broken)
        text, calls, ended = got(wire, await ask(world, wire, stream))
        assert (text, calls) == (broken.partition("</think>")[2].strip(), []), damage
        assert ended in ("stop", "completed", "end_turn")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
async def test_usage_counts_thinking(
    world: World, qwen35: Renderer, wire: str, stream: bool
) -> None:
    world.say(f"{THOUGHT}\n</think>\n\nTwo.")
    reply = await ask(world, wire, stream)
    thought = len(qwen35.encode(f"{THOUGHT}\n"))
    (turn,) = world.turns()
    usage: Any = (reply[-1] if isinstance(reply, list) else reply).usage
    if wire == "messages":  # which has no such count
        assert usage.output_tokens == len(turn.completion.tokens)
    elif wire == "responses":
        assert usage.output_tokens_details.reasoning_tokens == thought
    else:
        assert usage.completion_tokens_details.reasoning_tokens == thought
    world.say("</think>Two.")
    reply = await ask(world, "chat", False)
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0
