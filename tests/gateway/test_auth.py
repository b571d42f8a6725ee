"""Access: keys that name users, forbidden web pages, and answers to strangers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gateway.test_gateway_refusals import assert_error
from tests.support.gateways import MODEL, World, chat, gateway, served
from tests.support.ledger import sql
from tests.support.openclaw import assistant, openclaw, user, utility
from tinker_claw.render.renderer import Renderer

ANNA, BEN, MINE = "anna-0123456789abcdef", "ben-0123456789abcdefg", "mine-0123456789abcdef"
USERS = {"anna": ANNA, "ben": BEN}
LATER = openclaw("good morning", assistant("hello"), user("not so loud"))
SAID = {"messages": chat("hi"), "max_tokens": 9, "model": MODEL}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("named", [{}, {"X-Session-Id": "s"}], ids=["unnamed", "named"])
async def test_nobody_goes_on_from_the_turn_of_another(
    tmp_path: Path, renderer: Renderer, named: dict[str, str]
) -> None:
    async with gateway(tmp_path, renderer, users=USERS) as world:
        world.say("hello")
        await world.reply(openclaw("good morning"), **bearer(ANNA), **named)
        await world.reply(LATER, **bearer(BEN), **named)
        assert list(world.next_states().values()) == [None, None]
        assert world.woken == []
    async with gateway(tmp_path, renderer, users=USERS) as world:
        await world.reply(LATER, **bearer(BEN), **named)
        assert list(world.next_states().values()) == [None] * 3
        await world.reply(LATER, **bearer(ANNA), **named)
        assert [state is None for state in world.next_states().values()] == [False, *[True] * 3]
        users = sql(world.ledger).column("SELECT user FROM sessions ORDER BY user")
        assert users == ["anna", "ben"]


@served(users=USERS)
async def test_a_trace_files_no_call_with_another_user(world: World) -> None:
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    side = utility("You are a context summarization assistant", "<conversation>")
    await world.reply(openclaw("good morning"), **bearer(ANNA), **trace)
    await world.reply(side, **bearer(BEN), **trace)
    await world.reply(side, **bearer(ANNA), **trace)
    assert [seen["user"] for seen in world.observer.seen] == ["anna", "ben", "anna"]
    first, of_ben, last = world.column("session_id")
    assert first == last != of_ben


async def test_a_session_name_of_any_length_is_one_session(world: World) -> None:
    for _ in range(2):
        await world.ask("hi", prompt_cache_key="k" * 20_000)
        await world.ask("hi", headers={"X-Session-Id": "k" * 20_001})
    assert len(set(world.column("session_id"))) == 2
    assert sql(world.ledger).one("SELECT MAX(LENGTH(key)) FROM sessions") <= 256


STRANGERS: tuple[dict[str, Any], ...] = (
    {},
    {"authorization": ""},
    {"authorization": ANNA},
    {"authorization": f"Basic {ANNA}"},
    {"authorization": "Bearer"},
    bearer(ANNA[:-1]),
    bearer(f"{ANNA}x"),
    bearer(ANNA.upper()),
    bearer(f"{ANNA},{BEN}"),
    {"authorization": "Bearer ÿþ".encode("latin-1")},
    {"x-api-key": ANNA},
)


@served(users=USERS)
async def test_a_wrong_key_is_a_401(world: World) -> None:
    for headers in STRANGERS:
        refused = [
            await world.http.get("/models", headers=headers),
            await world.http.get("/../metrics", headers=headers),
            await world.ask("hi", headers=headers),
        ]
        for answer in refused:
            assert_error(answer, 401, code="invalid_api_key", type="authentication_error")
        assert refused[-1].headers["www-authenticate"] == "Bearer"
    assert (world.turns(), world.sampler.prompts) == ([], [])


async def test_a_key_names_its_user(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path / "users", renderer, users=USERS, api_key=MINE) as world:
        for key in (MINE, BEN, ANNA):
            assert (await world.ask("hi", headers=bearer(key))).status_code == 200
        assert [seen["user"] for seen in world.observer.seen] == ["default", "ben", "anna"]
    async with gateway(tmp_path / "alone", renderer) as world:
        for headers in ({}, bearer("anything")):
            assert (await world.ask("hi", headers=headers)).status_code == 200
        assert {seen["user"] for seen in world.observer.seen} == {"default"}


async def test_status_by_who_asks(tmp_path: Path, renderer: Renderer) -> None:
    settings: dict[str, Any] = {"users": USERS, "api_key": MINE, "admins": ["anna"]}
    async with gateway(tmp_path, renderer, **settings) as world:
        health, metrics = "/../healthz", "/../metrics"
        world.health.judge_is("failing", "the judge at https://judge.example is away")
        for text, key in (("one", ANNA), ("two", ANNA), ("three words more", BEN)):
            assert (await world.ask(text, headers=bearer(key))).status_code == 200
        private = await world.ask("shh", headers=bearer(BEN) | {"x-private": "1"})
        assert private.status_code == 200
        for headers in ({}, bearer("wrong")):
            status = (await world.http.get(health, headers=headers)).json()
            assert status == {"status": "degraded"}, "to strangers no more"
        own = (await world.http.get(health, headers=bearer(BEN))).json()
        last = world.turns()[-1]
        assert own == {
            "status": "degraded",
            "user": "ben",
            "requests_now": 0,
            "turns": 2,
            "prompt_tokens": own["prompt_tokens"],
            "completion_tokens": 2 * len(last.completion.tokens),
        }
        assert own["prompt_tokens"] > len(last.prompt)
        refused = await world.http.get(metrics, headers=bearer(BEN))
        assert_error(refused, 403, code="forbidden")
        for admin in (ANNA, MINE):
            everything = (await world.http.get(health, headers=bearer(admin))).json()
            assert everything["data_dir"] == str(tmp_path)
            assert "judge.example" in everything["last_error"]
            figures = await world.http.get(metrics, headers=bearer(admin))
            assert figures.status_code == 200
            assert figures.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_on_loopback_without_keys_whoever_asks_is_an_admin(world: World) -> None:
    for path in ("/../metrics", "/../healthz"):
        answer = await world.http.get(path)
        assert answer.status_code == 200
    assert {"spent_usd", "policy_version"} <= set(answer.json())


async def test_what_is_computed_for_one_user_is_used_for_his_group_only(
    tmp_path: Path, renderer: Renderer
) -> None:
    everybody = USERS | {"cleo": "cleo-0123456789abcdef", "dora": "dora-0123456789abcdef"}
    groups = {"cleo": "anna", "dora": "anna"}  # a group of a user's name is not that user's
    async with gateway(tmp_path, renderer, users=everybody, groups=groups, api_key=MINE) as world:
        for key in (*everybody.values(), MINE, ANNA):
            assert (await world.ask("hi", headers=bearer(key))).status_code == 200
        anna, ben, cleo, dora, mine, again = (p.cache_salt for p in world.sampler.params)
        assert (anna, cleo) == (again, dora)
        salts = {anna, ben, cleo, mine}
        assert len(salts) == 4
        kept = str(world.column("params"))
        for salt in salts:
            assert salt is not None
            assert len(salt) >= 43, "256 bits that nobody can guess"
            assert salt not in kept
    async with gateway(tmp_path / "alone", renderer, api_key=MINE) as world:
        await world.ask("hi", headers=bearer(MINE))
        assert world.sampler.params[0].cache_salt is None, "there is nobody to be kept apart"


def assert_shut(answers: list[Any]) -> None:
    """No page reads these answers."""
    for answer in answers:
        assert not any(name.startswith("access-control") for name in answer.headers)


async def test_a_web_page_may_do_nothing(world: World) -> None:
    for origin in ("https://evil.example", "null", "http://127.0.0.1:30000", ""):
        page = {"origin": origin}
        answers = [await world.ask("buy me a boat", headers=page)]
        for path in ("/models", "/../metrics", "/../healthz"):
            answers.append(await world.http.get(path, headers=page))
        for refused in answers:
            assert_error(refused, 403, code="forbidden")
        asked = {"access-control-request-method": "POST"} | page
        preflight = await world.http.options("/chat/completions", headers=asked)
        assert preflight.status_code == 405
        assert_shut([*answers, preflight])
    assert world.turns() == []


async def test_a_form_or_plain_text_is_no_request(world: World) -> None:
    body = b'{"model": "demo", "messages": [{"role": "user", "content": "hi"}]}'

    async def sent_as(kind: str) -> Any:
        headers = {"content-type": kind}
        return await world.http.post("/chat/completions", content=body, headers=headers)

    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert_error(await sent_as(kind), 415, code="unsupported_media_type")
    assert world.turns() == []
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        assert (await sent_as(kind)).status_code == 200


ELSEWHERE = (
    "evil.example",
    "evil.example:30000",
    "127.0.0.1.evil.example",
    "[::2]:30000",
    "10.0.0.1",
    "localhost.evil.example:1",
    "",
    "localhost@evil.example",
)


async def test_only_names_of_this_machine_lead_here_without_a_key(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path / "open", renderer) as world:
        health = "/../healthz"
        for host in ELSEWHERE:
            assert_error(await world.ask("hi", headers={"host": host}), 403, code="forbidden")
            assert_error(await world.http.get(health, headers={"host": host}), 403)
        assert world.turns() == []
        for host in ("localhost", "LOCALHOST.:30000", "127.0.0.9:1", "[::1]:30000"):
            assert (await world.ask("hi", headers={"host": host})).status_code == 200
    async with gateway(tmp_path / "keyed", renderer, api_key=MINE) as world:
        headers = bearer(MINE) | {"host": "agent.home.example"}
        assert (await world.ask("hi", headers=headers)).status_code == 200
        page = headers | {"origin": "https://evil.example"}
        assert_error(await world.ask("hi", headers=page), 403, code="forbidden")


@served(users=USERS)
async def test_a_placeholder_beside_the_right_key_does_no_harm(world: World) -> None:
    right = [({"x-api-key": name} | bearer(ANNA)) for name in ("none", "", "dummy", BEN[:-1])]
    right.append({"x-api-key": ANNA} | bearer("none"))
    wrong = {"x-api-key": "none"} | bearer("none")
    for headers in (*right, wrong):
        answer = await world.http.post("/messages", json=SAID, headers=headers)
        assert answer.status_code == (401 if headers is wrong else 200), answer.text
    assert {seen["user"] for seen in world.observer.seen} == {"anna"}


async def test_a_401_names_the_file_of_the_key_to_callers_on_this_machine(
    tmp_path: Path, renderer: Renderer
) -> None:
    file = tmp_path / "api-key"
    async with gateway(tmp_path / "data", renderer, api_key=MINE, key_file=file) as world:
        refused = await world.ask("hi", headers=bearer("wrong"))
        assert_error(refused, 401)
        assert str(file) in refused.json()["error"]["message"]
        assert MINE not in refused.text
        forwarded = bearer("wrong") | {"x-forwarded-for": "203.0.113.9"}
        assert str(tmp_path) not in (await world.ask("hi", headers=forwarded)).text


OBSIDIAN = "app://obsidian.md"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@served(api_key=MINE, allow_origin=OBSIDIAN)
async def test_a_named_origin_may_use_the_wires_with_a_key(world: World) -> None:
    page = {"origin": OBSIDIAN} | bearer(MINE)
    answers = {
        200: [
            await world.ask("hi", headers=page),
            await world.ask("hi", headers=page, stream=True),
            await world.http.post("/messages", json=SAID, headers=page),
            await world.http.post("/responses", json={"model": MODEL, "input": "hi"}, headers=page),
            await world.http.get("/models", headers=page),
        ],
        401: [
            await world.ask("hi", headers={"origin": OBSIDIAN}),
            await world.ask("hi", headers=page | bearer("wrong")),
        ],
        404: [await world.ask("hi", headers=page, model="other")],
    }
    for status, of_status in answers.items():
        for answer in of_status:
            assert answer.status_code == status
            allowed = [n for n in answer.headers if n.startswith("access-control")]
            assert allowed == ["access-control-allow-origin"], "and no credentials"
            assert answer.headers["access-control-allow-origin"] == OBSIDIAN
            assert "Origin" in answer.headers["vary"]
    turns = len(world.turns())
    for path in ("/chat/completions", "/messages", "/responses", "/models"):
        answer = await world.http.options(path, headers={"origin": OBSIDIAN} | PREFLIGHT)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == OBSIDIAN
        assert "POST" in answer.headers["access-control-allow-methods"]
        allowed = answer.headers["access-control-allow-headers"]
        assert allowed == PREFLIGHT["access-control-request-headers"]
        assert "access-control-allow-credentials" not in answer.headers
    assert len(world.turns()) == turns


async def test_other_origins_and_other_paths_stay_shut(tmp_path: Path, renderer: Renderer) -> None:
    others = ("app://obsidian.md.evil", "APP://obsidian.md", f"{OBSIDIAN}/", "null", "*", "")
    async with gateway(tmp_path, renderer, api_key=MINE, allow_origin=OBSIDIAN) as world:
        refused, preflights = list[Any](), list[Any]()
        for origin in others:
            page = {"origin": origin} | bearer(MINE)
            refused.append(await world.ask("hi", headers=page))
            preflight = await world.http.options("/chat/completions", headers=page | PREFLIGHT)
            assert preflight.status_code == 405
            preflights.append(preflight)
        page = {"origin": OBSIDIAN} | bearer(MINE)
        refused.append(await world.http.post("/feedback", json={"turn": 1}, headers=page))
        for path in ("/../healthz", "/../metrics", "/../"):
            refused.append(await world.http.get(path, headers=page))
        for path in ("/feedback", "/../healthz", "/../metrics", "/../ui"):
            preflights.append(await world.http.options(path, headers=page | PREFLIGHT))
        for answer in refused:
            assert_error(answer, 403, code="forbidden")
        assert_shut([*refused, *preflights])
        assert world.turns() == []
    async with gateway(tmp_path / "open", renderer, allow_origin=OBSIDIAN) as world:
        refused = await world.ask("hi", headers={"origin": OBSIDIAN} | bearer("anything"))
        assert_error(refused, 403, code="forbidden")
        assert world.turns() == [], "without keys a named origin is nobody"
