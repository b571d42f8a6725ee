"""Endpoints over real HTTP: what they refuse, what they answer, and what is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import SecretStr

from tests.support.fakes import rated
from tests.support.ports import free_port
from tinker_claw.app.server import in_background
from tinker_claw.cli import main
from tinker_claw.config.load import load
from tinker_claw.config.settings import JudgeSettings
from tinker_claw.errors import ConfigError, JudgeError
from tinker_claw.judge.endpoints import RETRIES, HttpEndpoint
from tinker_claw.judge.judge import Judge
from tinker_claw.judge.prompts import CUT, EFFECTS, INCLUDED, Prompts, ask
from tinker_claw.types import NextState

ASKED: list[dict[str, str]] = [{"role": "user", "content": "x"}]
STATE = NextState("user", "No, do it again without the list.")


@dataclass
class Picky:
    """An endpoint that refuses some fields."""

    refuses: dict[str, Any] = field(default_factory=dict[str, Any])
    """Body of the refusal, by field."""
    status: int = 400
    says: tuple[str, str] = (rated(1), "stop")
    """Text and finish reason of each answer."""
    away: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def refusal(self, body: dict[str, Any]) -> JSONResponse | None:
        self.bodies.append(body)
        if self.away:
            return JSONResponse({}, 503)
        for name, says in self.refuses.items():
            if name in body:
                return JSONResponse(says, self.status)
        return None

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            self.headers.append(dict(request.headers))
            body = await request.json()
            if refusal := self.refusal(body):
                return refusal
            text, finish = self.says
            choice = {"message": {"content": text}, "finish_reason": finish}
            return {"choices": [choice] * body.get("n", 1)}

        return app


@asynccontextmanager
async def asking(
    picky: Picky, path: str = "", settings: JudgeSettings | None = None
) -> AsyncGenerator[HttpEndpoint]:
    retries = replace(RETRIES, longest_s=0.01, attempts=3)
    async with in_background(picky.app()) as url:
        settings = settings or JudgeSettings()
        async with HttpEndpoint(url + path, settings, retries=retries) as endpoint:
            yield endpoint


def error(message: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "param": param}}


SWITCH = "chat_template_kwargs"
FULL = {"model", "messages", "max_tokens", "n", "temperature", "response_format", SWITCH}
NAMED = {
    "max_tokens": error("Use 'max_completion_tokens' instead.", "max_tokens"),
    "temperature": error("Unsupported value: 'temperature' is 0.6, and only 1 is allowed."),
    "n": {"detail": "Only n = 1 is supported\nfor now"},
    "response_format": {"detail": [{"loc": ["body", "response_format"], "msg": "extra"}]},
    SWITCH: error("Unrecognized request argument supplied: chat_template_kwargs"),
}


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize("refused", NAMED)
async def test_a_refused_field_that_the_error_names_is_dropped_and_stays_so(
    refused: str, status: int
) -> None:
    picky = Picky({refused: NAMED[refused]}, status)
    async with asking(picky) as endpoint:
        assert await endpoint.answers(ASKED, 3, {}) == [rated(1)] * 3
        assert await endpoint.answers(ASKED, 2, {}) == [rated(1)] * 2
    first, *others = [body.keys() for body in picky.bodies]
    assert first == FULL
    assert others == [FULL - {refused}] * (5 if refused == "n" else 2), "one a request without n"


@pytest.mark.parametrize(
    ("refused", "tries"), [(SWITCH, 1), ("n", 2), ("temperature", 3), ("response_format", 4)]
)
async def test_a_refusal_without_a_name_drops_field_by_field_and_schema_and_limit_last(
    refused: str, tries: int
) -> None:
    order = [SWITCH, "n", "temperature", "response_format", "max_tokens"]
    picky = Picky({refused: {"detail": "bad request"}})
    async with asking(picky) as endpoint:
        assert await endpoint.answers(ASKED, 1, {}) == [rated(1)]
    assert [body.keys() for body in picky.bodies] == [
        FULL - {*order[:number]} for number in range(tries + 1)
    ]


async def test_two_refused_fields_that_errors_name_are_both_dropped() -> None:
    picky = Picky({name: NAMED[name] for name in ("n", "temperature")})
    async with asking(picky) as endpoint:
        assert await endpoint.answers(ASKED, 2, {}) == [rated(1)] * 2
    assert picky.bodies[-1].keys() == FULL - {"n", "temperature"}


@pytest.mark.parametrize(
    ("thinks", "text", "room"),
    [
        (False, rated(1), [300, 300]),
        (True, rated(1), [4096, 4096]),
        (False, "<think>Let me see", [300, 4096, 4096]),  # unasked
        (False, "", [300, 4096, 4096]),
    ],
)
async def test_a_judge_thinks_if_it_is_to_and_gets_the_room_for_it(
    thinks: bool, text: str, room: list[int]
) -> None:
    """An answer that was cut is marked, so that it casts no vote."""
    picky = Picky(says=(text, "length"))
    async with asking(picky, settings=JudgeSettings(judge_thinking=thinks)) as endpoint:
        for _ in range(2):
            assert await endpoint.answers(ASKED, 1, {}) == [f"{text}{CUT}"]
    assert picky.bodies[0]["chat_template_kwargs"]["enable_thinking"] is thinks
    assert [body["max_tokens"] for body in picky.bodies] == room


async def test_what_is_refused_both_ways_teaches_nothing_of_the_endpoint() -> None:
    """A filter's refusal may quote a text that speaks of temperature."""
    picky = Picky({"messages": error("not allowed: what temperature has the sea, and max_tokens?")})
    async with asking(picky) as endpoint:
        with pytest.raises(JudgeError, match=r"refuses \(HTTP 400\)$"):
            await endpoint.answers(ASKED, 3, {})
        assert [len(body) for body in picky.bodies] == [7, 6, 5, 4, 3, 2]
        picky.refuses.clear()
        assert len(await endpoint.answers(ASKED, 3, {})) == 3
    assert len(picky.bodies[-1]) == 7, "the full body is tried again"
    picky = Picky({"messages": error("no such model")}, 404)
    async with asking(picky) as endpoint:
        with pytest.raises(JudgeError, match=r"refuses \(HTTP 404\): .*no such model"):
            await endpoint.answers(ASKED, 3, {})
    assert len(picky.bodies) == 1, "it is not about the body"


async def test_an_answer_by_the_schema_is_asked_for_and_read() -> None:
    picky = Picky(says=(rated(-1), "stop"))
    async with asking(picky) as endpoint:
        for state, wishes in ((NextState("tool", "exit 1"), False), (STATE, True)):
            judge = Judge(endpoint, JudgeSettings(), most_hints=1, wishes=wishes)
            judgement = await judge.judge("ask", "reply", state, lessons=["Be brief."])
            assert judgement.verdict.votes == (-1, -1, -1)
    schemas = [body["response_format"]["json_schema"] for body in picky.bodies]
    assert all(asked["strict"] is True for asked in schemas)
    assert [[*asked["schema"]["properties"]] for asked in schemas] == [
        ["reasoning", "rating"],
        ["quote", "does", "hint"],
        ["scope", "quote", "words"],
    ], "evidence first"
    assert schemas[1]["schema"]["properties"]["does"]["enum"] == [*EFFECTS]
    for body, asked in zip(picky.bodies, schemas, strict=True):
        names = [*asked["schema"]["properties"]]
        assert asked["schema"]["required"] == names
        assert all(f"\n{name}: " in body["messages"][0]["content"] for name in names)


async def test_further_headers_are_sent_and_may_replace_the_key() -> None:
    picky = Picky()
    settings = JudgeSettings(
        judge_api_key=SecretStr("one"),
        headers={"X-Org": SecretStr("us"), "authorization": SecretStr("Key two")},
    )
    async with asking(picky, "/chat/completions", settings=settings) as endpoint:
        await endpoint.answers(ASKED, 1, {})
    assert picky.headers[0]["x-org"] == "us"
    assert picky.headers[0]["authorization"] == "Key two"


async def test_no_error_shows_a_key_in_an_address() -> None:
    retries = replace(RETRIES, attempts=1)
    url = f"http://me:sesame@127.0.0.1:{free_port()}/v1?key=sesame"
    async with HttpEndpoint(url, JudgeSettings(), retries=retries) as endpoint:
        with pytest.raises(JudgeError, match=r"http://127.*/v1/chat/completions does") as said:
            await endpoint.answers(ASKED, 1, {})
    assert "sesame" not in str(said.value)


# Prompts by file


def test_prompts_of_a_file_are_asked_inside_the_same_fences(tmp_path: Path) -> None:
    file = tmp_path / "prompts.toml"
    file.write_text('user = """\nBewerte die Antwort.\n"""\n')
    prompts = Prompts.read(file)
    messages = ask(prompts, "a", "b", STATE)[0]
    system = messages[0]["content"]
    ours = ask(INCLUDED, "a", "b", STATE)[0][0]["content"]
    assert system.startswith("Bewerte die Antwort.\n\nAnswer with one JSON object")
    assert "drawn at random for this question" in messages[-1]["content"]
    assert prompts.tools == INCLUDED.tools
    assert prompts.version != INCLUDED.version
    assert ours.startswith(INCLUDED.user)
    file.write_text(f'user = """{INCLUDED.user}"""\ntools = """{INCLUDED.tools}"""\n')
    assert Prompts.read(file).version == INCLUDED.version, "what is asked alike has one version"


@pytest.mark.parametrize("text", ["user = 1", "tools = ' '", "judge = 'x'", "user = ", None])
def test_prompts_that_cannot_be_asked_are_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "prompts.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"--judge-prompts .*prompts\.toml"):
        Prompts.read(file)


# Settings


def loaded(tmp_path: Path, text: str) -> JudgeSettings:
    file = tmp_path / "s.toml"
    file.write_text(text)
    return load(["--config", str(file)]).judge


def test_tables_of_the_file_describe_endpoints_and_show_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_CLAW_JUDGE__HEADERS", '{"X-Team": "hunter3"}')
    settings = loaded(
        tmp_path,
        "[judge]\njudge_url = 'http://j/v1'\nprm_m = 5\n[judge.headers]\nX-Org = 'hunter2'\n",
    )
    assert {name: value.get_secret_value() for name, value in settings.headers.items()} == {
        "X-Org": "hunter2",
        "X-Team": "hunter3",
    }
    for text in (repr(settings), str(settings), settings.model_dump_json()):
        assert "hunter" not in text


def test_the_pages_files_work(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "judges.md").read_text()
    prompts, settings = (block.split("```")[0] for block in page.split("```toml\n")[1:])
    file = tmp_path / "prompts.toml"
    file.write_text(prompts)
    assert Prompts.read(file).user.startswith("Du siehst")
    told = loaded(tmp_path, settings.replace("\u2026", "x"))
    assert told.headers["X-Project"].get_secret_value() == "x"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[judge]\njudge_url = 'http://j'\n[judge.headers]\n'a b' = 'secret'\n",
            "'a b' is no name",
        ),
        ("[judge]\njudge_url = 'http://j'\n[judge.headers]\na = 'x\u00e9secret'\n", "value of a"),
        ("[judge]\njudge_url = 'localhost:8000/v1'\n", "--judge-url is no address"),
        ("[judge]\njudge_url = 'http://[::1:8000/v1'\n", "--judge-url is no address"),
        ("[judge]\njudge_url = 'http:// k/v1'\n", "--judge-url is no address"),
        ("[judge.second]\nurl = 'http://k'\n", r"judge\.second"),
    ],
)
def test_tables_that_cannot_be_meant_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        loaded(tmp_path, text)
    assert "secret" not in str(raised.value)


async def test_no_proxy_reads_what_a_judge_on_this_machine_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    async with asking(Picky()) as endpoint:
        assert len(await endpoint.answers(ASKED, 1, {})) == 1


def test_a_table_in_the_environment_must_be_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_CLAW_JUDGE__HEADERS", "{hunter2")
    with pytest.raises(ConfigError, match="must be a JSON object") as raised:
        load([])
    assert "hunter2" not in str(raised.value)


async def test_doctor_asks_the_judge_and_reads_the_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picky, prompts = Picky(), tmp_path / "p.toml"
    prompts.write_text("user = 'Rate it.'")
    async with in_background(picky.app()) as url:
        flags = ["--model-name", "demo", "--backend", "local", "--judge-url", url, "--port", "0"]
        flags += ["--data-dir", str(tmp_path / "data"), "--judge-prompts", str(prompts)]
        await asyncio.to_thread(main.main, ["doctor", *flags])
    assert len(picky.bodies) == 1
    assert f"{url} answers" in " ".join(capsys.readouterr().out.split())
