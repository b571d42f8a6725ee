"""The official `openai` client against the gateway: what its users rely on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import AsyncAnthropic

from tests.support.fakes import UNTIL_TOLD, FakeSampler, Script
from tests.support.gateways import MODEL, World, gateway, spell
from tests.support.waits import eventually
from tinker_claw.render.renderer import Renderer
from tinker_claw.turn_state import Reason
from tinker_claw.types import StopReason

SAID: Any = [{"role": "user", "content": "look"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("read", "ls")
]
TWO_CALLS = (
    '<think>hm</think>Looking.\n<tool_call>\n{"name": "read", "arguments": {"path": "a b"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
)
LONG = "one two three four five six seven eight nine ten " * 20


async def test_a_whole_reply(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.sampler.say(Script(spell(renderer, "<think>hm</think>Hello."), cached_tokens=3))
        reply = await world.openai.chat.completions.create(
            model=MODEL, messages=SAID, max_completion_tokens=50
        )
        (choice,) = reply.choices
        assert choice.message.content == "Hello."
        assert choice.message.role == "assistant"
        assert choice.message.tool_calls is None
        assert choice.message.model_dump()["reasoning_content"] == "hm"
        assert (choice.finish_reason, choice.logprobs, choice.index) == ("stop", None, 0)
        assert reply.id.startswith("chatcmpl-")
        assert (reply.object, reply.model) == ("chat.completion", MODEL)
        assert reply.system_fingerprint == "v0"
        assert abs(reply.created - time.time()) < 60
        (turn,) = world.turns()
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == len(turn.prompt)
        assert reply.usage.completion_tokens == len(turn.completion.tokens)
        assert reply.usage.prompt_tokens_details is not None
        assert reply.usage.prompt_tokens_details.cached_tokens == 3


async def test_a_stream_chunk_by_chunk(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say("Hello there, friend.")
        chunks = [
            chunk
            async for chunk in await world.openai.chat.completions.create(
                model=MODEL, messages=SAID, stream=True, stream_options={"include_usage": True}
            )
        ]
        *said, usage = chunks
        assert all(len(chunk.choices) == 1 for chunk in said)
        assert "".join(c.choices[0].delta.content or "" for c in said) == "Hello there, friend."
        assert [c.choices[0].finish_reason for c in said if c.choices[0].finish_reason] == ["stop"]
        assert said[0].choices[0].delta.role == "assistant"
        assert usage.choices == []
        assert usage.usage is not None
        assert usage.usage.completion_tokens == len(world.turns()[0].completion.tokens)
        assert len({chunk.id for chunk in chunks}) == 1


async def test_the_stream_helper_puts_calls_together(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say(TWO_CALLS)
        seen: list[str] = []
        async with world.openai.chat.completions.stream(
            model=MODEL, messages=SAID, tools=TOOLS
        ) as stream:
            async for event in stream:
                seen.append(event.type)
            reply = await stream.get_final_completion()
        (choice,) = reply.choices
        assert choice.message.content == "Looking."
        assert [
            (c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()
        ] == [
            ("read", '{"path":"a b"}'),
            ("ls", "{}"),
        ]
        assert choice.finish_reason == "tool_calls"
        assert seen.count("tool_calls.function.arguments.done") == 2
        assert "content.delta" in seen


async def read_chat(world: World) -> None:
    stream = await world.openai.chat.completions.create(model=MODEL, messages=SAID, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()


async def read_responses(world: World) -> None:
    stream = await world.openai.responses.create(model=MODEL, input="look", stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()


async def read_messages(world: World) -> None:
    url = world.url.removesuffix("/v1")
    async with (
        AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
        client.messages.stream(model=MODEL, max_tokens=200, messages=SAID) as stream,
    ):
        async for event in stream:
            if event.type == "text":
                break


async def test_closing_a_stream_ends_the_generation(tmp_path: Path, renderer: Renderer) -> None:
    sampler = FakeSampler(Script(spell(renderer, LONG), gap_s=0.1))
    async with gateway(tmp_path, renderer, sampler) as world:
        for number, read in enumerate((read_chat, read_responses, read_messages), 1):
            await read(world)
            await eventually(lambda number=number: sampler.aborted == number == len(world.turns()))
            assert world.turns()[-1].completion.stop_reason is StopReason.ABORT
        assert world.column("reason") == [Reason.HUNG_UP] * 3


async def test_a_cancelled_call_ends_the_generation(tmp_path: Path, renderer: Renderer) -> None:
    sampler = FakeSampler(Script(spell(renderer, "late"), first_after_s=30))
    async with gateway(tmp_path, renderer, sampler) as world:
        create = world.openai.chat.completions.create
        call = asyncio.create_task(create(model=MODEL, messages=SAID))
        await eventually(lambda: bool(sampler.prompts))
        call.cancel()
        await eventually(lambda: bool(sampler.aborted))
        assert world.turns() == []


async def test_the_errors_of_the_client(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer, api_key="sesam", context_tokens=60) as world:
        create = world.openai.chat.completions.create
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as bad:
                await create(model=MODEL, messages=SAID, n=2, stream=stream)
            assert (bad.value.param, bad.value.type) == ("n", "invalid_request_error")
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="gpt-4", messages=SAID)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as long:
            await create(model=MODEL, messages=[{"role": "user", "content": "word " * 99}])
        assert long.value.code == "context_length_exceeded"
        wrong = world.openai.with_options(api_key="wrong")
        with pytest.raises(openai.AuthenticationError) as refused:
            await wrong.chat.completions.create(model=MODEL, messages=SAID)
        assert refused.value.status_code == 401
        body: Any = refused.value.body
        assert body["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            _ = [model async for model in wrong.models.list()]
        assert (await world.openai.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            await world.openai.models.retrieve("Qwen/other")


async def test_a_model_that_cannot_answer(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer, patience_s=0.1) as world:
        world.sampler.away = UNTIL_TOLD
        create = world.openai.chat.completions.create
        with pytest.raises(openai.InternalServerError) as raised:
            await create(model=MODEL, messages=SAID)
        assert raised.value.status_code == 503
        assert int(raised.value.response.headers["retry-after"]) > 0
        assert raised.value.type == "server_error"
        with pytest.raises(openai.APIError) as streamed:
            async for _ in await create(model=MODEL, messages=SAID, stream=True):
                pass
        assert streamed.value.type == "server_error"


async def test_raw_responses_and_models(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        completions = world.openai.chat.completions
        raw = await completions.with_raw_response.create(model=MODEL, messages=SAID)
        assert raw.status_code == 200
        assert raw.headers["content-type"] == "application/json"
        assert raw.parse().choices[0].message.content == "fine"
        assert raw.headers["x-request-id"] == raw.parse().id
        async with completions.with_streaming_response.create(
            model=MODEL, messages=SAID, stream=True
        ) as streaming:
            assert streaming.headers["content-type"].startswith("text/event-stream")
            assert streaming.headers["cache-control"] == "no-cache"
            lines = [line async for line in streaming.iter_lines() if line]
        assert f'"id":"{streaming.headers["x-request-id"]}"' in lines[0]
        assert lines[-1] == "data: [DONE]"
        (model,) = (await world.openai.models.list()).data
        assert (model.id, model.object) == (MODEL, "model")


async def test_keep_alives_hold_off_the_clients_time_out(
    tmp_path: Path, renderer: Renderer
) -> None:
    sampler = FakeSampler(Script(spell(renderer, "late"), first_after_s=2.0))
    async with gateway(tmp_path, renderer, sampler, keepalive_s=0.1) as world:
        impatient = world.openai.with_options(timeout=1.0)
        stream = await impatient.chat.completions.create(model=MODEL, messages=SAID, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "late"
