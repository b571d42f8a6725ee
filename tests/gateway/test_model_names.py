"""Names by which clients ask for the model: its own, and those that `models` gives it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anthropic
import pytest

from examples.day.npm import npm
from tests.support.coding_agents import CLAUDE_MODELS, WINDOW, ClaudeCode
from tests.support.fakes import FakeSampler, Script
from tests.support.gateways import MODEL, World, gateway, spell
from tinker_claw.cli import main
from tinker_claw.render.renderer import Renderer

NAMES = "claude-*, haiku"


async def asked(world: World, path: str, model: str) -> int:
    body = {
        "/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
        "/responses": {"input": "hi"},
    }[path]
    return (await world.http.post(path, json=body | {"model": model})).status_code


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
async def test_a_name_is_the_model_if_the_settings_say_so(
    tmp_path: Path, renderer: Renderer, path: str
) -> None:
    names = (MODEL, "claude-haiku-9-20990101", "haiku", "haiku-2", "gpt-9", "claude-x@v0")
    async with gateway(tmp_path, renderer, models=NAMES) as world:
        answers = [await asked(world, path, name) for name in names]
        assert answers == [200, 200, 200, 404, 404, 404]
        assert world.column("reason") == [None] * 3, "it is no version by name"
    async with gateway(tmp_path / "plain", renderer) as world:
        assert [await asked(world, path, name) for name in names[:3]] == [200, 404, 404]


async def test_a_stand_in_answers_under_such_a_name_too(tmp_path: Path, renderer: Renderer) -> None:
    broken = FakeSampler(Script(spell(renderer, "never"), fail_after=0))
    base = FakeSampler(spell(renderer, "the base"))
    async with gateway(tmp_path, renderer, broken, base=base, models=NAMES) as world:
        response = await world.ask("hi", model="claude-x")
        assert response.json()["choices"][0]["message"]["content"] == "the base"


async def test_clients_can_choose_from_the_names(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer, models=NAMES) as world:
        listed = [MODEL, f"claude-{MODEL}", "haiku"]
        assert [one.id async for one in world.openai.models.list()] == listed
        url = world.url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
            assert [one.id async for one in client.models.list()] == listed
            assert (await client.models.retrieve(listed[1])).id == listed[1]
        for name in listed:
            assert (await world.ask("hi", model=name)).status_code == 200


def test_a_star_stands_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["openclaw-config", "--models", "cl*de"]) == 2
    assert "may stand at the end" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(npm() is None, reason="needs npm")
@pytest.mark.parametrize("way", ["its variables", "models in the settings"])
async def test_claude_codes_small_models_are_the_model(
    tmp_path: Path, renderer: Renderer, way: str
) -> None:
    """Asked for by the user, and for an agent of its own."""
    models = NAMES if way == "models in the settings" else None
    data = tmp_path / "data"
    async with gateway(data, renderer, context_tokens=WINDOW, models=models) as world:
        world.say(
            '<tool_call>\n{"name": "Agent", "arguments": {"description": "look", "prompt": "Look", '
            '"subagent_type": "general-purpose", "model": "haiku"}}\n</tool_call>',
            "seen",
            "done",
        )
        agent = ClaudeCode.create(tmp_path / "home", world.url, MODEL, "any")
        if models:
            agent.environment = {
                name: value
                for name, value in agent.environment.items()
                if name not in CLAUDE_MODELS
            }
        agent.model = "haiku"
        assert await asyncio.to_thread(agent.say, "Have it looked at.") == "done"
        assert len(world.sampler.prompts) >= 3
