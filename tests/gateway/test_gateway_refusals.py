"""Requests that are not served: status, code and the field, in OpenAI's shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.fakes import Script
from tests.support.gateways import MODEL, Observer, gateway
from tinker_claw.errors import SamplerError
from tinker_claw.render.renderer import Renderer

WHAT = (
    "This is tinker-claw, which speaks OpenAI's chat completions: POST /v1/chat/completions. In "
    'OpenClaw set api to "openai-completions" and baseUrl to this address with /v1 at its end; '
    "Anthropic's Messages: POST /v1/messages. For Claude Code set ANTHROPIC_BASE_URL to this "
    "address without a path, and each of its models (docs/clients.md) to the model's name; "
    "OpenAI's Responses: POST /v1/responses. In Codex add a provider whose base_url is this "
    "address with /v1 at its end, and whose name is not OpenAI, or it would ask for compactions; "
    "`tinker-claw openclaw-config` prints what belongs into OpenClaw's."
)


def assert_error(response: Any, status: int, **fields: Any) -> None:
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error | fields == error
    assert error["message"]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"role": "robot", "content": "x"}]}),
        (
            "messages[0].content[0].image_url.url",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        ),
        ("max_tokens", {"max_tokens": 0}),
        ("n", {"n": 3}),
        ("tool_choice", {"tool_choice": "required"}),  # of no tools
        ("unheard_of", {"unheard_of": 1}),
        ("temperature", {"temperature": 9, "stream": True}),
    ],
)
async def test_a_bad_field_is_a_400_that_names_it(
    tmp_path: Path, renderer: Renderer, param: str, fields: dict[str, Any]
) -> None:
    async with gateway(tmp_path, renderer) as world:
        response = await world.ask("hi", **fields)
        assert_error(response, 400, param=param, type="invalid_request_error")
        assert world.turns() == []
        assert world.sampler.prompts == []


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"a": NaN}', b"[" * 50_000])
async def test_a_body_that_is_no_json_object(
    tmp_path: Path, renderer: Renderer, body: bytes
) -> None:
    async with gateway(tmp_path, renderer) as world:
        assert_error(await world.http.post("/chat/completions", content=body), 400)


async def test_the_openai_client_understands_a_refusal(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        with pytest.raises(openai.BadRequestError) as raised:
            await world.openai.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], logit_bias={"1": 5}
            )
        assert raised.value.param == "logit_bias"


@pytest.mark.parametrize(
    "model", ["gpt-4", f"{MODEL}@v7", f"{MODEL}@v", f"{MODEL}@v²", "@v0", "x" * 5000]
)
async def test_an_unknown_model_is_a_404_that_names_what_is_served(
    tmp_path: Path, renderer: Renderer, model: str
) -> None:
    async with gateway(tmp_path, renderer) as world:
        response = await world.ask("hi", model=model)
        assert_error(response, 404, code="model_not_found", param="model")
        assert f"'{MODEL}'" in response.json()["error"]["message"]
        assert len(response.content) < 1000, "a name is not sent back at full length"


async def test_a_key_is_needed_everywhere_but_for_health(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, api_key="sesam") as world:
        root = world.url.removesuffix("/v1")
        for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "Basic sesam"}):
            for path in (f"{world.url}/models", f"{root}/metrics"):
                response = await world.http.get(path, headers=headers)
                assert_error(response, 401, code="invalid_api_key", type="authentication_error")
            assert_error(await world.ask("hi", headers=headers), 401)
        assert (await world.http.get(f"{root}/healthz")).json()["status"] == "ok"
        assert (await world.ask("hi", headers={"authorization": "bearer sesam"})).status_code == 200
        assert [model.id async for model in world.openai.models.list()] == [MODEL]
        wrong = world.openai.with_options(api_key="wrong")
        with pytest.raises(openai.AuthenticationError):
            await wrong.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}]
            )


async def test_health_models_and_metrics_without_a_key(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        root = world.url.removesuffix("/v1")
        models = (await world.http.get("/models")).json()
        assert [model["id"] for model in models["data"]] == [MODEL]
        metrics = await world.http.get(f"{root}/metrics")
        assert metrics.text == "turns 0\n"
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_unknown_paths_and_methods(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        assert_error(await world.http.get("/nowhere"), 404, code="unknown_url")
        wrong = await world.http.get("/chat/completions")
        assert_error(wrong, 405, code="unknown_url")
        assert wrong.headers["allow"] == "POST"
        assert WHAT in wrong.json()["error"]["message"]


OTHER_DOORS = (
    "/v1/v1/completions",
    "/chat/complete",
    "/v1/completions",
    "/v1/embeddings",
    "/api/chat",
    "/",
    "/v1",
    f"/{'long' * 9000}",
    "/%3Cscript%3E",
)


@pytest.mark.parametrize("key", [None, "a-key-that-is-long-enough"])
async def test_other_formats_and_addresses_are_told_what_to_set(
    tmp_path: Path, renderer: Renderer, key: str | None
) -> None:
    async with gateway(tmp_path, renderer, api_key=key) as world:
        root = world.url.removesuffix("/v1")
        for path in OTHER_DOORS:
            told = await world.http.post(f"{root}{path}", json={"model": MODEL})
            if path == "/":
                assert_error(told, 405, code="unknown_url")
            else:
                assert_error(told, 404, code="unknown_url")
            message = told.json()["error"]["message"]
            assert WHAT in message
            assert len(message) < len(WHAT) + 200
            assert MODEL not in message.replace(WHAT, ""), "to strangers nothing of its own"
        what = await world.http.get(f"{root}/")
        assert what.status_code == 200
        assert what.text == f"{WHAT} Its status: /health.\n"
        health = (await world.http.get(f"{root}/health")).json()
        assert health == (await world.http.get(f"{root}/healthz")).json()
        assert ("policy_version" in health) is (key is None), "as to strangers"
        for path in ("/", "/health"):
            page = await world.http.get(f"{root}{path}", headers={"origin": "https://evil.example"})
            assert_error(page, 403, code="forbidden")
            name = await world.http.get(f"{root}{path}", headers={"host": "evil.example"})
            assert name.status_code == (403 if key is None else 200)
        assert world.turns() == []


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_long(tmp_path: Path, renderer: Renderer, chunked: bool) -> None:
    async def pieces() -> Any:
        for _ in range(3):
            yield b" " * 900

    async with gateway(tmp_path, renderer, max_body_bytes=2000) as world:
        content = pieces() if chunked else b" " * 2700
        response = await world.http.post("/chat/completions", content=content)
        assert_error(response, 413, code="request_too_large")


async def test_a_prompt_that_does_not_fit_the_context(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer, context_tokens=60) as world:
        response = await world.ask("word " * 100, max_tokens=10)
        assert_error(response, 400, code="context_length_exceeded", param="messages")
        assert "maximum context length is 60 tokens" in response.json()["error"]["message"]


async def test_what_no_shorter_history_makes_fit_is_not_told_as_a_length(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, context_tokens=300) as world:
        tools = [
            {"type": "function", "function": {"name": f"tool_{i}", "parameters": {}}}
            for i in range(30)
        ]
        long = {"role": "system", "content": "word " * 400}
        very_long = {"role": "system", "content": "word " * 4000}
        for said, more in (
            ((long, "hi"), {}),
            ((very_long, "hi"), {}),
            (("hi",), {"tools": tools}),
        ):
            messages = [{"role": "user", "content": m} if isinstance(m, str) else m for m in said]
            refused = await world.ask(messages=messages, **more)
            assert_error(refused, 400, code="window_too_small")
            told = refused.json()["error"]["message"]
            assert "window of 300 tokens" in told
            assert "maximum context" not in told, "agents would compact, and ask again"
        short = {"role": "system", "content": "Be short."}
        refused = await world.ask(messages=[short, {"role": "user", "content": "word " * 400}])
        assert_error(refused, 400, code="context_length_exceeded")


async def test_final_refusals_tell_clients_not_to_ask_again(
    tmp_path: Path, renderer: Renderer
) -> None:
    known = {"authorization": "Bearer sesam"}
    async with gateway(tmp_path, renderer, api_key="sesam", context_tokens=60) as world:
        final = [
            await world.ask("hi", headers={"authorization": "Bearer nope"}),
            await world.http.post(
                world.url.removesuffix("/v1") + "/v1/messages", json={}, headers={"x-api-key": "no"}
            ),
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
    async with gateway(tmp_path, renderer, context_tokens=60) as world:
        await world.ask("hi", max_tokens=4096)
        (params,) = world.sampler.params
        assert params.max_tokens == 60 - len(world.sampler.prompts[0])
        # Exactly one token left is enough, none is not.
        size = len(world.sampler.prompts[0])
    async with gateway(tmp_path, renderer, context_tokens=size + 1) as world:
        assert (await world.ask("hi")).status_code == 200
        assert world.sampler.params[0].max_tokens == 1
    async with gateway(tmp_path, renderer, context_tokens=size) as world:
        assert_error(await world.ask("hi"), 400, code="context_length_exceeded")


async def test_the_default_allowance_is_a_setting(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer, max_reply_tokens=17) as world:
        await world.ask("hi")
        assert world.sampler.params[0].max_tokens == 17


async def test_a_turn_type_that_does_not_exist(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        response = await world.ask("hi", headers={"X-Turn-Type": "middle"})
        assert_error(response, 400, param="X-Turn-Type")


async def test_a_version_that_cannot_be_opened_is_a_503(tmp_path: Path, renderer: Renderer) -> None:
    class Broken(dict[int, Any]):
        def __missing__(self, number: int) -> Any:
            raise SamplerError("gone")

    async with gateway(tmp_path, renderer, versions=Broken({9: None})) as world:
        assert_error(await world.ask("hi", model=f"{MODEL}@v3"), 503, type="server_error")


async def test_a_bug_is_a_500_without_its_words(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Observer, *figures: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(Observer, "served", broken)
    async with gateway(tmp_path, renderer) as world:
        response = await world.ask("hi")
        assert_error(response, 500, type="server_error")
        assert "secret" not in response.text
