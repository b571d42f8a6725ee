"""A wire format that nobody but this file knows is spoken whole: one class is all it takes.

It has what the formats that are still to come need: a key of its own header, a path that others
have too, texts outside of messages, blocks, named events, a count of tokens, and replies that are
gone on from by their names alone.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.support.fakes import UNTIL_TOLD, FakeSampler, Script
from tests.support.gateways import MODEL, World, gateway, spell
from tinker_claw.errors import RequestError
from tinker_claw.formats.base import (
    FinishedReply,
    Format,
    GenerationRequest,
    Json,
    ReplyHead,
    ReplyWriter,
    Route,
)
from tinker_claw.formats.body import load_body
from tinker_claw.formats.chat import Chat
from tinker_claw.render.renderer import Renderer
from tinker_claw.types import Delta, Message, NextState, ToolCall

CALLING = '<think>hm</think>Let me see.\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
TOOLS = [{"name": "ls", "takes": {"type": "object"}}]


class Letters(Format):
    """A format of letters: a heading, and paragraphs by either side."""

    about = "letters: POST /v3/letters"
    routes = (
        Route("POST", "/v3/letters", "turn"),
        Route("POST", "/v3/letters/weigh", "count"),
        Route("GET", "/v1/models", "models"),
    )
    media_type = "text/letters"
    key_place = "X-Stamp"

    def __init__(self) -> None:
        self.sent: dict[tuple[str, str], tuple[Message, ...]] = {}
        """Messages up to each reply that went out, by user and name of the reply."""

    def claims(self, path: str, headers: Any) -> bool:
        return path.startswith("/v3/letters") or "x-letters" in headers

    def keys(self, headers: Any) -> Sequence[str]:
        return (headers.get("x-stamp", ""),)

    def parse(self, body: bytes, route: Route, user: str) -> GenerationRequest:
        fields = load_body(body)
        if "loudness" in fields:
            raise RequestError("loudness is not a field of letters.", param="loudness")
        before: tuple[Message, ...] = ()
        if (name := fields.get("reply_to")) is not None:
            if (user, name) not in self.sent:
                raise RequestError(
                    "There is no such letter.", status=HTTPStatus.NOT_FOUND, param="reply_to"
                )
            before = self.sent[user, name]
        elif "heading" in fields:
            before = ({"role": "system", "content": fields.string("heading")},)
        said = [_message(one) for one in fields.listed("paragraphs", required=True)]
        tools = [
            {"type": "function", "function": {"name": t["name"], "parameters": t["takes"]}}
            for t in fields.get("tools", ())
        ]
        session = (fields["folder"], "folder") if "folder" in fields else None
        return GenerationRequest(
            model=fields.string("to"),
            messages=(*before, *said),
            tools=tuple(tools),
            stream=fields.flag("as_written"),
            stop=tuple(fields.get("until", ())),
            session=session,
            own={"sign": fields.get("sign"), "user": user},
        )

    def reply(self, request: GenerationRequest, head: ReplyHead) -> ReplyWriter:
        return Letter(self, request, head)

    def error(self, error: RequestError) -> Json:
        return {"returned": str(error), "stamp": int(error.status), "about": error.param}

    def counted(self, tokens: int) -> Json:
        return {"weight": tokens}

    def models(self, names: Sequence[str], since: int) -> Json:
        return {"addresses": list(names)}


def _message(raw: Any) -> Message:
    if "result" in raw:
        return {"role": "tool", "tool_call_id": raw["of"], "content": raw["result"]}
    role = {"you": "assistant", "me": "user"}.get(raw["by"], raw["by"])
    message = {"role": role, "content": raw["text"]}
    if "calls" in raw:
        message["tool_calls"] = [
            {
                "id": c["id"],
                "type": "function",
                "function": {"name": c["tool"], "arguments": c["in"]},
            }
            for c in raw["calls"]
        ]
    return message


class Letter:
    """A letter while it is written."""

    def __init__(self, format: Letters, request: GenerationRequest, head: ReplyHead) -> None:
        self.id = f"letter-{uuid4().hex}"
        self._format, self._request, self._head = format, request, head
        self._open: str | None = None

    def whole(self, done: FinishedReply) -> Json:
        self._send(done)
        return {
            "letter": self.id,
            "thought": done.reply.reasoning,
            "text": done.reply.text,
            "calls": [_call(call) for call in done.reply.tool_calls],
            "ends": self._ending(done),
        }

    def begin(self) -> bytes:
        return _event("opened", letter=self.id, read=self._head.prompt_tokens)

    def deltas(self, deltas: Sequence[Delta], version: int) -> bytes:
        return b"".join(self._block(delta) for delta in deltas)

    def keep_alive(self) -> bytes:
        return _event("still_writing")

    def end(self, done: FinishedReply) -> bytes:
        self._send(done)
        return self._shut() + _event("closed", **self._ending(done))

    def error(self, error: RequestError) -> bytes:
        return _event("torn", **self._format.error(error))

    def _block(self, delta: Delta) -> bytes:
        kind = delta.kind
        opening = b"" if self._open == kind else self._shut() + _event("paragraph", kind=kind)
        self._open = kind
        told = _call(delta.call) if delta.call else delta.text
        return opening + _event("line", line=told)

    def _shut(self) -> bytes:
        was, self._open = self._open, None
        return b"" if was is None else _event("paragraph_over", kind=was)

    def _ending(self, done: FinishedReply) -> Json:
        return {
            "because": done.finish,
            "at": done.stop_string,
            "version": done.version,
            "written": done.tokens.completion,
            "signed": self._request.own["sign"],
        }

    def _send(self, done: FinishedReply) -> None:
        calls = [_call(call) for call in done.reply.tool_calls]
        said = _message(
            {"by": "you", "text": done.reply.text} | ({"calls": calls} if calls else {})
        )
        name = (self._request.own["user"], self.id)
        self._format.sent[name] = (*self._request.messages, said)


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "tool": call.name, "in": call.arguments}


def _event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(fields)}\n\n".encode()


@asynccontextmanager
async def letters(
    directory: Path, renderer: Renderer, sampler: FakeSampler | None = None, **options: Any
) -> AsyncIterator[World]:
    formats = (Chat(), Letters())
    async with gateway(directory, renderer, sampler, formats=formats, **options) as world:
        yield world


async def write(world: World, *paragraphs: Json, path: str = "", **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    body = {"to": MODEL, "paragraphs": paragraphs} | fields
    url = world.url.removesuffix("/v1") + "/v3/letters" + path
    return await world.http.post(url, json=body, headers=headers)


def me(text: str) -> Json:
    return {"by": "me", "text": text}


def read(streamed: str) -> list[tuple[str, Any]]:
    blocks = [block.split("\n") for block in streamed.split("\n\n") if block]
    return [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in blocks]


async def test_a_streamed_reply_with_a_call_is_recorded_judged_and_gone_on_from(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with letters(tmp_path, renderer) as world:
        world.say(CALLING)
        asked = {"heading": "You are kind.", "tools": TOOLS, "folder": "f", "as_written": True}
        first = await write(world, me("look"), sign="Ada", **asked)
        assert first.headers["content-type"] == "text/letters; charset=utf-8"
        (turn,) = world.turns()
        (opened, begun), *events, (closed, ending) = read(first.text)
        assert (opened, begun["read"]) == ("opened", len(turn.prompt))
        assert first.headers["x-request-id"] == begun["letter"]
        lines = [told["line"] for name, told in events if name == "line"]
        call = lines.pop()
        assert (call["tool"], call["in"]) == ("ls", "{}")
        assert "".join(lines) == "hmLet me see."
        kinds = [told["kind"] for name, told in events if name == "paragraph"]
        assert kinds == ["reasoning", "text", "tool_call"]
        assert [told["kind"] for name, told in events if name == "paragraph_over"] == kinds
        assert (closed, ending["because"], ending["signed"]) == ("closed", "calls", "Ada")
        assert ending["written"] == len(turn.completion.tokens)

        world.say("Two files.")
        said = {"by": "you", "text": "Let me see.", "calls": [call]}
        second = await write(world, me("look"), said, {"result": "a b", "of": call["id"]}, **asked)
        assert read(second.text)[-1][1]["because"] == "stop"
        third = await write(
            world,
            *(me("look"), said, {"result": "a b", "of": call["id"]}),
            *({"by": "you", "text": "Two files."}, me("and their sizes?")),
            **asked,
        )
        assert third.status_code == 200
        states = [world.next_states()[turn.id] for turn in world.turns()]
        assert states == [
            NextState("tool", "[result 1 of 1, ls]\na b"),
            NextState("user", "and their sizes?"),
            None,
        ]
        assert world.woken == ["judge", "judge"]
        assert len({turn.session_id for turn in world.turns()}) == 1
        assert "session from folder" in world.column("kind_reason")[0]
        one, two, _ = world.turns()
        stream = (*one.prompt, *one.completion.tokens)
        assert two.prompt[: len(stream)] == stream, "no token is rendered again"


async def test_a_whole_reply_says_at_which_stop_string_it_ended(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with letters(tmp_path, renderer) as world:
        world.say("<think>hm</think>One. Two. Three.")
        told = (await write(world, me("count"), until=["Four", " Three"])).json()
        assert (told["thought"], told["text"], told["calls"]) == ("hm", "One. Two.", [])
        assert (told["ends"]["because"], told["ends"]["at"]) == ("stop string", " Three")
        assert "".join(world.column("untrained_because")).startswith("its text was cut at a stop")
        world.say(CALLING)
        told = (await write(world, me("look"), tools=TOOLS)).json()
        assert ([call["tool"] for call in told["calls"]], told["ends"]["because"]) == (
            ["ls"],
            "calls",
        )


async def test_a_reply_is_gone_on_from_by_its_name_by_its_own_user_only(
    tmp_path: Path, renderer: Renderer
) -> None:
    keys = {"ann": "key-of-ann-1234567", "bob": "key-of-bob-1234567"}
    async with letters(tmp_path, renderer, users=keys) as world:
        mine, theirs = ({"x-stamp": key} for key in keys.values())
        first = (await write(world, me("hello"), folder="f", headers=mine)).json()
        again = {"reply_to": first["letter"], "folder": "f"}
        assert (await write(world, me("no!"), **again, headers=theirs)).status_code == 404
        assert (await write(world, me("thanks"), **again, headers=mine)).status_code == 200
        assert list(world.next_states().values()) == [NextState("user", "thanks"), None]


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_are_told_in_its_own_words(
    tmp_path: Path, renderer: Renderer, stream: bool
) -> None:
    sampler = FakeSampler(spell(renderer, "fine"))
    options: dict[str, Any] = {"api_key": "the-right-one-12345", "patience_s": 0}
    async with letters(tmp_path, renderer, sampler, **options) as world:
        sent = {"headers": {"x-stamp": "the-right-one-12345"}, "as_written": stream}
        bearer = {"headers": {"authorization": "Bearer the-right-one-12345"}}
        for wrong in ({}, {"headers": {"x-stamp": "no"}}, bearer):
            told = await write(world, me("hi"), **wrong)
            assert (told.status_code, told.json()["stamp"]) == (401, 401)
            assert told.json()["returned"].endswith("send it as X-Stamp.")
        told = await write(world, me("hi"), loudness=11, **sent)
        assert told.status_code == 400
        assert told.json() == {
            "returned": "loudness is not a field of letters.",
            "stamp": 400,
            "about": "loudness",
        }
        told = await write(world, me("hi"), **sent, path="/nowhere")
        assert told.status_code == 404
        assert told.json()["returned"].startswith("Not Found: POST /v3/letters/nowhere. This is")
        assert "letters: POST /v3/letters" in told.json()["returned"]
        assert (await write(world, me("hi"), **sent, to="gpt")).json()["about"] == "model"

        sampler.away = UNTIL_TOLD
        told = await write(world, me("hi"), **sent)
        if stream:
            name, error = read(told.text)[-1]
            assert (told.status_code, name, error["stamp"]) == (200, "torn", 503)
        else:
            assert (told.status_code, told.headers["retry-after"]) == (503, "30")
            error = told.json()
        assert error["returned"].startswith("The service that runs the model is away")
        assert world.turns() == []


async def test_it_keeps_its_clients_waiting_in_its_own_way(
    tmp_path: Path, renderer: Renderer
) -> None:
    slow = FakeSampler(Script(spell(renderer, "fine"), first_after_s=0.3))
    async with letters(tmp_path, renderer, slow, keepalive_s=0.02) as world:
        told = await write(world, me("hi"), as_written=True)
        assert "still_writing" in [name for name, _ in read(told.text)]


async def test_a_reply_that_breaks_off_is_torn(tmp_path: Path, renderer: Renderer) -> None:
    broken = FakeSampler(Script(spell(renderer, "fine and dandy"), fail_after=2))
    async with letters(tmp_path, renderer, broken) as world:
        told = read((await write(world, me("hi"), as_written=True)).text)
        assert told[-1][0] == "torn"
        assert "closed" not in dict(told)


@pytest.mark.parametrize("failing", ["begin", "deltas", "end", "whole"])
async def test_a_writer_that_fails_is_a_torn_letter_and_loses_no_turn(
    tmp_path: Path, renderer: Renderer, failing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Blotted(Letters):
        def reply(self, request: GenerationRequest, head: ReplyHead) -> ReplyWriter:
            letter = super().reply(request, head)

            def blot(*given: Any) -> Any:
                raise KeyError(request.messages[-1]["content"])

            setattr(letter, failing, blot)
            return letter

    sampler = FakeSampler(Script(spell(renderer, "fine and dandy")))
    async with gateway(tmp_path, renderer, sampler, formats=(Chat(), Blotted())) as world:
        answer = await write(world, me("my secret"), as_written=failing != "whole")
        if failing == "whole":
            assert answer.status_code == 500
            torn = answer.json()
        else:
            name, torn = read(answer.text)[-1]
            assert name == "torn"
        assert torn["returned"] == "The server failed; its log says why."
        logged = capsys.readouterr().out
        assert "test_third_format.py" in logged, "where it failed"
        assert "secret" not in logged, "an error may quote a user's words"
        reasons = {"begin": [], "deltas": ["the reply broke off: KeyError"]}
        assert world.column("untrained_because") == reasons.get(failing, [None])
        assert (await world.ask("still here?")).status_code == 200


async def test_a_role_that_the_chat_template_leaves_out_is_refused(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with letters(tmp_path, renderer) as world:
        for stranger in ({"by": "foo", "text": "hi"}, {"by": "developer", "text": "be kind"}):
            told = await write(world, me("hi"), stranger)
            assert (told.status_code, told.json()["about"]) == (400, "messages[1].role")
            assert repr(stranger["by"]) in told.json()["returned"]
        assert (world.turns(), world.sampler.prompts) == ([], [])


async def test_prompts_are_weighed_and_nothing_is_kept(tmp_path: Path, renderer: Renderer) -> None:
    async with letters(tmp_path, renderer) as world:
        said = {"heading": "You are kind.", "tools": TOOLS}
        weighed = await write(world, me("hi"), **said, path="/weigh")
        assert (world.turns(), world.sampler.prompts) == ([], [])
        assert (await write(world, me("hi"), **said)).status_code == 200
        assert weighed.json() == {"weight": len(world.turns()[0].prompt)}


async def test_a_path_that_two_formats_have_is_told_apart_by_the_client(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with letters(tmp_path, renderer) as world:
        theirs = await world.http.get("/models", headers={"x-letters": "1"})
        assert theirs.json() == {"addresses": [MODEL]}
        assert (await world.http.get("/models")).json()["object"] == "list"
        reply = await world.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
        assert reply.choices[0].message.content == "fine", "the first format is spoken as before"
        unknown = await world.http.post("/embeddings", json={})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_url")
