"""Replies over HTTP: whole and streamed, with tools, thinking and keep-alives."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.fakes import FakeSampler, Script
from tests.support.gateways import IM_END, MODEL, chat, gateway, read_events, spell, text_of
from tinker_claw.render.renderer import Renderer
from tinker_claw.shipped import MODEL_DIR

TOOL: Any = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object", "properties": {}}},
}
TWO_CALLS = (
    'Looking.\n<tool_call>\n{"name": "read", "arguments": {"path": "a b"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
)


async def test_the_order_of_a_stream(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say("<think>\nhm\n</think>\n\nyes")
        events = await world.events("hi", stream_options={"include_usage": True})
        deltas = [e["choices"][0]["delta"] for e in events if e.get("choices")]
        finishes = [e["choices"][0]["finish_reason"] for e in events if e.get("choices")]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[1:] == [{"reasoning_content": "hm"}, {"content": "yes"}, {}]
        assert finishes == [None] * (len(deltas) - 1) + ["stop"]
        assert events[-2]["choices"] == []
        assert events[-2]["usage"]["prompt_tokens"] == len(world.turns()[0].prompt)
        assert events[-1] == {}
        assert len({e["id"] for e in events if e}) == 1


async def test_no_usage_chunk_unless_asked_for(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        assert not any("usage" in event for event in await world.events("hi"))


async def test_streamed_calls_are_whole_numbered_and_named_once_in_a_session(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say(TWO_CALLS)
        called = []
        for _ in range(2):
            events = await world.events("look", tools=[TOOL])
            deltas = [e["choices"][0]["delta"] for e in events if e]
            calls = [d["tool_calls"] for d in deltas if "tool_calls" in d]
            assert [[c["index"] for c in one] for one in calls] == [[0], [1]]
            assert [c["function"]["arguments"] for (c,) in calls] == ['{"path":"a b"}', "{}"]
            assert {c["type"] for (c,) in calls} == {"function"}
            assert events[-2]["choices"][0] == {
                "index": 0,
                "delta": {},
                "finish_reason": "tool_calls",
            }
            called += [c["id"] for (c,) in calls]
        assert len(set(called)) == 4
        assert all(re.fullmatch("[A-Za-z0-9]{1,40}", i) for i in called)


async def test_any_text_is_one_line_of_json(tmp_path: Path, renderer: Renderer) -> None:
    text = 'say "ü\\\n\ndata: [DONE]" \u2028\u0007 \U0001f389'
    async with gateway(tmp_path, renderer) as world:
        world.say(text)
        events = await world.events("hi", model=MODEL)
        assert text_of(events) == text
        assert {e["model"] for e in events if e} == {MODEL}
        assert {e["object"] for e in events if e} == {"chat.completion.chunk"}


async def test_the_end_of_a_stream_is_one_write(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        body = {"model": MODEL, "messages": chat("hi"), "stream": True}
        writes = await raw_writes(world.url, body | {"stream_options": {"include_usage": True}})
        assert '"role":"assistant"' in writes[0]
        assert writes[-1].endswith("data: [DONE]\n\n")
        finish, usage, done = [e for e in read_events(writes[-1]) if not is_text(e)]
        assert finish["choices"][0]["finish_reason"] == "stop"
        assert usage["usage"]["completion_tokens"] > 0
        assert done == {}


def is_text(event: dict[str, Any]) -> bool:
    return bool(event.get("choices")) and "content" in event["choices"][0]["delta"]


async def raw_writes(url: str, body: dict[str, Any]) -> list[str]:
    """Pieces in which the server wrote its answer: each is a chunk of HTTP."""
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    sent = json.dumps(body).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(sent), sent)
    )
    answered = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    await writer.wait_closed()
    writes = []
    while answered:
        size, _, answered = answered.partition(b"\r\n")
        writes.append(answered[: int(size, 16)].decode())
        answered = answered[int(size, 16) + 2 :]
    assert writes.pop() == ""
    return writes


async def test_a_tool_call_without_text_has_null_content(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say('<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>')
        message = (await world.ask("look", tools=[TOOL])).json()["choices"][0]["message"]
        assert message["content"] is None
        assert "reasoning_content" not in message


async def test_empty_chunks_while_the_model_is_silent(tmp_path: Path, renderer: Renderer) -> None:
    tokens = spell(renderer, "ab", end="") + spell(renderer, "cd")
    slow = FakeSampler(Script(tokens, first_after_s=0.45, gap_s=0.35))
    async with gateway(tmp_path, renderer, slow, keepalive_s=0.02) as world:
        events = await world.events("hi")
        deltas = [e["choices"][0]["delta"] for e in events if e]
        first = next(i for i, d in enumerate(deltas) if d.get("content"))
        assert deltas[1:first].count({}) >= 3, "before the first token"
        assert deltas[first:-1].count({}) >= 2, "and between tokens"


async def test_the_role_comes_before_the_first_token(tmp_path: Path, renderer: Renderer) -> None:
    slow = FakeSampler(Script(spell(renderer, "late"), first_after_s=600))
    async with gateway(tmp_path, renderer, slow) as world:
        body = {"model": MODEL, "messages": chat("hi"), "stream": True}
        async with (
            asyncio.timeout(120),
            world.http.stream("POST", "/chat/completions", json=body) as response,
        ):
            assert response.headers["content-type"].startswith("text/event-stream")
            assert "content-length" not in response.headers
            line = await anext(response.aiter_lines())
            assert '"role":"assistant"' in line


async def test_the_turn_is_in_the_ledger_when_the_finish_chunk_arrives(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say("done")
        stream = await world.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].finish_reason:
                (turn,) = world.turns()
                assert turn.reply_text == "done"
                return
        raise AssertionError("no finish_reason came")


async def test_what_was_sampled_is_kept_to_the_letter(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say("<think>\nhm\n</think>\n\nyes")
        await world.ask("hi")
        (turn,) = world.turns()
        assert turn.prompt == world.sampler.prompts[0]
        assert turn.completion.tokens == spell(renderer, "<think>\nhm\n</think>\n\nyes")
        assert turn.reply_text == "yes", "the judge reads that, and no thinking"
        assert turn.completion.logprobs == (-0.5,) * len(turn.completion.tokens)
        assert [len(row) for row in turn.completion.topk_ids] == [2] * len(turn.completion.tokens)
        assert replace(turn.completion.params, person=True) == world.sampler.params[0]
        assert (turn.completion.params.temperature, turn.completion.params.top_p) == (1.0, 1.0)
        assert renderer.decode(turn.prompt[: turn.hint_at]).endswith("user\nhi")
        assert renderer.decode(turn.prompt[turn.hint_at :]).startswith(IM_END)
        (seen,) = world.observer.seen
        assert seen["kind"] == "main"
        assert seen["turn"] == turn.id
        assert seen["completion_tokens"] == len(turn.completion.tokens)
        assert 0 <= seen["first_token_s"] <= seen["seconds"]


async def test_a_model_with_a_template_of_its_own_streams_and_has_its_place_for_hints(
    tmp_path: Path,
) -> None:
    own = Renderer.load(str(MODEL_DIR))
    assert own.family == "default"
    async with gateway(tmp_path, own, FakeSampler(spell(own, "One, two, three."))) as w:
        events = await w.events("count")
        assert text_of(events) == "One, two, three."
        assert sum(bool(text_of([event])) for event in events) > 2
        (turn,) = w.turns()
        assert own.decode(turn.prompt[: turn.hint_at]).endswith("count")
