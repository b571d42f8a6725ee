"""Access: keys that name users, forbidden web pages, and answers to strangers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.gateway.test_gateway_refusals import assert_error
from tests.support.gateways import MODEL, gateway, spell
from tests.support.ledger import sql
from tests.support.openclaw import assistant, openclaw, user, utility
from tinker_claw.render.renderer import Renderer

ANNA, BEN, MINE = "anna-0123456789abcdef", "ben-0123456789abcdefg", "mine-0123456789abcdef"
USERS = {"anna": ANNA, "ben": BEN}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_two_users_never_share_a_session(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer, users=USERS) as world:
        world.say("hello")
        first = openclaw("good morning")
        later = openclaw("good morning", assistant("hello"), user("not so loud"))
        same = {"X-Session-Id": "s"}
        for key in (ANNA, BEN):
            await world.reply(first, **bearer(key), **same)
        of_anna, of_ben = (turn.id for turn in world.turns())
        assert len(set(world.column("session_id"))) == 2
        await world.reply(later, **bearer(BEN), **same)
        states = world.next_states()
        assert states[of_anna] is None, "what Ben says is nothing that Anna has said"
        state = states[of_ben]
        assert state is not None
        assert state.text == "not so loud"
        await world.reply(later, **bearer(ANNA), **same)
        assert world.next_states()[of_anna] is not None
        sessions = sql(world.ledger).rows("SELECT user, key FROM sessions ORDER BY user")
        assert [tuple(row) for row in sessions] == [("anna", "s"), ("ben", "s")]
        told = Counter((turn["user"], turn["session"]) for turn in world.observer.seen)
        assert sorted(told.values()) == [2, 2]


async def test_a_trace_files_no_call_with_another_user(tmp_path: Path, renderer: Renderer) -> None:
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    side = utility("You are a context summarization assistant", "<conversation>")
    async with gateway(tmp_path, renderer, users=USERS) as world:
        await world.reply(openclaw("good morning"), **bearer(ANNA), **trace)
        await world.reply(side, **bearer(BEN), **trace)
        await world.reply(side, **bearer(ANNA), **trace)
        of = "SELECT user FROM sessions JOIN turns ON session_id = sessions.id ORDER BY turns.id"
        assert [row["user"] for row in sql(world.ledger).rows(of)] == ["anna", "ben", "anna"]
        first, of_ben, last = world.column("session_id")
        assert first == last != of_ben


async def test_a_session_name_of_any_length_is_one_session(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer) as world:
        for _ in range(2):
            await world.ask("hi", prompt_cache_key="k" * 20_000)
            await world.ask("hi", headers={"X-Session-Id": "k" * 20_001})
        assert len(set(world.column("session_id"))) == 2
        (longest,) = sql(world.ledger).rows("SELECT MAX(LENGTH(key)) AS n FROM sessions")
        assert longest["n"] <= 256


async def test_a_user_cannot_go_on_from_the_turn_of_another(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, users=USERS) as world:
        world.say("hello")
        await world.reply(openclaw("good morning"), **bearer(ANNA))
        stolen = openclaw("good morning", assistant("hello"), user("I am Anna, honestly"))
        await world.reply(stolen, **bearer(BEN))
        assert list(world.next_states().values()) == [None, None]
        assert world.woken == []


async def test_the_same_words_of_two_users_are_judged_apart_after_a_restart(
    tmp_path: Path, renderer: Renderer
) -> None:
    same = {"X-Session-Id": "s"}
    async with gateway(tmp_path, renderer, users=USERS) as world:
        world.say("hello")
        await world.reply(openclaw("good morning"), **bearer(ANNA), **same)
    async with gateway(tmp_path, renderer, users=USERS) as world:
        later = openclaw("good morning", assistant("hello"), user("not so loud"))
        await world.reply(later, **bearer(BEN), **same)
        assert list(world.next_states().values()) == [None, None]
        await world.reply(later, **bearer(ANNA), **same)
        assert [state is None for state in world.next_states().values()] == [False, True, True]


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


async def test_a_wrong_key_is_a_401(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer, users=USERS) as world:
        for headers in STRANGERS:
            for path in ("models", "../metrics"):
                told = await world.http.get(f"{world.url}/{path}", headers=headers)
                assert_error(told, 401, code="invalid_api_key", type="authentication_error")
            told = await world.ask("hi", headers=headers)
            assert_error(told, 401, code="invalid_api_key", type="authentication_error")
            assert told.headers["www-authenticate"] == "Bearer"
        assert world.turns() == []
        assert world.sampler.prompts == []


async def test_the_settings_own_key_is_the_default_users(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, users=USERS, api_key=MINE) as world:
        for key in (MINE, BEN, ANNA):
            assert (await world.ask("hi", headers=bearer(key))).status_code == 200
        assert [seen["user"] for seen in world.observer.seen] == ["default", "ben", "anna"]


async def test_without_keys_there_is_one_user(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        assert (await world.ask("hi", headers=bearer("anything"))).status_code == 200
        assert (await world.ask("hi")).status_code == 200
        assert {seen["user"] for seen in world.observer.seen} == {"default"}


async def test_strangers_are_told_whether_all_is_well_and_no_more(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, users=USERS, api_key=MINE) as world:
        address = world.url.removesuffix("/v1") + "/healthz"
        world.health.judge_is("failing", "the judge at https://judge.example is away")
        for headers in ({}, bearer("wrong")):
            told = await world.http.get(address, headers=headers)
            assert told.json() == {"status": "degraded"}
        known = (await world.http.get(address, headers=bearer(MINE))).json()
        assert "judge.example" in known["last_error"]
    async with gateway(tmp_path, renderer) as world:
        told = await world.http.get(world.url.removesuffix("/v1") + "/healthz")
        assert told.json()["policy_version"] == 0, "on loopback without keys, everything"


async def test_a_user_is_told_whether_all_is_well_and_his_own_figures(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, users=USERS, admins=["anna"]) as world:
        root = world.url.removesuffix("/v1")
        world.health.judge_is("failing", "the judge at https://judge.example is away")
        for text, key in (("one", ANNA), ("two", ANNA), ("three words more", BEN)):
            assert (await world.ask(text, headers=bearer(key))).status_code == 200
        (private,) = (await world.ask("shh", headers=bearer(BEN) | {"x-private": "1"}),)
        assert private.status_code == 200
        own = (await world.http.get(f"{root}/healthz", headers=bearer(BEN))).json()
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
        refused = await world.http.get(f"{root}/metrics", headers=bearer(BEN))
        assert_error(refused, 403, code="forbidden")
        everything = (await world.http.get(f"{root}/healthz", headers=bearer(ANNA))).json()
        assert everything["data_dir"] == str(tmp_path)
        assert "spent_usd" in everything
        figures = await world.http.get(f"{root}/metrics", headers=bearer(ANNA))
        assert figures.status_code == 200


async def test_whoever_runs_the_gateway_is_an_admin(tmp_path: Path, renderer: Renderer) -> None:
    for key in (None, MINE):
        async with gateway(tmp_path, renderer, api_key=key) as world:
            headers = bearer(key) if key else {}
            for path in ("../metrics", "../healthz"):
                answer = await world.http.get(f"{world.url}/{path}", headers=headers)
                assert answer.status_code == 200
            assert "spent_usd" in answer.json()


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
        assert len({anna, ben, cleo, mine}) == 4
        for salt in (anna, ben, cleo, mine):
            assert salt is not None
            assert len(salt) >= 43, "256 bits that nobody can guess"
        kept = sql(world.ledger).rows("SELECT params FROM turns")
        assert not any(salt in row["params"] for row in kept for salt in (anna, ben, cleo, mine))
    async with gateway(tmp_path / "alone", renderer, api_key=MINE) as world:
        await world.ask("hi", headers=bearer(MINE))
        assert world.sampler.params[0].cache_salt is None, "there is nobody to be kept apart"


async def test_a_web_page_may_do_nothing(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        for origin in ("https://evil.example", "null", "http://127.0.0.1:30000", ""):
            page = {"origin": origin}
            answers = [await world.ask("buy me a boat", headers=page)]
            for path in ("models", "../metrics", "../healthz"):
                answers.append(await world.http.get(f"{world.url}/{path}", headers=page))
            for told in answers:
                assert_error(told, 403, code="forbidden")
            asked = {"access-control-request-method": "POST"} | page
            preflight = await world.http.options("/chat/completions", headers=asked)
            assert preflight.status_code == 405
            for answer in (*answers, preflight):
                assert not any(name.startswith("access-control") for name in answer.headers)
        assert world.turns() == []


async def test_a_form_or_plain_text_is_no_request(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        body = b'{"model": "demo", "messages": [{"role": "user", "content": "hi"}]}'
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            headers = {"content-type": kind}
            told = await world.http.post("/chat/completions", content=body, headers=headers)
            assert_error(told, 415, code="unsupported_media_type")
            assert "application/json" in told.json()["error"]["message"]
        assert world.turns() == []
        for kind in ("application/json", "Application/JSON; charset=utf-8"):
            headers = {"content-type": kind}
            told = await world.http.post("/chat/completions", content=body, headers=headers)
            assert told.status_code == 200


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


async def test_only_names_of_this_machine_lead_here(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer) as world:
        address = world.url.removesuffix("/v1") + "/healthz"
        for host in ELSEWHERE:
            assert_error(await world.ask("hi", headers={"host": host}), 403, code="forbidden")
            assert_error(await world.http.get(address, headers={"host": host}), 403)
        assert world.turns() == []
        for host in ("localhost", "LOCALHOST.:30000", "127.0.0.9:1", "[::1]:30000"):
            assert (await world.ask("hi", headers={"host": host})).status_code == 200


async def test_with_a_key_any_name_will_do(tmp_path: Path, renderer: Renderer) -> None:
    async with gateway(tmp_path, renderer, api_key=MINE) as world:
        headers = bearer(MINE) | {"host": "agent.home.example"}
        assert (await world.ask("hi", headers=headers)).status_code == 200
        page = headers | {"origin": "https://evil.example"}
        assert_error(await world.ask("hi", headers=page), 403, code="forbidden")


async def test_the_official_client_is_let_in_with_its_users_key(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, users=USERS) as world:
        world.sampler.say(spell(renderer, "yes"))
        client = world.openai.with_options(api_key=ANNA)
        reply = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "is it me?"}]
        )
        assert reply.choices[0].message.content == "yes"
        assert [model.id async for model in client.models.list()] == [MODEL]


async def test_a_placeholder_beside_the_right_key_does_no_harm(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, users=USERS) as world:
        message = {"role": "user", "content": "hi"}
        sent = {"model": MODEL, "messages": [message], "max_tokens": 9}
        for placeholder in ("none", "", "dummy", BEN[:-1]):
            headers = {"x-api-key": placeholder, **bearer(ANNA)}
            told = await world.http.post("/messages", json=sent, headers=headers)
            assert told.status_code == 200, told.text
        headers = {"x-api-key": ANNA, **bearer("none")}
        assert (await world.http.post("/messages", json=sent, headers=headers)).status_code == 200
        headers = {"x-api-key": "none", **bearer("none")}
        assert (await world.http.post("/messages", json=sent, headers=headers)).status_code == 401
        assert {seen["user"] for seen in world.observer.seen} == {"anna"}


async def test_a_401_names_the_file_of_the_key_to_callers_on_this_machine(
    tmp_path: Path, renderer: Renderer
) -> None:
    file = tmp_path / "api-key"
    async with gateway(tmp_path / "data", renderer, api_key=MINE, key_file=file) as world:
        told = await world.ask("hi", headers=bearer("wrong"))
        assert_error(told, 401)
        assert str(file) in told.json()["error"]["message"]
        assert MINE not in told.text
        forwarded = bearer("wrong") | {"x-forwarded-for": "203.0.113.9"}
        assert str(tmp_path) not in (await world.ask("hi", headers=forwarded)).text


OBSIDIAN = "app://obsidian.md"


async def test_a_named_origin_may_use_the_wires_with_a_key(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, api_key=MINE, allow_origin=OBSIDIAN) as world:
        page = {"origin": OBSIDIAN} | bearer(MINE)
        sent = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        answers = [
            await world.ask("hi", headers=page),
            await world.ask("hi", headers=page, stream=True),
            await world.http.post("/messages", json=sent, headers=page),
            await world.http.post("/responses", json={"model": MODEL, "input": "hi"}, headers=page),
            await world.http.get("/models", headers=page),
        ]
        refused = [
            await world.ask("hi", headers={"origin": OBSIDIAN}),
            await world.ask("hi", headers=page | bearer("wrong")),
            await world.ask("hi", headers=page, model="other"),
        ]
        assert [answer.status_code for answer in (*answers, *refused)] == [200] * 5 + [
            401,
            401,
            404,
        ]
        for answer in (*answers, *refused):
            allowed = [n for n in answer.headers if n.startswith("access-control")]
            assert allowed == ["access-control-allow-origin"], "and no credentials"
            assert answer.headers["access-control-allow-origin"] == OBSIDIAN
            assert "Origin" in answer.headers["vary"]


async def test_a_preflight_of_a_named_origin_is_answered(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, api_key=MINE, allow_origin=OBSIDIAN) as world:
        asks = {
            "origin": OBSIDIAN,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        for path in ("/chat/completions", "/messages", "/responses", "/models"):
            told = await world.http.options(path, headers=asks)
            assert told.status_code == 204
            assert told.headers["access-control-allow-origin"] == OBSIDIAN
            assert "POST" in told.headers["access-control-allow-methods"]
            allowed = told.headers["access-control-allow-headers"]
            assert allowed == "authorization,content-type"
            assert "access-control-allow-credentials" not in told.headers
        assert world.turns() == []


async def test_other_origins_and_other_paths_stay_shut(tmp_path: Path, renderer: Renderer) -> None:
    others = ("app://obsidian.md.evil", "APP://obsidian.md", f"{OBSIDIAN}/", "null", "*", "")
    async with gateway(tmp_path, renderer, api_key=MINE, allow_origin=OBSIDIAN) as world:
        root, answers = world.url.removesuffix("/v1"), list[Any]()
        asked = {"access-control-request-method": "POST"}
        for origin in others:
            page = {"origin": origin} | bearer(MINE)
            answers.append(await world.ask("hi", headers=page))
            preflight = await world.http.options("/chat/completions", headers=page | asked)
            assert preflight.status_code == 405
            assert not any(name.startswith("access-control") for name in preflight.headers)
        page = {"origin": OBSIDIAN} | bearer(MINE)
        answers.append(await world.http.post("/feedback", json={"turn": 1}, headers=page))
        answers += [
            await world.http.get(f"{root}{path}", headers=page)
            for path in ("/healthz", "/metrics", "/")
        ]
        for told in answers:
            assert_error(told, 403, code="forbidden")
            assert not any(name.startswith("access-control") for name in told.headers)
        for path in ("/v1/feedback", "/healthz", "/metrics", "/ui"):
            preflight = await world.http.options(f"{root}{path}", headers=page | asked)
            assert not any(name.startswith("access-control") for name in preflight.headers)
        assert world.turns() == []


async def test_a_named_origin_is_nobody_where_there_are_no_keys(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with gateway(tmp_path, renderer, allow_origin=OBSIDIAN) as world:
        told = await world.ask("hi", headers={"origin": OBSIDIAN} | bearer("anything"))
        assert_error(told, 403, code="forbidden")
        assert world.turns() == []
