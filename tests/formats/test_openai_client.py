"""The official `openai` client against the gateway: what its users rely on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.support.fakes import UNTIL_TOLD, FakeSampler, Script
from tests.support.gateways import MODEL, gateway, spell
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


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_results_go_round(tmp_path: Path, renderer: Renderer, stream: bool) -> None:
    """A message of the client's own type goes back as it came, as its documentation says."""
    async with gateway(tmp_path, renderer) as world:
        world.say(TWO_CALLS)
        completions = world.openai.chat.completions
        if stream:
            async with completions.stream(model=MODEL, messages=SAID, tools=TOOLS) as streamed:
                reply = await streamed.get_final_completion()
        else:
            reply = await completions.create(model=MODEL, messages=SAID, tools=TOOLS)
        message: Any = reply.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": f"result of {call.function.name}"}
            for call in message.tool_calls
        ]
        world.say("Done.")
        answer = await completions.create(
            model=MODEL, messages=[*SAID, message, *results], tools=TOOLS
        )
        assert answer.choices[0].message.content == "Done."
        first, second = world.turns()
        assert first.reply_text == 'Looking.\n[calls read with {"path":"a b"}]\n[calls ls with {}]'
        state = world.next_states()[first.id]
        assert state is not None
        assert state.role == "tool"
        assert state.text.index("result of read") < state.text.index("result of ls")
        sampled = (*first.prompt, *first.completion.tokens)
        assert second.prompt[: len(sampled)] == sampled, "the ids go on from what was sampled"


async def test_every_field_without_a_meaning_here_is_taken(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        reply = await world.openai.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ],
            n=1,
            logprobs=False,
            stop=None,
            seed=5,
            temperature=1,
            top_p=1,
            user="u",
            metadata={"a": "b"},
            store=False,
            service_tier="auto",
            safety_identifier="s",
            response_format={"type": "text"},
            parallel_tool_calls=True,
            reasoning_effort="medium",
            verbosity="medium",
            modalities=["text"],
            presence_penalty=0,
            frequency_penalty=0,
            logit_bias={},
            prompt_cache_key="k",
            prompt_cache_retention="24h",
            prediction={"type": "content", "content": "x"},
            extra_body={"top_k": -1, "chat_template_kwargs": {"enable_thinking": True}},
        )
        assert reply.choices[0].message.content == "fine"
        assert world.column("reason") == [None]


@pytest.mark.parametrize("helper", [False, True])
async def test_closing_a_stream_ends_the_generation(
    tmp_path: Path, renderer: Renderer, helper: bool
) -> None:
    sampler = FakeSampler(Script(spell(renderer, LONG), gap_s=0.1))
    async with gateway(tmp_path, renderer, sampler) as world:
        completions = world.openai.chat.completions
        if helper:
            async with completions.stream(model=MODEL, messages=SAID) as events:
                async for event in events:
                    if event.type == "content.delta":
                        break
        else:
            stream = await completions.create(model=MODEL, messages=SAID, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
        await eventually(lambda: world.sampler.aborted == 1)
        await eventually(lambda: bool(world.turns()))
        assert world.turns()[0].completion.stop_reason is StopReason.ABORT
        assert world.column("reason") == [Reason.HUNG_UP]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_call_ends_the_generation(
    tmp_path: Path, renderer: Renderer, stream: bool
) -> None:
    sampler = FakeSampler(Script(spell(renderer, "late"), first_after_s=30))
    async with gateway(tmp_path, renderer, sampler) as world:

        async def ask() -> None:
            reply: Any = await world.openai.chat.completions.create(
                model=MODEL, messages=SAID, stream=stream
            )
            async for _ in reply:
                pass

        call = asyncio.create_task(ask())
        await eventually(lambda: bool(sampler.prompts))
        call.cancel()
        await eventually(lambda: bool(sampler.aborted))
        assert world.turns() == []


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 2}),
    ("logprobs", {"logprobs": True}),
    ("stop", {"stop": list("abcde")}),
    ("tool_choice", {"tool_choice": "required"}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("logit_bias", {"logit_bias": {"5": 1}}),
    ("web_search_options", {"web_search_options": {}}),
    ("reasoning_effort", {"reasoning_effort": "extreme"}),
    (
        "messages[0].content[1].image_url.url",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "what is this?"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                    ],
                }
            ]
        },
    ),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_request_names_its_field(
    tmp_path: Path, renderer: Renderer, stream: bool
) -> None:
    async with gateway(tmp_path, renderer) as world:
        for param, fields in REFUSED:
            with pytest.raises(openai.BadRequestError) as raised:
                await world.openai.chat.completions.create(
                    **{"model": MODEL, "messages": SAID, "stream": stream} | fields
                )
            assert raised.value.param == param
            assert raised.value.type == "invalid_request_error"
            assert param in raised.value.message
        assert world.sampler.prompts == []


async def test_the_errors_of_the_client(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer, api_key="sesam", context_tokens=60) as world:
        create = world.openai.chat.completions.create
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


@pytest.mark.parametrize(("keepalive_s", "answers"), [(0.1, True), (20, False)])
async def test_keep_alives_hold_off_the_clients_time_out(
    tmp_path: Path, renderer: Renderer, keepalive_s: float, answers: bool
) -> None:
    sampler = FakeSampler(Script(spell(renderer, "late"), first_after_s=3.0))
    async with gateway(tmp_path, renderer, sampler, keepalive_s=keepalive_s) as world:

        async def ask(client: AsyncOpenAI) -> str:
            stream = await client.chat.completions.create(model=MODEL, messages=SAID, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        impatient = world.openai.with_options(timeout=1.5)
        if answers:
            assert await ask(impatient) == "late"
        else:
            with pytest.raises((openai.APITimeoutError, httpx.ReadTimeout)):
                await ask(impatient)
