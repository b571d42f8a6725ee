"""Requests that are not served: status, code and the field, in OpenAI's shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes import Script
from tests.support.gateways import MODEL, Observer, World, gateway, served
from tinker_claw.render.renderer import Renderer

STRANGER = {"origin": "https://evil.example"}


def assert_error(response: Any, status: int, **fields: Any) -> None:
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error | fields == error
    assert error["message"]


async def test_bad_fields_and_bodies_are_a_400(world: World) -> None:
    for param, fields in (
        ("messages", {"messages": []}),
        ("unheard_of", {"unheard_of": 1}),
        ("temperature", {"temperature": 9, "stream": True}),
    ):
        refused = await world.ask("hi", **fields)
        assert_error(refused, 400, param=param, type="invalid_request_error")
    for body in (b"", b"[1]", b'{"a": NaN}', b"[" * 50_000):
        assert_error(await world.http.post("/chat/completions", content=body), 400)
    assert (world.turns(), world.sampler.prompts) == ([], [])


@pytest.mark.parametrize(
    "model", ["gpt-4", f"{MODEL}@v7", f"{MODEL}@v", f"{MODEL}@v²", "@v0", "x" * 5000]
)
async def test_an_unknown_model_is_a_404_that_names_what_is_served(
    world: World, model: str
) -> None:
    response = await world.ask("hi", model=model)
    assert_error(response, 404, code="model_not_found", param="model")
    assert f"'{MODEL}'" in response.json()["error"]["message"]
    assert len(response.content) < 1000, "a name is not sent back at full length"


OTHER_DOORS = (
    "/v1/v1/completions",
    "/v1/chat",
    "/v2/chat/completions",
    "/api/generate",
    "/v1/embeddings",
    "/v1",
    "/",
    f"/{'long' * 9000}",
    "/%3Cscript%3E",
)


@pytest.mark.parametrize("key", [None, "a-key-that-is-long-enough"])
async def test_other_addresses_are_told_what_to_set(
    tmp_path: Path, renderer: Renderer, key: str | None
) -> None:
    async with gateway(tmp_path, renderer, api_key=key) as world:
        root = world.url.removesuffix("/v1")
        what = (await world.http.get(f"{root}/")).text.partition(" Its status: /health")[0]
        assert "POST /v1/chat/completions" in what
        refused = [await world.http.post(f"{root}{path}", json={}) for path in OTHER_DOORS]
        refused.append(await world.http.get("/chat/completions"))
        for answer in refused:
            wrong_method = answer.request.url.path in ("/", "/v1/chat/completions")
            assert_error(answer, 405 if wrong_method else 404, code="unknown_url")
            message = answer.json()["error"]["message"]
            assert what in message
            assert len(message) < len(what) + 200
            assert MODEL not in message.replace(what, ""), "to strangers nothing of its own"
        assert refused[-1].headers["allow"] == "POST"
        health = (await world.http.get(f"{root}/health")).json()
        assert health == (await world.http.get(f"{root}/healthz")).json()
        for path in ("/", "/health"):
            page = await world.http.get(f"{root}{path}", headers=STRANGER)
            assert_error(page, 403, code="forbidden")
            name = await world.http.get(f"{root}{path}", headers={"host": "evil.example"})
            assert name.status_code == (403 if key is None else 200)
        assert world.turns() == []


@served(context_tokens=300)
async def test_a_prompt_beyond_the_window(world: World) -> None:
    """What no shorter history makes fit is not told as a length: agents would compact again."""
    tools = [{"type": "function", "function": {"name": f"tool_{i}"}} for i in range(50)]
    system, long = {"role": "system", "content": "word " * 400}, "word " * 400
    hi = {"role": "user", "content": "hi"}
    very_long = system | {"content": "word " * 4000}
    for messages, more in (([system, hi], {}), ([very_long, hi], {}), ([hi], {"tools": tools})):
        refused = await world.ask(*messages, **more)
        assert_error(refused, 400, code="window_too_small")
        assert "maximum context" not in refused.text
    for messages in ([long], [system | {"content": "Be short."}, hi | {"content": long}]):
        refused = await world.ask(*messages)
        assert_error(refused, 400, code="context_length_exceeded", param="messages")
        assert "maximum context length is 300 tokens" in refused.text


@served(api_key="sesam", context_tokens=60)
async def test_final_refusals_tell_clients_not_to_ask_again(world: World) -> None:
    known = {"authorization": "bearer sesam"}
    final = [
        await world.ask("hi", headers={"authorization": "Bearer nope"}),
        await world.http.post("/messages", json={}, headers={"x-api-key": "no"}),
        await world.ask("hi", model="gpt-4", headers=known),
        await world.ask("hi", unheard_of=1, headers=known),
        await world.ask("word " * 100, headers=known),
        await world.http.get("/chat/completions"),
        await world.http.get("/nowhere"),
    ]
    assert [r.status_code for r in final] == [401, 401, 404, 400, 400, 405, 404]
    assert {r.headers.get("x-should-retry") for r in final} == {"false"}
    world.sampler.say(*[Script((1,), fail_after=0)] * 4)
    passing = await world.ask("hi", headers=known)
    assert passing.status_code == 503
    assert "x-should-retry" not in passing.headers


async def test_the_reply_gets_what_the_context_has_left(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer, context_tokens=60, max_reply_tokens=17) as world:
        await world.ask("hi", max_tokens=4096)
        await world.ask("hi")
        size = len(world.sampler.prompts[0])
        assert [params.max_tokens for params in world.sampler.params] == [60 - size, 17]
    async with gateway(tmp_path, renderer, context_tokens=size + 1) as world:
        assert (await world.ask("hi")).status_code == 200
        assert world.sampler.params[0].max_tokens == 1
    async with gateway(tmp_path, renderer, context_tokens=size) as world:
        assert_error(await world.ask("hi"), 400, code="context_length_exceeded")


async def test_a_bug_is_a_500_without_its_words(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Observer, *figures: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(Observer, "served", broken)
    response = await world.ask("hi")
    assert_error(response, 500, type="server_error")
    assert "secret" not in response.text
