"""The client of vLLM over HTTP: requests, answers (captured from a real 0.32) and refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from local_gpu.sample.http import Busy, Deadlines
from local_gpu.sample.vllm import VllmServer, connect
from tinker_claw.errors import (
    BackendError,
    ClawError,
    ConfigError,
    ContextLengthError,
    OutageError,
    RequestError,
    SamplerError,
)
from tinker_claw.formats.chat import Chat
from tinker_claw.types import Completion, PlacedImage, SamplingParams, StopReason, TokenChunk

FOLDER = Path("/adapters/v1")
PROMPT = (1, 2, 3, 4, 5)
GENERATE = "/inference/v1/generate"
BASE = {"id": "base", "owned_by": "vllm", "parent": None, "max_model_len": 2048}
ADAPTER = {"id": "v1", "owned_by": "vllm", "parent": "base", "max_model_len": None}


@dataclass
class Reply:
    """Answer of a path."""

    status: int = 200
    pieces: Sequence[bytes] = ()
    then: str = "end"
    """End of the answer. end, cut: the connection breaks. hang: nothing more comes."""


def said(body: object, status: int = 200) -> Reply:
    return Reply(status, [json.dumps(body).encode()])


def streamed(*events: object, then: str = "end") -> Reply:
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    return Reply(pieces=[*lines, b"data: [DONE]\n\n"] if then == "end" else lines, then=then)


def error(status: int, message: str, **more: object) -> dict[str, object]:
    return {"error": {"message": message, "type": "Error", "param": None, "code": status} | more}


@dataclass
class Scripted:
    """A server that gives scripted answers, and keeps the requests."""

    url: str = ""
    replies: dict[str, Reply] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    key: str | None = None
    """Key that it wants; None: it needs none."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        path = head.split()[1]
        length = head.partition("content-length: ")[2].partition("\r\n")[0]
        body = json.loads(await reader.readexactly(int(length))) if length else None
        self.asked.append((path, body))
        reply = self.replies.get(path, said({"detail": "Not Found"}, 404))
        if self.key is not None and f"authorization: bearer {self.key}\r\n" not in head:
            reply = said({"error": "Unauthorized"}, 401)
        writer.write(b"HTTP/1.1 %d X\r\nConnection: close\r\n" % reply.status)
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        for piece in reply.pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        if reply.then == "hang":
            await reader.read()
            self.hung_up.set()
        elif reply.then == "end":
            writer.write(b"0\r\n\r\n")
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def scripted() -> AsyncIterator[Scripted]:
    script = Scripted()
    script.replies = {
        "/health": Reply(),
        "/v1/models": said({"object": "list", "data": [BASE, ADAPTER]}),
    }
    listening = await asyncio.start_server(script.handle, "127.0.0.1", 0)
    async with listening:
        script.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield script


@pytest.fixture
async def script() -> AsyncIterator[Scripted]:
    async with scripted() as script:
        yield script


@pytest.fixture
async def vllm(script: Scripted) -> AsyncIterator[VllmServer]:
    async with aclosing(VllmServer(script.url)) as server:
        yield server


async def drained(
    server: VllmServer, params: SamplingParams, name: str | None = "v1"
) -> list[TokenChunk]:
    async with aclosing(server.stream(name, PROMPT, params)) as stream:
        return [chunk async for chunk in stream]


def choice(
    token: int, logprob: float, *others: tuple[int, float], index: int = 0, ends: str | None = None
) -> dict[str, Any]:
    """One event's choice, as a real server sent it: the sampled token, then the likeliest."""
    row = {f"token_id:{id}": value for id, value in [(token, logprob), *others]}
    return {
        "index": index,
        "text": "",
        "logprobs": {
            "text_offset": [0],
            "token_logprobs": [logprob],
            "tokens": [f"token_id:{token}"],
            "top_logprobs": [row],
        },
        "finish_reason": ends,
        "stop_reason": None,
        "prompt_token_ids": list(PROMPT),
        "token_ids": [token],
    }


def event(*choices: dict[str, Any]) -> dict[str, Any]:
    return {"id": "cmpl-8", "object": "text_completion", "model": "v1", "choices": list(choices)}


USAGE = event() | {
    "usage": {
        "prompt_tokens": 5,
        "total_tokens": 8,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
}
THREE = [
    event(choice(23, -4.167773246765137, (43, -0.798015296459198), (48, -2.1915013790130615))),
    event(choice(43, -1.135514736175537, (51, -2.081542730331421))),
    event(
        choice(43, -2.6241066455841064, (48, -1.0673866271972656), (9, -2.03), ends="length"),
    ),
    USAGE,
]
PARAMS = SamplingParams(max_tokens=3, seed=5, student_topk=2)


async def test_vllm_is_told_every_setting_and_its_tokens_come_one_by_one(
    script: Scripted, vllm: VllmServer
) -> None:
    script.replies["/v1/completions"] = streamed(*THREE)
    shape = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
    params = replace(PARAMS, **shape, stop_tokens=(7, 8), cache_salt="anna's", person=True)
    chunks = await drained(vllm, params)
    assert [chunk.tokens for chunk in chunks] == [(23,), (43,), (43,)]
    assert [chunk.logprobs for chunk in chunks] == [
        (-4.167773246765137,),
        (-1.135514736175537,),
        (-2.6241066455841064,),
    ]
    assert [chunk.topk_ids for chunk in chunks] == [((43, 48),), ((43, 51),), ((48, 9),)]
    assert chunks[0].topk_logprobs == ((-0.798015296459198, -2.1915013790130615),)
    assert chunks[1].topk_logprobs == ((-1.135514736175537, -2.081542730331421),)
    assert [chunk.stop_reason for chunk in chunks] == [None, None, StopReason.LENGTH]
    assert [chunk.cached_tokens for chunk in chunks] == [0, 0, 4]
    assert [path for path, _ in script.asked] == ["/health", "/v1/models", "/v1/completions"]
    assert script.asked[-1][1] == {
        "model": "v1",
        "prompt": list(PROMPT),
        "n": 1,
        "max_tokens": 3,
        "min_tokens": 0,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 5,
        "ignore_eos": True,
        "stop_token_ids": [7, 8],
        "logprobs": 2,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "anna's",
        "priority": 0,
    }


async def test_vllm_is_asked_for_the_base_by_its_own_name_and_all_tokens_by_0(
    script: Scripted, vllm: VllmServer
) -> None:
    script.replies["/v1/completions"] = streamed(*THREE)
    await drained(vllm, SamplingParams(max_tokens=3), name=None)
    body = script.asked[-1][1]
    assert (body["model"], body["top_k"], body["seed"], body["logprobs"]) == ("base", 0, None, 0)
    assert body["priority"] > 0, "nobody sits before it: a person goes first"


async def test_completions_of_one_request_are_told_apart(
    script: Scripted, vllm: VllmServer
) -> None:
    script.replies["/v1/completions"] = streamed(
        event(choice(1, -1.0)),
        event(choice(2, -2.0, index=1), choice(3, -3.0, index=1, ends="stop")),
        event(choice(4, -4.0, ends="length")),
        USAGE,
    )
    params = SamplingParams(max_tokens=2, seed=5, stop_tokens=(3,))
    first, second = await vllm.sample("v1", PROMPT, params, 2)
    assert first == Completion((1, 4), (-1.0, -4.0), (), (), StopReason.LENGTH, params, 4)
    assert (second.tokens, second.stop_reason) == ((2, 3), StopReason.STOP)
    assert second.params.seed == 6
    script.replies["/v1/completions"] = streamed(event(choice(1, -1.0, ends="length")), USAGE)
    greedy = SamplingParams(max_tokens=1, temperature=0)
    first, second = await vllm.sample("v1", PROMPT, greedy, 2)
    assert first == second
    assert script.asked[-1][1]["n"] == 1, "servers refuse to draw the same twice"


async def test_events_may_be_torn_anywhere_and_hold_any_character(
    script: Scripted, vllm: VllmServer
) -> None:
    odd = choice(1, -1.0, ends="length") | {"text": "line\u2028and\u0085next 中"}
    line = "data: " + json.dumps(event(odd), ensure_ascii=False) + "\r\n\r\n"
    whole = f": a comment\n\n{line}data: [DONE]\n\n".encode()
    script.replies["/v1/completions"] = Reply(pieces=[bytes([byte]) for byte in whole])
    [chunk] = await drained(vllm, SamplingParams(max_tokens=1))
    assert chunk.tokens == (1,)


LAST = choice(1, -1.0, (2, -2.0), (3, -3.0), ends="length")


def odd(**changed: Any) -> Reply:
    """The last event, with other values in the choice or its logprobs."""
    inner = {key: changed.pop(key) for key in list(changed) if key in LAST["logprobs"]}
    return streamed(event({**LAST, "logprobs": LAST["logprobs"] | inner} | changed), USAGE)


def likely(logprob: object) -> list[dict[str, object]]:
    return [{"token_id:1": -1.0, "token_id:2": logprob, "token_id:3": -3.0}]


@pytest.mark.parametrize(
    "reply",
    [
        odd(logprobs=None),
        odd(token_ids=[1, 2]),
        odd(token_ids=[2]),
        odd(token_ids=[1.0]),
        streamed(event(choice(2**31, -1.0, (2, -2.0), (3, -3.0), ends="length")), USAGE),
        odd(token_logprobs=[None]),
        odd(token_logprobs=[-9999.0]),
        odd(token_logprobs=[float("nan")]),
        odd(token_logprobs=[10**400]),
        odd(top_logprobs=[]),
        odd(top_logprobs=[{"token_id:1": -1.0}]),
        odd(top_logprobs=[{"the": -1.0, "a": -2.0}]),
        odd(top_logprobs=likely(float("nan"))),
        odd(top_logprobs=likely("-1.0")),
        odd(finish_reason="stop"),
        odd(finish_reason="length", token_ids=[], tokens=[], token_logprobs=[], top_logprobs=[]),
        odd(index=1),
        *(
            Reply(pieces=[b"data: %b\n\n" % sent])
            for sent in (b"{", b"[" * 100_000 + b"]" * 100_000, b"\xff", b"9" * 5000)
        ),
    ],
)
async def test_an_answer_that_does_not_add_up_is_an_error(
    script: Scripted, vllm: VllmServer, reply: Reply
) -> None:
    script.replies["/v1/completions"] = reply
    with pytest.raises(SamplerError, match=script.url):
        await drained(vllm, SamplingParams(max_tokens=1, student_topk=2))


@pytest.mark.parametrize("cached", ["many", -3])
async def test_a_count_of_cached_tokens_costs_no_reply(
    script: Scripted, vllm: VllmServer, cached: object
) -> None:
    usage = event() | {"usage": {"prompt_tokens_details": {"cached_tokens": cached}}}
    script.replies["/v1/completions"] = streamed(event(LAST), usage)
    (chunk,) = await drained(vllm, SamplingParams(max_tokens=1))
    assert type(chunk.cached_tokens) is int
    assert 0 <= chunk.cached_tokens <= len(PROMPT)


@pytest.mark.parametrize(
    "reply",
    [
        streamed(THREE[0], then="cut"),
        streamed(THREE[0]),
        Reply(pieces=[b"data: {"]),
        streamed(THREE[0], error(500, "EngineCore encountered an issue.")),
        streamed(event(choice(1, -1.0, (2, -2.0), ends="abort"))),
        said(error(500, "EngineCore encountered an issue."), 500),
        Reply(503),
        said({"error": "Unauthorized"}, 401),
        Reply(429, [b"slow down"]),
    ],
)
async def test_a_server_that_breaks_off_or_cannot_at_present_is_an_outage(
    script: Scripted, vllm: VllmServer, reply: Reply
) -> None:
    script.replies["/v1/completions"] = reply
    with pytest.raises(OutageError, match=script.url):
        await drained(vllm, PARAMS)


@pytest.mark.parametrize(
    ("deadlines", "events"),
    [
        (Deadlines(first_token_s=0.1), []),
        (Deadlines(between_tokens_s=0.1), THREE[:1]),
        (Deadlines(request_s=0.1), THREE[:1]),
    ],
)
async def test_a_server_that_lets_us_wait_is_an_outage(
    script: Scripted, deadlines: Deadlines, events: list[dict[str, Any]]
) -> None:
    script.replies["/v1/completions"] = streamed(*events, then="hang")
    async with aclosing(VllmServer(script.url, deadlines=deadlines)) as server:
        with pytest.raises(Busy, match="not answered in time"):  # it may be well
            await drained(server, PARAMS)
        async with asyncio.timeout(60):
            await script.hung_up.wait()


async def test_questions_and_loads_have_deadlines_of_their_own(script: Scripted) -> None:
    script.replies["/v1/load_lora_adapter"] = script.replies["/health"] = Reply(then="hang")
    deadlines = Deadlines(answer_s=0.1, load_s=0.1)
    async with aclosing(VllmServer(script.url, deadlines=deadlines)) as server:
        for call in (server.info(), server.load("v1", FOLDER)):
            with pytest.raises(OutageError, match="not answered in time"):
                await call


CONTEXT_ERROR = (
    "This model's maximum context length is 2048 tokens. However, your prompt contains 2100 input "
    "tokens, which exceeds this limit even without any output tokens."
)


@pytest.mark.parametrize(
    ("status", "message", "ours"),
    [
        (404, "The model `v1` does not exist. Valid aliases: base.", OutageError),
        (400, CONTEXT_ERROR, ContextLengthError),
        (400, "Requested sample logprobs of 30, which is greater than max allowed", RequestError),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["at once", "in mid-stream"])
async def test_a_refusal_keeps_the_servers_words(
    script: Scripted,
    vllm: VllmServer,
    status: int,
    message: str,
    ours: type[ClawError],
    late: bool,
) -> None:
    told = error(status, message)
    script.replies["/v1/completions"] = streamed(told) if late else said(told, status)
    with pytest.raises(ours) as raised:
        await drained(vllm, PARAMS)
    assert type(raised.value) is ours
    assert ours is ContextLengthError or message.rstrip(".") in str(raised.value)


ADDED = Reply(pieces=[b"Success: LoRA adapter 'v1' added successfully."])
THERE = said(error(400, "The lora adapter 'v1' has already been loaded."), 400)
UNHEARD = said(error(404, "The lora adapter 'v2' cannot be found."), 404)


@pytest.mark.parametrize("reply", [ADDED, THERE])
async def test_an_adapter_that_is_loaded_is_loaded(
    script: Scripted, vllm: VllmServer, reply: Reply
) -> None:
    script.replies["/v1/load_lora_adapter"] = reply
    await vllm.load("v1", FOLDER)
    body = {"lora_name": "v1", "lora_path": str(FOLDER)}
    assert script.asked[0] == ("/v1/load_lora_adapter", body)
    script.replies["/v1/unload_lora_adapter"] = UNHEARD
    await vllm.unload("v2")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (
            said(error(404, "Loading lora v2 failed: No adapter found for <path>"), 404),
            "No adapter found for <path>. Does it see that folder",
        ),
        (said(error(500, "Call to add_lora method failed: invalid header"), 500), "invalid header"),
        (said({"detail": "Not Found"}, 404), "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ],
)
async def test_an_adapter_that_cannot_be_loaded_is_not_an_outage(
    script: Scripted, vllm: VllmServer, reply: Reply, words: str
) -> None:
    script.replies["/v1/load_lora_adapter"] = reply
    with pytest.raises(BackendError, match=words) as raised:
        await vllm.load("v2", FOLDER)
    assert type(raised.value) is BackendError


async def test_a_sick_server_is_an_outage(script: Scripted, vllm: VllmServer) -> None:
    failed = said(error(500, "EngineCore"), 500)
    script.replies["/v1/load_lora_adapter"] = script.replies["/v1/unload_lora_adapter"] = failed
    script.replies["/health"] = Reply(503)
    for call in (vllm.load("v2", FOLDER), vllm.unload("v1"), vllm.info()):
        with pytest.raises(OutageError, match="503"):
            await call


async def test_a_server_says_what_it_serves(script: Scripted, vllm: VllmServer) -> None:
    info = await vllm.info()
    assert (info.model, info.context_tokens, info.adapters) == ("base", 2048, frozenset({"v1"}))
    endless = json.dumps({"data": [BASE | {"max_model_len": 1e999}]}).encode()
    for body in (b'{"data": []}', b"[" * 100_000, b"[1]", b'{"data": [{"id": 1}]}', endless):
        script.replies["/v1/models"] = Reply(pieces=[body])
        with pytest.raises(SamplerError, match="does not say what it serves"):
            await vllm.info()


# What it is


async def test_one_that_is_away_keeps_no_others_from_starting(script: Scripted) -> None:
    nobody = "http://127.0.0.1:9"
    async with scripted() as other:
        servers = await connect([nobody, f"{script.url}/v1/", other.url])
        assert [server.url for server in servers] == [nobody, script.url, other.url]
        other.replies["/v1/models"] = Reply(404)
        with pytest.raises(ConfigError, match=other.url):
            await connect([script.url, other.url])
    with pytest.raises(OutageError, match="cannot be reached"):
        await connect([nobody])
    for server in servers:
        await server.aclose()


async def test_a_server_that_wants_a_key_gets_it_with_everything(script: Scripted) -> None:
    script.key = "of-the-box"
    with pytest.raises(OutageError, match=r"401.*SAMPLER_API_KEY"):
        await connect([script.url])
    (server,) = await connect([script.url], "of-the-box")
    assert (await server.info()).model == BASE["id"]
    script.replies["/v1/load_lora_adapter"] = Reply()
    await server.load("v1", Path("/adapters/v1"))
    await server.aclose()


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (said({"data": [{"id": "gpt", "owned_by": "me"}]}), "is not vLLM"),
        (Reply(404), "is not vLLM"),
        (said(Chat().models(["demo"], 0)), "a gateway of this project"),
    ],
)
async def test_what_is_not_vllm_is_refused(script: Scripted, reply: Reply, why: str) -> None:
    script.replies["/v1/models"] = reply
    with pytest.raises(ConfigError, match=why):
        await connect([script.url])


async def test_an_address_that_holds_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="SAMPLER_API_KEY") as refused:
        await connect(["http://me:secret@127.0.0.1:1"])
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="http://host:port"):
        await connect(["gpu-box:8000"])


IMAGES = (PlacedImage(2, 3, b"png", "png"), PlacedImage(6, 2, b"jpeg", "jpeg"))
SHOWN = (1, 2, 9, 9, 9, 3, 9, 9, 4)


def generated(token: int, *likeliest: tuple[int, float], ended: str | None = None) -> Any:
    """Event of vLLM 0.32's `/inference/v1/generate`."""
    likely = [{"token_id": t, "logprob": x, "rank": n} for n, (t, x) in enumerate(likeliest, 1)]
    content = {**likely[0], "top_logprobs": likely}
    choice = {"index": 0, "token_ids": [token], "logprobs": {"content": [content]}}
    return {"choices": [{**choice, "finish_reason": ended, "stop_reason": None}], "usage": None}


async def test_vllm_gets_one_token_for_each_image_and_the_image_beside_it(
    script: Scripted, vllm: VllmServer
) -> None:
    first = generated(7, (7, -0.5), (8, -1.0)) | {"prompt_token_ids": list(SHOWN)}
    last = generated(5, (5, -2.0), (6, -0.1), ended="stop")
    params = SamplingParams(max_tokens=4, student_topk=1, stop_tokens=(5,), images=IMAGES)
    script.replies[GENERATE] = streamed(first, last)
    (done,) = await vllm.sample("v1", SHOWN, params, 1)
    path, body = script.asked[-1]
    assert (path, body["model"], body["token_ids"]) == (GENERATE, "v1", [1, 2, 9, 3, 9, 4])
    assert [part["url"] for part in body["content_parts"]] == [
        "data:image/png;base64,cG5n",
        "data:image/jpeg;base64,anBlZw==",
    ]
    assert body["sampling_params"]["logprobs"] == 2  # the sampled one is among them
    assert (done.tokens, done.logprobs) == ((7, 5), (-0.5, -2.0))
    assert done.topk_ids == ((7,), (6,))
    other = generated(7, (7, -0.5), ended="length") | {"prompt_token_ids": [1, 2, 9, 9, 3, 9, 9, 4]}
    script.replies[GENERATE] = streamed(other)
    with pytest.raises(SamplerError, match="an image takes other tokens there"):
        await vllm.sample(None, SHOWN, SamplingParams(max_tokens=1, images=IMAGES), 1)


@pytest.mark.parametrize(
    ("reply", "sees"),
    [
        (said({"prompt_token_ids": [9, 9, 9, 9], "choices": []}), True),
        (said({"prompt_token_ids": [9, 8], "choices": []}), False),
        (said(error(400, "At most 0 image(s) may be provided in one prompt."), 400), False),
    ],
)
async def test_whether_vllm_takes_images_is_tried(
    script: Scripted, vllm: VllmServer, reply: Reply, sees: bool
) -> None:
    script.replies[GENERATE] = reply
    assert await vllm.sees(9) is sees
