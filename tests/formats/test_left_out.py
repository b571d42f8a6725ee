"""Tools that a service would run, beside functions: left out, and said once; alone: refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from anthropic.types.beta.beta_tool_union_param import BetaToolUnionParam
from openai.types.chat import ChatCompletionToolUnionParam
from openai.types.responses.tool_param import ToolParam

from tests.formats.typed_items import values
from tests.support.gateways import MODEL, World, gateway, served
from tinker_claw.cli.status import describe
from tinker_claw.render.renderer import Renderer

Body = dict[str, Any]
SCHEMA: Body = {"type": "object", "properties": {}}
FUNCTION: dict[str, Body] = {
    "chat": {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    "messages": {"name": "look", "input_schema": SCHEMA, "defer_loading": True},
    "responses": {
        "type": "function",
        "name": "look",
        "parameters": SCHEMA,
        "strict": None,
        "defer_loading": True,
    },
}
OTHER: dict[str, Body] = {
    "chat": {"type": "custom", "custom": {"name": "patch"}},
    "messages": {"type": "web_search_20250305", "name": "web_search"},
    "responses": {"type": "image_generation"},
}
TYPES = {
    "chat": ChatCompletionToolUnionParam,
    "messages": BetaToolUnionParam,
    "responses": ToolParam,
}
OWN = (None, "function", "custom", "namespace")
"""Types of functions: Anthropic's are custom, or have none."""


def asked(wire: str, **fields: Any) -> tuple[str, Body]:
    said = [{"role": "user", "content": "Look."}]
    route, body = {
        "chat": ("/chat/completions", {"messages": said}),
        "messages": ("/messages", {"messages": said, "max_tokens": 9}),
        "responses": ("/responses", {"input": said}),
    }[wire]
    return route, {"model": MODEL} | body | fields


@pytest.mark.parametrize("wire", TYPES)
async def test_the_tools_of_services_are_left_out_beside_functions(
    tmp_path: Path, renderer: Renderer, wire: str
) -> None:
    others = [
        tool
        for tool in values(TYPES[wire])
        if tool.get("type") not in OWN or (wire != "messages" and tool["type"] == "custom")
    ]
    assert others
    async with gateway(tmp_path, renderer) as world:
        for tool in others:
            route, body = asked(wire, tools=[tool, FUNCTION[wire]])
            response = await world.http.post(route, json=body)
            assert response.status_code == 200, (tool, response.text)
            assert '"name": "look"' in renderer.decode(world.sampler.prompts[-1])
            route, body = asked(wire, tools=[tool])
            refused = await world.http.post(route, json=body)
            assert refused.status_code == 400, tool
            assert "tools[0]" in refused.json()["error"]["message"]
            assert tool["type"] in refused.json()["error"]["message"]


EDITS: dict[str, Body] = {
    "chat": {},
    "messages": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
    "responses": {"context_management": [{"type": "compaction", "compact_threshold": 1000}]},
}
"""Fields that ask for something to be taken out of a history."""


async def health_of(world: World) -> Body:
    return (await world.http.get(world.url.removesuffix("/v1") + "/healthz")).json()


@pytest.mark.parametrize("wire", OTHER)
async def test_what_was_left_out_is_said_once_in_the_log_and_in_status(
    tmp_path: Path, renderer: Renderer, wire: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with gateway(tmp_path, renderer) as world:
        assert (await health_of(world))["left_out"] == []
        route, body = asked(wire, tools=[FUNCTION[wire], OTHER[wire]], **EDITS[wire])
        for _ in range(3):
            assert (await world.http.post(route, json=body)).status_code == 200
        health = await health_of(world)
        sentences = health["left_out"]
        for place in ("tools[1]", *EDITS[wire]):
            assert sum(f"({place}" in sentence for sentence in sentences) == 1
        for sentence in sentences:
            assert f"  left out of requests: {sentence}" in describe(health, world.url, 0.0)
        assert health["status"] == "ok"
    assert capsys.readouterr().out.count("request.left_out") == len(sentences) < 3


@served(context_tokens=40000)
async def test_kinds_left_out_are_bounded(world: World) -> None:
    tools = [{"type": f"x{n}" * 90} for n in range(500)]
    route, body = asked("chat", tools=[FUNCTION["chat"], *tools])
    assert (await world.http.post(route, json=body)).status_code == 200
    health = await health_of(world)
    assert 0 < len(health["left_out"]) < 50
    assert max(map(len, health["left_out"])) < 300


def named(wire: str, kind: str, **fields: Any) -> Body:
    """Fields of this type, in an object of their own for chat."""
    return {"type": kind} | ({kind: fields} if wire == "chat" else fields)


def allowed(wire: str, mode: str, *tools: Body) -> Body:
    return named(wire, "allowed_tools", mode=mode, tools=list(tools))


@pytest.mark.parametrize("wire", ["chat", "responses"])
async def test_choices_of_tools_are_understood(world: World, renderer: Renderer, wire: str) -> None:
    second = named(wire, "function", name="touch", parameters=SCHEMA)
    tools, look = [FUNCTION[wire], second, OTHER[wire]], named(wire, "function", name="look")
    other = {"type": OTHER[wire]["type"]}

    async def shown(choice: Body) -> str:
        route, body = asked(wire, tools=tools, tool_choice=choice)
        response = await world.http.post(route, json=body)
        assert response.status_code == 200, response.text
        return renderer.decode(world.sampler.prompts[-1])

    both = await shown({"type": "auto"})
    assert '"look"' in both
    assert '"touch"' in both
    for mode in ("auto", "required"):
        one = await shown(allowed(wire, mode, look, other))
        assert '"look"' in one
        assert '"touch"' not in one
        assert one.endswith('{"name": "look", "arguments":') is (mode == "required")
    assert '"look"' not in await shown(allowed(wire, "auto", other))
    assert '"look"' not in await shown({"type": "none"})
    for choice in (
        other,
        allowed(wire, "required", other),
        named(wire, "function", name="patch"),
        {"type": "mcp", "server_label": "x"},
    ):
        route, body = asked(wire, tools=tools, tool_choice=choice)
        refused = await world.http.post(route, json=body)
        assert refused.status_code == 400, choice
        assert refused.json()["error"]["param"].startswith("tool_choice")
