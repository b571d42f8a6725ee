"""Names by which clients ask for the model: its own, and those that `models` gives it."""

from __future__ import annotations

from pathlib import Path

import anthropic
import pytest

from tests.support.gateways import MODEL, World, gateway, served
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


@served(models=NAMES)
async def test_clients_can_choose_from_the_names(world: World) -> None:
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
