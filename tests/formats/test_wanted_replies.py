"""What no wire gives is refused by name: several replies, logprobs, JSON, replies kept by id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import MODEL, chat, gateway
from tinker_claw.render.renderer import Renderer

BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": chat("hi")},
    "/responses": {"input": "hi"},
    "/messages": {"messages": chat("hi"), "max_tokens": 9},
}
AS_JSON = {"type": "json_schema", "name": "x", "json_schema": {"name": "x"}, "schema": {}}
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("/chat/completions", "n", {"n": 2}, "send it again for another"),
    ("/chat/completions", "logprobs", {"logprobs": True}, "no logprobs are returned"),
    ("/chat/completions", "top_logprobs", {"top_logprobs": 2}, "no logprobs are returned"),
    ("/chat/completions", "response_format", {"response_format": AS_JSON}, "offer a tool"),
    (
        "/chat/completions",
        "response_format",
        {"response_format": {"type": "json_object"}},
        "offer a tool",
    ),
    ("/responses", "n", {"n": 2}, "not a field"),
    ("/responses", "top_logprobs", {"top_logprobs": 2}, "no logprobs are returned"),
    ("/responses", "include[0]", {"include": ["message.output_text.logprobs"]}, "not supported"),
    ("/responses", "text.format", {"text": {"format": AS_JSON}}, "offer a tool"),
    (
        "/responses",
        "previous_response_id",
        {"previous_response_id": "resp_1"},
        "send the whole conversation as input",
    ),
    ("/messages", "n", {"n": 2}, "not a field"),
    ("/messages", "logprobs", {"logprobs": True}, "not a field"),
    ("/messages", "output_config.format", {"output_config": {"format": AS_JSON}}, "offer a tool"),
]
NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    (
        "/chat/completions",
        {"n": 1, "logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}},
    ),
    (
        "/responses",
        {
            "top_logprobs": 0,
            "previous_response_id": None,
            "store": True,
            "include": ["reasoning.encrypted_content"],
            "text": {"format": {"type": "text"}},
        },
    ),
    ("/messages", {"output_config": {"effort": "high"}}),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_refused_by_name_and_says_what_to_do(
    tmp_path: Path, renderer: Renderer, stream: bool
) -> None:
    async with gateway(tmp_path, renderer) as world:
        for path, field, fields, says in REFUSED:
            body = {"model": MODEL, "stream": stream} | BODIES[path] | fields
            response = await world.http.post(path, json=body)
            told = response.json()["error"]["message"]
            assert response.status_code == 400, (path, field)
            assert field in told
            assert says in told
        assert world.turns() == []


async def test_values_that_ask_for_nothing_are_taken(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        for path, fields in NEUTRAL:
            body = {"model": MODEL} | BODIES[path] | fields
            response = await world.http.post(path, json=body)
            assert response.status_code == 200, response.text
        assert len(world.turns()) == 3


async def test_a_reply_has_one_choice_without_logprobs(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        (choice,) = (await world.ask("hi")).json()["choices"]
        assert (choice["index"], choice["logprobs"]) == (0, None)
