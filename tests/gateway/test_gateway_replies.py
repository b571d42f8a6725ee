"""Replies over HTTP: whole and streamed, with tools, thinking and keep-alives."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.fakes import FakeSampler, Script
from tests.support.gateways import IM_END, MODEL, World, gateway, spell, text_of
from tinker_claw.render.renderer import Renderer

TOOL: Any = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object", "properties": {}}},
}
TWO_CALLS = (
    'Looking.\n<tool_call>\n{"name": "read", "arguments": {"path": "a b"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
)


async def test_the_order_of_a_stream(world: World) -> None:
    text = 'say "ü\\\n\ndata: [DONE]" \u2028\u0007 \U0001f389'
    world.say(f"<think>\nhm\n</think>\n\n{text}")
    events = await world.events("hi", stream_options={"include_usage": True})
    *chunks, usage, done = events
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[:2] == [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}]
    assert text_of(events) == text
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert (deltas[-1], finishes) == ({}, [None] * (len(chunks) - 1) + ["stop"])
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == len(world.turns()[0].prompt)
    assert done == {}
    assert len({event["id"] for event in events[:-1]}) == 1
    assert not any("usage" in event for event in await world.events("hi"))


async def test_streamed_calls_are_whole_numbered_and_named_once_in_a_session(world: World) -> None:
    world.say(TWO_CALLS)
    ids = list[str]()
    for _ in range(2):
        events = await world.events("look", tools=[TOOL])
        deltas = [event["choices"][0]["delta"] for event in events if event]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call["index"] for call in calls] == [0, 1]
        assert [c["function"]["arguments"] for c in calls] == ['{"path":"a b"}', "{}"]
        assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
        ids += [call["id"] for call in calls]
    assert len(set(ids)) == 4
    assert all(re.fullmatch("[A-Za-z0-9]{1,40}", i) for i in ids)
    world.say(TWO_CALLS.partition("\n")[2])
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
        assert deltas[0]["role"] == "assistant", "it comes before the first token"
        assert deltas[1:first].count({}) >= 3, "before the first token"
        assert deltas[first:-1].count({}) >= 2, "and between tokens"


async def test_the_turn_is_in_the_ledger_when_the_finish_chunk_arrives(world: World) -> None:
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


async def test_what_was_sampled_is_kept_to_the_letter(world: World, renderer: Renderer) -> None:
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
