"""Effects of the fields of a request: on the reply, the sampler and the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gateway.test_gateway_refusals import assert_error
from tests.support.fakes import Script
from tests.support.gateways import MODEL, OFF, World, chat, gateway, spell, text_of
from tinker_claw.cli.status import describe
from tinker_claw.render.renderer import Renderer
from tinker_claw.turn_state import Reason
from tinker_claw.types import StopReason

CALL = '<tool_call>\n{"name": "ls", "arguments": {"a": 1}}\n</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("chunk", [1, 1000], ids=["as it comes", "in one piece"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_ends_the_reply_and_the_generation(
    world: World, renderer: Renderer, chunk: int, stream: bool
) -> None:
    tokens = spell(renderer, "one two three END four five six seven")
    world.sampler.say(Script(tokens, chunk=chunk))
    text, finish = await shown(world, "count", stop=["END", "never"], stream=stream)
    assert (text, finish) == ("one two three ", "stop")
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


async def shown(world: World, *messages: str, stream: bool, **body: Any) -> tuple[str, str]:
    """Text of a reply, and why it ended."""
    if stream:
        events = await world.events(*messages, **body)
        return text_of(events), events[-2]["choices"][0]["finish_reason"]
    (choice,) = (await world.ask(*messages, **body)).json()["choices"]
    return choice["message"]["content"], choice["finish_reason"]


async def test_a_conversation_goes_on_from_a_cut_reply_as_it_was_shown(
    world: World, renderer: Renderer
) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
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
        healthz = await world.http.get("/../healthz")
        lines = describe(healthz.json(), "here", 0)
        notes = [line for line in lines if line.startswith("  not trained:")]
        if sampling == "ours":
            assert (asked.temperature, asked.top_p, asked.top_k) == (1.0, 1.0, None)
            assert (world.column("reason"), notes) == ([None, None], [])
            return
        assert asked.temperature == 0.7
        (note,) = notes
        assert "opencode" in note
        assert "--sampling ours" in note


@pytest.mark.parametrize("stream", [True, False])
async def test_with_tool_choice_none_a_call_is_text(
    world: World, renderer: Renderer, stream: bool
) -> None:
    world.say(f"Look. {CALL}")
    response = await world.ask("look", tools=[TOOL], tool_choice="none", stream=stream)
    assert "<tool_call>" in response.text
    assert '"finish_reason":"stop"' in response.text
    assert "tool_calls" not in response.text
    assert "ls" not in renderer.decode(world.sampler.prompts[0])


CHAT, RESPONSES, MESSAGES = "/chat/completions", "/responses", "/messages"
THINKING: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "asked for": [
        (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}),
        (CHAT, {"reasoning_effort": "medium"}),  # OpenClaw's /think medium
        (RESPONSES, {"reasoning": {"effort": "low"}}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ],
    "forbidden": [
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, {"reasoning_effort": "none"}),  # OpenClaw's /think off
        (RESPONSES, {"reasoning": {"effort": "none"}}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
    ],
    "unsaid": [(CHAT, {}), (RESPONSES, {}), (MESSAGES, {"thinking": {"type": "adaptive"}})],
}


@pytest.mark.parametrize(
    ("thinking", "where"),
    [("auto", {"asked for"}), ("on", {*THINKING}), ("off", set[str]())],
)
async def test_a_model_thinks_where_it_is_asked_to_unless_the_flag_decides(
    tmp_path: Path, thinker: Renderer, thinking: str, where: set[str]
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": chat("hi")},
        RESPONSES: {"input": "hi"},
        MESSAGES: {"messages": chat("hi"), "max_tokens": 9},
    }
    async with gateway(tmp_path, thinker, thinking=thinking) as world:
        for name, requests in THINKING.items():
            for path, fields in requests:
                body = {"model": MODEL} | bodies[path] | fields
                response = await world.http.post(path, json=body)
                assert response.status_code == 200, response.text
                prompt = thinker.decode(world.sampler.prompts[-1])
                end = "assistant\n" if name in where else "<think>\n\n</think>\n\n"
                assert prompt.endswith(end), (path, fields)
        health = (await world.http.get("/../healthz")).json()
        assert ("--thinking" in str(health["left_out"])) is (thinking != "auto")


async def test_what_the_chat_format_has_no_place_for_is_refused(world: World) -> None:
    switches, thinks = "chat_template_kwargs", {"enable_thinking": False}
    refused: dict[str, dict[str, Any]] = {
        f"{switches}.tone": {switches: {"tone": "kind"}},
        f"{switches}.enable_thinking": {switches: {"enable_thinking": 1}},
        "reasoning_effort": {"reasoning_effort": "low", switches: thinks},
    }
    for param, fields in refused.items():
        assert_error(await world.ask("hi", **fields), 400, param=param)
    assert world.turns() == []


async def test_a_call_of_a_tool_that_was_not_offered_is_the_agents_to_refuse(world: World) -> None:
    world.say(CALL.replace("ls", "rm"))
    (choice,) = (await world.ask("look", tools=[TOOL])).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "rm"
    assert choice["finish_reason"] == "tool_calls"
