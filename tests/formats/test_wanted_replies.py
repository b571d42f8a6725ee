"""Options of replies: JSON, logprobs, several at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import renderers

from tests.fakes import FakeSampler, Script
from tests.gateways import MODEL, World, chat, gateway, read_events, spell
from tests.render.test_prompt_cache import tokenizer_for
from tinker_claw.cli.explain import tell
from tinker_claw.config.settings import Training
from tinker_claw.ledger.database import FILE, reading
from tinker_claw.render.renderer import Renderer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OSLO = '{"city": "Oslo"}'
AS_JSON = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
SIDE = {"X-Turn-Type": "side"}
URL = "/responses"


async def by_responses(world: World, **fields: Any) -> Any:
    return await world.http.post(URL, json={"model": MODEL, "input": "where?"} | fields)


async def by_messages(world: World, **fields: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 99, "messages": chat("where?")} | fields
    return await world.http.post("/messages", json=body)


@pytest.mark.parametrize(
    ("ask", "fields", "schema"),
    [
        (World.ask, {"response_format": AS_JSON}, SCHEMA),
        (World.ask, {"response_format": {"type": "json_object"}}, {"type": "object"}),
        (
            by_responses,
            {"text": {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}},
            SCHEMA,
        ),
        (
            by_messages,
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            SCHEMA,
        ),
    ],
)
async def test_json_is_sampled_where_the_sampler_can_and_is_not_trained(
    tmp_path: Path, renderer: Renderer, ask: Any, fields: dict[str, Any], schema: Any
) -> None:
    said = ("where?",) if ask is World.ask else ()
    async with gateway(tmp_path, renderer, constrains=True) as world:
        world.say(OSLO)
        response = await ask(world, *said, **fields)
        assert response.status_code == 200, response.text
        assert json.dumps(OSLO) in response.text
        assert json.loads(world.sampler.params[0].schema or "") == schema
        (turn,) = world.turns()
        assert renderer.decode(turn.prompt).endswith("assistant\n<think>\n\n</think>\n\n")
        assert turn.completion.tokens == spell(renderer, OSLO)
        assert turn.completion.params.schema == "", "the client's own words, which are not kept"
        assert world.column("untrained_because") == ["its text was constrained to a schema"]
        with reading(tmp_path / FILE) as ledger:
            lines = tell(ledger, 1, Training(), text=True)
        assert "its text was constrained to a schema" in "\n".join(lines)
    async with gateway(tmp_path / "other", renderer) as world:
        response = await ask(world, *said, **fields)
        assert response.status_code == 400
        assert "cannot constrain a reply to JSON. Offer a tool" in response.text
        assert world.turns() == []


async def test_json_and_tools_do_not_go_together(tmp_path: Path, renderer: Renderer) -> None:
    tool = {"type": "function", "function": {"name": "ls"}}
    async with gateway(tmp_path, renderer, constrains=True) as world:
        response = await world.ask("hi", response_format=AS_JSON, tools=[tool])
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "response_format"
        plain = {"type": "text"}
        assert (await world.ask("hi", response_format=plain, tools=[tool])).status_code == 200


TEXT = "Grüße, friend 🙂."


async def test_logprobs_are_those_of_the_text_as_it_was_sampled(
    tmp_path: Path, renderer: Renderer
) -> None:
    sampler = FakeSampler(spell(renderer, f"<think>Hm, Hm.</think>\n\n{TEXT}\n"))
    async with gateway(tmp_path, renderer, sampler) as world:
        done = await world.openai.chat.completions.create(
            model=MODEL,
            messages=chat("hi"),  # type: ignore[arg-type]
            logprobs=True,
            top_logprobs=3,
        )
        assert done.choices[0].logprobs is not None
        content = done.choices[0].logprobs.content or []
        assert [one.logprob for one in content] == [-0.5] * len(content)
        assert {len(one.top_logprobs) for one in content} == {3}
        (turn,) = world.turns()
        ids = spell(renderer, TEXT, end="")
        assert [one.token for one in content] == [renderer.decode([id]) for id in ids]
        whole = [one for one in content if one.bytes is not None]
        assert all(bytes(one.bytes or ()).decode() == one.token for one in whole)
        assert {len(row) for row in turn.completion.topk_ids} == {2}, "what the method captures"
        assert turn.completion.params.student_topk == 2
        assert world.column("untrained_because") == [None]

        response = await world.ask("hi", logprobs=True, stream=True)
        streamed = [
            token
            for event in read_events(response.text)
            for choice in event.get("choices", ())
            for token in (choice.get("logprobs") or {}).get("content", ())
        ]
        assert [one["token"] for one in streamed] == [one.token for one in content]
        assert {len(one["top_logprobs"]) for one in streamed} == {0}

        reply = await world.openai.responses.create(
            model=MODEL, input="hi", include=["message.output_text.logprobs"], top_logprobs=1
        )
        (message,) = [item for item in reply.output if item.type == "message"]
        (part,) = message.content
        assert part.type == "output_text"
        assert [one.token for one in part.logprobs or ()] == [one.token for one in content]


async def test_logprobs_end_where_the_text_was_cut(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        world.sampler.say(Script(spell(renderer, "one STOP two"), chunk=50))
        response = await world.ask("hi", logprobs=True, stop="STOP")
        (choice,) = response.json()["choices"]
        told = "".join(one["token"] for one in choice["logprobs"]["content"])
        assert choice["message"]["content"] == "one "
        assert told.startswith("one")
        assert "two" not in told


async def test_what_cannot_be_told_of_tokens_is_refused(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer, gives_topk=False) as world:
        response = await world.ask("hi", logprobs=True, top_logprobs=2)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")
        assert (await world.ask("hi", logprobs=True, top_logprobs=0)).status_code == 200
        assert (await world.ask("hi", top_logprobs=2)).status_code == 400
    llama = Renderer(tokenizer_for("llama-3"), renderers.config_from_name("llama-3"))
    async with gateway(tmp_path / "llama", llama) as world:
        response = await world.ask("hi", logprobs=True)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")


async def test_a_side_turn_may_have_several_replies(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        texts = ["one", "two", "three"]
        world.say(*texts)
        done = await world.openai.chat.completions.create(
            model=MODEL,
            messages=chat("count"),  # type: ignore[arg-type]
            n=3,
            seed=7,
            extra_headers=SIDE,
        )
        assert [choice.index for choice in done.choices] == [0, 1, 2]
        assert sorted(str(c.message.content) for c in done.choices) == sorted(texts)
        assert sorted(params.seed or 0 for params in world.sampler.params) == [7, 8, 9]
        turns = world.turns()
        assert world.column("kind") == ["side"] * 3
        assert sorted(world.column("response_id")) == [done.id, f"{done.id}-1", f"{done.id}-2"]
        assert done.usage is not None
        assert done.usage.prompt_tokens == len(turns[0].prompt)
        assert done.usage.completion_tokens == sum(len(t.completion.tokens) for t in turns)


async def test_a_turn_of_a_conversation_has_one_reply(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        for headers in ({}, {"X-Turn-Type": "episode", "X-Session-Id": "e"}):
            response = await world.ask("count", n=2, headers=headers)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
            assert "which has one reply" in response.text
        for fields in ({"n": 9}, {"n": 0}, {"n": 2, "stream": True}):
            assert (await world.ask("count", **fields, headers=SIDE)).status_code == 400
        assert world.turns() == []
        assert (await world.ask("count", n=1)).status_code == 200


async def test_where_one_of_several_fails_the_answer_is_an_error(
    tmp_path: Path, renderer: Renderer
) -> None:
    broken = [Script(spell(renderer, "two three"), fail_after=1)] * 4
    sampler = FakeSampler(spell(renderer, "one"), *broken)
    async with gateway(tmp_path, renderer, sampler) as world:
        response = await world.ask("count", n=2, headers=SIDE)
        assert response.status_code == 503
        assert len(world.turns()) == 1, "what was sampled is recorded and billed"
