"""Turns as they are stored: version, sampling parameters, prompt and place of a hint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes import FakeSampler, Script
from tests.support.gateways import MODEL, World, chat, gateway, spell
from tests.support.openclaw import assistant, tool
from tinker_claw.policy import Policy
from tinker_claw.render.renderer import Renderer
from tinker_claw.turn_state import Reason


@pytest.mark.parametrize(
    ("fields", "because"),
    [
        ({"temperature": 0.2}, "temperature 0.2, not 1"),
        ({"top_p": 0.9}, "top_p 0.9, not 1"),
        ({"top_k": 5}, "top_k 5"),
        ({"temperature": 1, "top_p": 1.0, "seed": 7}, None),
    ],
)
async def test_other_distributions_are_served_and_not_trained(
    world: World, fields: dict[str, Any], because: str | None
) -> None:
    await world.ask("hi", **fields)
    assert world.column("reason") == [because and Reason.SAMPLING]
    assert world.column("detail") == [because]
    assert world.sampler.params[0].student_topk == (2 if because is None else 0)
    assert world.column("kind") == ["main"]


async def test_an_earlier_version_answers_as_a_side_turn(
    tmp_path: Path, renderer: Renderer
) -> None:
    old = FakeSampler(spell(renderer, "as before"), ref="fake:old")
    async with gateway(tmp_path, renderer) as world:
        world.ledger.versions.roll_back(world.policy.current.version)  # version 1 serves now
        shown = await world.http.get(f"/models/{MODEL}@v1")
        assert shown.status_code == 200, "it is a row, and no weights are opened"
    async with gateway(tmp_path, renderer, versions={0: old}) as world:
        response = await world.ask("hi", model=f"{MODEL}@v0")
        assert response.json()["choices"][0]["message"]["content"] == "as before"
        assert response.json()["system_fingerprint"] == "v0"
        assert (await world.ask("hi")).json()["system_fingerprint"] == "v1"
        assert (await world.ask("hi", model=f"{MODEL}@v1")).status_code == 200
        assert world.column("kind") == ["side", "main", "side"]
        assert world.column("policy_version") == [0, 1, 1]
        assert world.column("detail")[0].startswith("asked for version 0")
        for name, status in (("v0", 200), ("v1", 200), ("v7", 404)):
            told = await world.http.get(f"/models/{MODEL}@{name}")
            assert told.status_code == status, "it is there as a request may name it"


async def test_a_prompt_goes_on_from_the_sampled_tokens_where_it_can(world: World) -> None:
    # Two calls whose JSON would be tokenised otherwise when it comes back compact.
    world.say('Hm.\n<tool_call>\n{"name": "ls",  "arguments": {"p" : "x"}}\n</tool_call>', "ok")
    tools = [{"type": "function", "function": {"name": "ls"}}]
    message = await world.reply({"messages": chat("look"), "tools": tools})
    (call,) = message["tool_calls"]
    replied = assistant("Hm.", (call["id"], "ls", '{"p":"x"}'))
    history = [*chat("look"), replied, tool(call["id"], "a\nb")]
    await world.reply({"messages": history, "tools": tools})
    first, second = world.turns()
    sampled = (*first.prompt, *first.completion.tokens)
    assert second.prompt[: len(sampled)] == sampled
    assert second.hint_at == first.hint_at, "the user has said nothing since"
    # Other tools or another system prompt: the old ids do not hold any more.
    changed = [*tools, {"type": "function", "function": {"name": "cat"}}]
    await world.reply({"messages": history, "tools": changed})
    assert world.turns()[2].prompt[: len(sampled)] != sampled


async def test_a_reply_in_flight_stays_with_its_version(tmp_path: Path, renderer: Renderer) -> None:
    slow = FakeSampler(Script(spell(renderer, "one two three"), holds_after=1))
    new = FakeSampler(spell(renderer, "new"), ref="fake:1")
    async with gateway(tmp_path, renderer, slow) as world:

        async def swap_and_ask() -> dict[str, Any]:
            await slow.holding.wait()
            version = world.ledger.versions.roll_back(world.policy.current.version)
            world.policy.swap(Policy(version, new))
            answer = (await world.ask("hello")).json()
            slow.go_on.set()
            return answer

        asked, after = await asyncio.gather(world.ask("hi"), swap_and_ask())
        assert after["system_fingerprint"] == "v1"
        reply = asked.json()
        assert reply["system_fingerprint"] == "v0"
        assert reply["choices"][0]["message"]["content"] == "one two three"
        assert world.column("policy_version") == [1, 0]
