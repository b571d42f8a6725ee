"""Endpoints over real HTTP: unsupported fields are found out, and a second endpoint fills in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import SecretStr

from tests.bad_judges import bad_judge_beside
from tests.learner.test_loop import SHORT, Says, world
from tests.lives import until
from tests.ports import free_port
from tests.processes import product
from tests.talk import ask, rows
from tinker_claw.app.server import in_background
from tinker_claw.cli import main
from tinker_claw.config.load import load
from tinker_claw.config.settings import JudgeSettings, SecondJudge
from tinker_claw.errors import ConfigError, JudgeError, OutageError
from tinker_claw.judge import judge as judges
from tinker_claw.judge.endpoints import RETRIES, HttpEndpoint, SilentJudgeError
from tinker_claw.judge.judge import Judge, Second
from tinker_claw.judge.prompts import CUT, INCLUDED, SCHEMA, Prompts, verdict_messages
from tinker_claw.judge.styles import address_of
from tinker_claw.types import NextState

ASKED: list[dict[str, str]] = [{"role": "user", "content": "x"}]
STATE = NextState("user", "No, do it again without the list.")


@dataclass
class Picky:
    """An endpoint that refuses some fields."""

    refuses: dict[str, Any] = field(default_factory=dict[str, Any])
    """Body of the refusal, by field."""
    status: int = 400
    says: tuple[str, str] = ("\\boxed{1}", "stop")
    """Text and finish reason of each answer."""
    away: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def _refusal(self, body: dict[str, Any]) -> JSONResponse | None:
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
            if refusal := self._refusal(body):
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


REFUSALS = {
    "max_tokens": [
        error(
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
            "'max_completion_tokens' instead.",
            "max_tokens",
        ),
        {"detail": [{"loc": ["body", "max_tokens"], "msg": "Extra inputs are not permitted"}]},
    ],
    "temperature": [
        error("Unsupported value: 'temperature' does not support 0.6 with this model."),
        error("Only the default (1) is allowed.", "temperature"),
    ],
    "n": [
        error("Unsupported value", "n"),
        {"detail": "Only n = 1 is supported"},
        {"message": "multiple completions are not supported"},
    ],
    "response_format": [
        error("Invalid parameter: 'response_format' of type 'json_schema' is not supported"),
        {"detail": "bad request"},
        {"detail": "structured outputs need a guided decoding backend"},
    ],
}


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize(
    ("refused", "says"), [(name, says) for name, all_ in REFUSALS.items() for says in all_]
)
async def test_a_field_that_is_refused_is_left_out_from_then_on(
    refused: str, says: Any, status: int
) -> None:
    picky = Picky({refused: says}, status)
    async with asking(picky) as endpoint:
        assert await endpoint.answers(ASKED, 3) == ["\\boxed{1}"] * 3
        tries = [refused in body for body in picky.bodies]
        assert tries.count(True) == 1, "found out once"
        assert tries[0]
        assert await endpoint.answers(ASKED, 1) == ["\\boxed{1}"]
    wanted = {"model", "messages", "max_tokens", "n", "temperature", "response_format"} - {refused}
    wanted |= {"max_completion_tokens"} if refused == "max_tokens" else set()
    assert picky.bodies[-1].keys() == wanted, "nothing else is"


async def test_a_model_that_takes_nothing_of_all_that_is_asked_still() -> None:
    picky = Picky({name: all_[0] for name, all_ in REFUSALS.items()})
    async with asking(picky) as endpoint:
        assert await endpoint.answers(ASKED, 3) == ["\\boxed{1}"] * 3
    assert picky.bodies[-1].keys() == {"model", "messages", "max_completion_tokens"}
    assert len(picky.bodies) == 4 + 3, "four refusals, and one request for each answer"


async def test_what_a_user_said_teaches_nothing_of_the_endpoint() -> None:
    """A filter's refusal may quote a text that speaks of temperature."""
    picky = Picky({"messages": error("not allowed: what temperature has the sea, and max_tokens?")})
    async with asking(picky) as endpoint:
        with pytest.raises(JudgeError, match=r"refuses \(HTTP 400\)$"):
            await endpoint.answers(ASKED, 3)
        picky.refuses.clear()
        assert len(await endpoint.answers(ASKED, 3)) == 3
    assert {"temperature", "max_tokens", "n", "response_format"} <= picky.bodies[-1].keys()


async def test_an_answer_by_the_schema_is_asked_for_and_read() -> None:
    said = json.dumps({"reasoning": "They want it otherwise.", "rating": -1, "hint": ""})
    picky = Picky(says=(said, "stop"))
    async with asking(picky) as endpoint:
        judge = Judge(endpoint, JudgeSettings(), hint_candidates=0)
        judgement = await judge.judge("ask", "reply", STATE)
    assert judgement.verdict.votes == (-1, -1, -1)
    asked = picky.bodies[0]["response_format"]
    assert asked["type"] == "json_schema"
    assert asked["json_schema"]["schema"] == dict(SCHEMA)
    assert asked["json_schema"]["strict"] is True


async def test_an_answer_that_was_cut_casts_no_vote() -> None:
    picky = Picky(says=("It may be \\boxed{1}", "length"))
    async with asking(picky) as endpoint:
        judge = Judge(endpoint, JudgeSettings(), hint_candidates=0)
        judgement = await judge.judge("ask", "reply", STATE)
    assert judgement.verdict.votes == (None, None, None)
    assert judgement.unread == f"It may be \\boxed{{1}}{CUT}", "and the ledger says why"


def test_an_address_may_be_a_base_or_a_whole_one() -> None:
    for url in ("http://j/v1", "http://j/v1/", "http://j/v1/chat/completions"):
        assert address_of(url) == "http://j/v1/chat/completions"
    assert address_of("http://j/d?version=2") == "http://j/d/chat/completions?version=2"


async def test_further_headers_are_sent_and_may_replace_the_key() -> None:
    picky = Picky()
    settings = JudgeSettings(
        judge_api_key=SecretStr("one"),
        headers={"X-Org": SecretStr("us"), "authorization": SecretStr("Key two")},
    )
    async with asking(picky, settings=settings) as endpoint:
        await endpoint.answers(ASKED, 1)
    assert picky.headers[0]["x-org"] == "us"
    assert picky.headers[0]["authorization"] == "Key two"


async def test_no_error_shows_a_key_in_an_address() -> None:
    retries = replace(RETRIES, attempts=1)
    url = f"http://me:sesame@127.0.0.1:{free_port()}/v1?key=sesame"
    async with HttpEndpoint(url, JudgeSettings(), retries=retries) as endpoint:
        with pytest.raises(
            SilentJudgeError, match=r"http://127.*/v1/chat/completions does"
        ) as said:
            await endpoint.answers(ASKED, 1)
    assert "sesame" not in str(said.value)


# A second judge


class Told(Says):
    """An endpoint that always gives the same answer, or fails in one way."""

    def __init__(self, *says: str, fails: Exception | None = None) -> None:
        super().__init__()
        self.says, self.fails = says, fails

    async def answers(self, messages: Any, n: int) -> list[str]:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        return [*self.says][:n]


GOOD, BAD = ("\\boxed{1}",) * 3, ("\\boxed{-1}",) * 3


@pytest.mark.parametrize("failure", [SilentJudgeError("silent"), OutageError("away")])
async def test_a_fallback_judges_while_the_first_does_not_answer(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Told(*GOOD, fails=failure), Told(*BAD)
    judge = Judge(first, JudgeSettings(), hint_candidates=1, second=Second(second, "fallback", 1.0))
    judgement = await judge.judge("a", "b", STATE)
    assert (judgement.verdict.value, judgement.by_second) == (-1, True)
    assert len(judgement.hint_answers) == 3
    first.fails, before = None, first.asked
    assert (await judge.judge("a", "b", STATE)).by_second, "the first rests for a while"
    assert first.asked == before
    monkeypatch.setattr(judge, "_rests_until", 0.0)
    judgement = await judge.judge("a", "b", STATE)
    assert (judgement.verdict.value, judgement.by_second) == (1, False)
    assert judges.REST_S > 1


async def test_a_turn_that_the_first_refuses_does_not_make_it_rest() -> None:
    first, second = Told(*GOOD, fails=JudgeError("refuses")), Told(*BAD)
    judge = Judge(first, JudgeSettings(), hint_candidates=0, second=Second(second, "fallback", 1.0))
    assert (await judge.judge("a", "b", STATE)).by_second
    first.fails = None
    assert not (await judge.judge("a", "b", STATE)).by_second
    second.fails = first.fails = JudgeError("refuses, too")
    with pytest.raises(JudgeError, match="refuses, too"):
        await judge.judge("a", "b", STATE)


async def test_an_auditor_is_asked_about_a_share_and_decides_nothing() -> None:
    auditor = Told(*BAD)
    draws = iter([0.1, 0.3, 0.05, 0.15])
    judge = Judge(
        Told(*GOOD),
        JudgeSettings(),
        hint_candidates=1,
        second=Second(auditor, "auditor", 0.2),
        draw=lambda: next(draws),
    )
    judged = [await judge.judge("a", "b", STATE) for _ in range(3)]
    assert [one.audit.value for one in judged] == [-1, None, -1]
    assert {one.verdict.value for one in judged} == {1}
    assert auditor.asked == 2, "and of hints, it is not asked"
    auditor.fails = JudgeError("away")
    unaudited = await judge.judge("a", "b", STATE)
    assert (unaudited.verdict.value, unaudited.audit.votes) == (1, ())


async def test_the_ledger_keeps_who_judged_by_which_prompt_and_what_the_auditor_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with world(tmp_path, judge_waits=SHORT, batch_size=99) as w:
        judge = w.judging._judge
        judge._auditor = Second(Told(*BAD), "auditor", 1.0)
        disputed, agreed = w.turn("YES"), w.turn("NO")
        await w.settled()
        judge._endpoint, judge._fallback = Told(fails=JudgeError("no")), Told(*GOOD)
        judge._auditor = None
        other = w.turn("YES")
        await w.settled()
        rows = w.ledger._db.rows(
            "SELECT turn_id, value, prompt, by_second, audit FROM verdicts ORDER BY turn_id"
        )
        version = INCLUDED.version
        assert [tuple(row) for row in rows] == [
            (disputed, 1, version, 0, -1),
            (agreed, -1, version, 0, -1),
            (other, 1, version, 1, None),
        ]
        audits = w.ledger._db.rows("SELECT answer FROM votes WHERE about = 'audit'")
        assert len(audits) == 6
    assert main.main(["explain", str(disputed), "--data-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "The auditor's verdict is -1." in said
    assert main.main(["explain", str(other), "--data-dir", str(tmp_path)]) == 0
    assert "The fallback judge voted +1, +1, +1" in capsys.readouterr().out


@pytest.mark.slow
def test_product_judges_by_the_fallback_of_its_settings_file(tmp_path: Path) -> None:
    data, file = tmp_path / "data", tmp_path / "s.toml"
    with bad_judge_beside() as judge:
        url = f"http://127.0.0.1:{free_port()}/v1"
        file.write_text(
            f"[judge]\njudge_url = '{url}'\n[judge.second]\nurl = '{judge.url}'\n"
            "[judge.second.headers]\nX-Key = 'sesame'\n"
        )
        with product(data, "--config", str(file), "--batch-size", "99") as running:
            first = {"role": "user", "content": "How many are 2 and 3?"}
            reply = {"role": "assistant", "content": ask(running, "s", [first])}
            ask(running, "s", [first, reply, {"role": "user", "content": "Thanks, perfect."}])
            until(lambda: rows(data, "SELECT value, by_second FROM verdicts") == [(1, 1)])
            assert running.stop() == 0
    told = running.events()
    assert "judge.second" in [event["event"] for event in told]
    assert "sesame" not in json.dumps(told)


# Prompts by file


def test_prompts_of_a_file_are_asked_inside_the_same_fences(tmp_path: Path) -> None:
    file = tmp_path / "prompts.toml"
    file.write_text('verdict = """\nBewerte die Antwort.\n"""\n')
    prompts = Prompts.read(file)
    system = verdict_messages("a", "b", STATE, prompts)[0]["content"]
    ours = verdict_messages("a", "b", STATE)[0]["content"]
    assert system.startswith("Bewerte die Antwort.\n\nThink in a few sentences.")
    assert "drawn at\nrandom for this question" in system
    assert prompts.hint == INCLUDED.hint
    assert prompts.version != INCLUDED.version
    assert ours.startswith(INCLUDED.verdict)
    file.write_text(f'verdict = """{INCLUDED.verdict}"""\nhint = """{INCLUDED.hint}"""\n')
    assert Prompts.read(file).version == INCLUDED.version, "what is asked alike has one version"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("verdict = 1", "verdict: Input should be a valid string"),
        ("hint = ' '", "hint: String should have at least 1 character"),
        ("judge = 'x'", "judge: Extra inputs are not permitted"),
        ("verdict = ", "is not valid TOML"),
        (None, "cannot be read"),
    ],
)
def test_prompts_that_cannot_be_asked_are_refused(
    tmp_path: Path, text: str | None, says: str
) -> None:
    file = tmp_path / "prompts.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"--judge-prompts .*{says}"):
        Prompts.read(file)


# Settings


def loaded(tmp_path: Path, text: str) -> JudgeSettings:
    file = tmp_path / "s.toml"
    file.write_text(text)
    return load(["--config", str(file)]).judge


def test_tables_of_the_file_describe_endpoints_and_show_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_CLAW_JUDGE__SECOND__API_KEY", "sesame")
    monkeypatch.setenv("TINKER_CLAW_JUDGE__HEADERS", '{"X-Team": "hunter3"}')
    settings = loaded(
        tmp_path,
        "[judge]\njudge_url = 'http://j/v1'\nprm_m = 5\n[judge.headers]\nX-Org = 'hunter2'\n"
        "[judge.second]\nurl = 'http://k/v1'\nrole = 'auditor'\nshare = 0.1\nmodel = 'big'\n",
    )
    assert {name: value.get_secret_value() for name, value in settings.headers.items()} == {
        "X-Org": "hunter2",
        "X-Team": "hunter3",
    }
    assert isinstance(settings.second, SecondJudge)
    second = settings.second.beside(settings)
    assert (second.asked_model, second.prm_m) == ("big", 5)
    assert second.judge_api_key is not None
    assert second.judge_api_key.get_secret_value() == "sesame"
    assert second.headers == {}
    for text in (repr(settings), str(settings), settings.model_dump_json(), repr(second)):
        assert not any(secret in text for secret in ("sesame", "hunter"))


def test_the_pages_files_work(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "judges.md").read_text()
    prompts, settings = (block.split("```")[0] for block in page.split("```toml\n")[1:])
    file = tmp_path / "prompts.toml"
    file.write_text(prompts)
    assert Prompts.read(file).verdict.startswith("Du bewertest")
    told = loaded(tmp_path, settings.replace("\u2026", "x"))
    assert told.headers["X-Project"].get_secret_value() == "x"
    assert told.second is not None
    assert (told.second.role, told.second.share) == ("auditor", 0.05)


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
        ("[judge.second]\nurl = 'k/v1'\n", "is no address"),
        ("[judge.second]\nrole = 'auditor'\n", r"judge\.second\.url"),
        ("[judge.second]\nurl = 'http://k'\nshare = 0\n", r"judge\.second\.share"),
        ("[judge.second]\nurl = 'http://k'\nrole = 'boss'\n", r"judge\.second\.role"),
        ("[judge.second]\nurl = 'http://k'\n[judge.second.headers]\na = ''\n", "value of a"),
    ],
)
def test_tables_that_cannot_be_meant_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        loaded(tmp_path, text)
    assert "secret" not in str(raised.value)


def test_a_table_in_the_environment_must_be_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_CLAW_JUDGE__HEADERS", "{hunter2")
    with pytest.raises(ConfigError, match="must be a JSON object") as raised:
        load([])
    assert "hunter2" not in str(raised.value)


async def test_no_proxy_reads_what_a_judge_on_this_machine_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    async with asking(Picky()) as endpoint:
        assert len(await endpoint.answers(ASKED, 1)) == 1


def test_doctor_asks_both_judges_and_reads_the_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def checked() -> str:
        first, second = Picky(), Picky()
        async with in_background(first.app()) as url, in_background(second.app()) as other:
            file, prompts = tmp_path / "s.toml", tmp_path / "p.toml"
            prompts.write_text("verdict = 'Rate it.'")
            file.write_text(f"[judge.second]\nurl = '{other}'\nrole = 'auditor'\n")
            flags = ["--model-name", "demo", "--backend", "local", "--judge-url", url, "--port"]
            flags += ["0", "--data-dir", str(tmp_path / "data"), "--judge-prompts", str(prompts)]
            await asyncio.to_thread(main.main, ["doctor", "--config", str(file), *flags])
            assert len(first.bodies) == len(second.bodies) == 1
            return f"{url} answers; {other} answers as the auditor"

    said = asyncio.run(checked())
    assert said in " ".join(capsys.readouterr().out.split())
