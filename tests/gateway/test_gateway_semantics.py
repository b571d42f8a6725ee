"""Effects of the fields of a request: on the reply, the sampler and the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gateway.test_gateway_refusals import assert_error
from tests.support.fakes import Script
from tests.support.gateways import MODEL, OFF, chat, gateway, read_events, spell, text_of
from tinker_claw.cli.status import describe
from tinker_claw.render.renderer import Renderer
from tinker_claw.turn_state import Reason
from tinker_claw.types import StopReason

CALL = '<tool_call>\n{"name": "ls", "arguments": {"a": 1}}\n</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("chunk", [1, 1000], ids=["as it comes", "in one piece"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_ends_the_reply_and_the_generation(
    tmp_path: Path, renderer: Renderer, chunk: int, stream: bool
) -> None:
    tokens = spell(renderer, "one two three END four five six seven")
    async with gateway(tmp_path, renderer) as world:
        world.sampler.say(Script(tokens, chunk=chunk))
        response = await world.ask("count", stop=["END", "never"], stream=stream)
        if stream:
            *events, finish, done = read_events(response.text)
            assert text_of(events) == "one two three "
            assert finish["choices"][0]["finish_reason"] == "stop"
            assert done == {}
        else:
            (choice,) = response.json()["choices"]
            assert choice["message"]["content"] == "one two three "
            assert choice["finish_reason"] == "stop"
        (turn,) = world.turns()
        assert turn.reply_text == "one two three "
        assert turn.completion.stop_reason is StopReason.CUT
        assert turn.completion.params.stop == ("END", "never")
        sampled = turn.completion.tokens
        assert sampled == tokens[: len(sampled)], "recorded as sampled"
        assert "END" in renderer.decode(sampled)
        assert (len(sampled) < len(tokens)) is (chunk == 1)
        assert world.sampler.aborted == 1, "the sampler's stream was closed"
        assert world.column("reason") == [Reason.STOP_STRING]


async def test_a_stop_string_that_does_not_come_changes_nothing(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say("<think>END</think>the EN and EN")
        events = await world.events("hi", stop="END")
        assert text_of(events) == "the EN and EN"
        (turn,) = world.turns()
        assert turn.completion.stop_reason is StopReason.STOP
        assert world.column("reason") == [None]
        assert len(turn.completion.topk_ids) == len(turn.completion.tokens)


async def test_a_conversation_goes_on_from_a_cut_reply_as_it_was_shown(
    tmp_path: Path, renderer: Renderer
) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    async with gateway(tmp_path, renderer) as world:
        world.say("one END two")
        await world.ask("count", stop="END", **off)
        await world.ask("count", "one ", "go on", **off)
        first, second = world.turns()
        state = world.next_states()[first.id]
        assert state is not None
        assert state.text == "go on"
        full = renderer.prompt(chat("count", "one ", "go on"), switches=OFF)
        assert second.prompt == full.tokens, "what was sampled beyond the cut is not in it"


@pytest.mark.parametrize("sampling", ["client", "ours"])
async def test_a_temperature_that_a_client_sets_is_told_with_what_helps(
    tmp_path: Path, renderer: Renderer, sampling: str
) -> None:
    async with gateway(tmp_path, renderer, sampling=sampling) as world:
        headers = {"user-agent": "opencode/1.2"}
        for _ in range(2):
            await world.ask("hi", temperature=0.7, top_p=0.9, top_k=5, headers=headers)
        asked = world.sampler.params[-1]
        healthz = await world.http.get(world.url.removesuffix("/v1") + "/healthz")
        lines = describe(healthz.json(), "here", 0)
        told = [line for line in lines if line.startswith("  not trained:")]
        if sampling == "ours":
            assert (asked.temperature, asked.top_p, asked.top_k) == (1.0, 1.0, None)
            assert (world.column("reason"), told) == ([None, None], [])
            return
        assert asked.temperature == 0.7
        (sentence,) = told
        assert "opencode has replies sampled at temperature 0.7, not 1: they train" in sentence
        assert "start with --sampling ours" in sentence


@pytest.mark.parametrize("chunk", [1, 1000])
async def test_parallel_calls_can_be_forbidden(
    tmp_path: Path, renderer: Renderer, chunk: int
) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.sampler.say(Script(spell(renderer, f"Look.{CALL}{CALL}"), chunk=chunk))
        response = await world.ask("look", tools=[TOOL], parallel_tool_calls=False)
        (choice,) = response.json()["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["finish_reason"] == "tool_calls"
        world.sampler.say(Script(spell(renderer, f"Look.{CALL}"), chunk=chunk))
        await world.ask("look", tools=[TOOL], parallel_tool_calls=False)
        cut, alone = world.column("reason")
        assert "second call" in cut
        assert alone is None


@pytest.mark.parametrize("stream", [True, False])
async def test_with_tool_choice_none_a_call_is_text(
    tmp_path: Path, renderer: Renderer, stream: bool
) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say(f"Look. {CALL}")
        response = await world.ask("look", tools=[TOOL], tool_choice="none", stream=stream)
        assert "<tool_call>" in response.text
        assert '"finish_reason":"stop"' in response.text
        assert "tool_calls" not in response.text
        assert "ls" not in renderer.decode(world.sampler.prompts[0])


ASKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/chat/completions", {"chat_template_kwargs": {"enable_thinking": True}}),
    ("/chat/completions", {"reasoning_effort": "medium"}),  # OpenClaw's /think medium
    ("/responses", {"reasoning": {"effort": "low"}}),
    ("/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
)
FORBIDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("/chat/completions", {"reasoning_effort": "none"}),  # OpenClaw's /think off
    ("/responses", {"reasoning": {"effort": "none"}}),
    ("/messages", {"thinking": {"type": "disabled"}}),
)
NOTHING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/chat/completions", {}),
    ("/responses", {}),
    ("/messages", {"thinking": {"type": "adaptive"}}),
)


@pytest.mark.parametrize(
    ("thinking", "asked", "forbidden", "unsaid"),
    [("auto", True, False, False), ("on", True, True, True), ("off", False, False, False)],
)
async def test_a_model_thinks_where_it_is_asked_to_unless_the_flag_decides(
    tmp_path: Path, thinker: Renderer, thinking: str, asked: bool, forbidden: bool, unsaid: bool
) -> None:
    async with gateway(tmp_path, thinker, thinking=thinking) as world:
        for requests, thinks in ((ASKS, asked), (FORBIDS, forbidden), (NOTHING, unsaid)):
            for path, fields in requests:
                said = {"role": "user", "content": "hi"}
                words = {"input": [said]} if path == "/responses" else {"messages": [said]}
                body = {"model": MODEL, "max_tokens": 9} | words | fields
                if path == "/responses":
                    del body["max_tokens"]
                response = await world.http.post(path, json=body)
                assert response.status_code == 200, response.text
                prompt = thinker.decode(world.sampler.prompts[-1])
                end = "assistant\n" if thinks else "<think>\n\n</think>\n\n"
                assert prompt.endswith(end), (path, fields)
        health = (await world.http.get(world.url.removesuffix("/v1") + "/healthz")).json()
        told = [f"thinking: as --thinking {thinking} says, whatever a client asks"]
        assert health["left_out"] == ([] if thinking == "auto" else told)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("chat_template_kwargs.tone", {"chat_template_kwargs": {"tone": "kind"}}),
        ("chat_template_kwargs.enable_thinking", {"chat_template_kwargs": {"enable_thinking": 1}}),
        (
            "reasoning_effort",
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
        ),
    ],
)
async def test_what_the_chat_format_has_no_place_for_is_refused(
    tmp_path: Path, renderer: Renderer, param: str, fields: dict[str, Any]
) -> None:
    async with gateway(tmp_path, renderer) as world:
        assert_error(await world.ask("hi", **fields), 400, param=param)
        assert world.turns() == []


async def test_a_result_may_name_its_tool(tmp_path: Path, renderer: Renderer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "name": "ls", "content": "a.txt"}
    async with gateway(tmp_path, renderer) as world:
        response = await world.ask("look", asked, result)
        assert response.status_code == 200
        assert "a.txt" in renderer.decode(world.sampler.prompts[0])


async def test_one_token_near_the_end_of_the_window(tmp_path: Path, renderer: Renderer) -> None:
    """OpenClaw asks for one token when it believes that the window is full."""
    async with gateway(tmp_path, renderer) as world:
        events = await world.events("hi", max_completion_tokens=1)
        finishes = [c["finish_reason"] for e in events for c in e.get("choices", ())]
        assert finishes[-1] == "length"
        assert len(world.turns()[0].completion.tokens) == 1


MALFORMED = {
    "invalid JSON": '<tool_call>\n{"name": "ls", "arguments": {oops}}\n</tool_call>',
    "no name": '<tool_call>\n{"arguments": {}}\n</tool_call>',
    "arguments that are no object": '<tool_call>\n{"name": "ls", "arguments": "x"}\n</tool_call>',
    "a marker in a marker": "<tool_call>\n<tool_call>\noops\n</tool_call>",
    "an end without a beginning": '{"name": "ls"}\n</tool_call>',
    "nothing": "<tool_call></tool_call>",
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_malformed_call_reaches_the_client_as_text(
    tmp_path: Path, renderer: Renderer, text: str, stream: bool
) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say(f"so {text}")
        if stream:
            assert text_of(await world.events("look", tools=[TOOL])) == f"so {text}"
        else:
            (choice,) = (await world.ask("look", tools=[TOOL])).json()["choices"]
            assert choice["message"]["content"] == f"so {text}"
            assert choice["finish_reason"] == "stop"


async def test_a_call_of_a_tool_that_was_not_offered_is_the_agents_to_refuse(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.say(CALL.replace("ls", "rm"))
        (choice,) = (await world.ask("look", tools=[TOOL])).json()["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "rm"
        assert choice["finish_reason"] == "tool_calls"
