"""OpenAI's Responses: what is accepted, what it comes to, which field a refusal names, and that
what goes back is what OpenAI's own types know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, get_type_hints

import pytest
from openai.types.responses import FunctionToolParam, Response, ResponseStreamEvent
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_create_params import (
    ResponseCreateParamsNonStreaming,
    ResponseCreateParamsStreaming,
)
from pydantic import TypeAdapter

from tests.formats.test_chat import assert_each_in_one_table, deep
from tests.formats.typed_items import read_stream
from tinker_claw.errors import RequestError
from tinker_claw.formats.base import (
    Finish,
    FinishedReply,
    GenerationRequest,
    ReplyHead,
    TokenCounts,
)
from tinker_claw.formats.responses import _FUNCTION, FIELDS, Responses
from tinker_claw.types import Delta, Reply, ToolCall

TURN, COUNT = Responses.routes
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "ls", "parameters": {"type": "object"}, "strict": False}
SPACE = {"type": "namespace", "name": "fs", "description": "Files.", "tools": [TOOL]}
CALL = {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "a b"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
    "encrypted_content": None,
}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "So", "annotations": [], "logprobs": []}],
}


def made(name: str = "ls") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": "{}"}}


def part(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def parse(spoken: Responses | None = None, user: str = "ann", **fields: Any) -> GenerationRequest:
    body = json.dumps({"model": "m", "input": "hi"} | fields).encode()
    return (spoken or Responses()).parse(body, TURN, user)


def test_every_field_of_the_openai_client_is_in_one_table() -> None:
    """A new release of the client with a new field fails here until we have decided."""
    theirs = set(get_type_hints(ResponseCreateParamsStreaming))
    theirs |= set(get_type_hints(ResponseCreateParamsNonStreaming))
    theirs |= set(get_type_hints(InputTokenCountParams))
    assert_each_in_one_table(theirs, FIELDS)
    assert_each_in_one_table(set(get_type_hints(FunctionToolParam)), _FUNCTION)


ASKED: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({}, [USER]),
    ({"input": [USER]}, [USER]),
    ({"instructions": "Be brief."}, [{"role": "system", "content": "Be brief."}, USER]),
    (
        {
            "instructions": "A",
            "input": [
                {"type": "message", "role": "developer", "content": [part("B")]},
                {"role": "system", "content": "C"},
                {"type": "message", "role": "user", "content": [part("h"), part("i")]},
                {"role": "developer", "content": "D"},
            ],
        },
        [
            {"role": "system", "content": "A\n\nB\n\nC"},
            {"role": "user", "content": "h\ni"},
            {"role": "system", "content": "D"},
        ],
    ),
    (
        {"input": [USER, THOUGHT, SAID, CALL, CALL | {"call_id": "c2"}, RESULT, USER]},
        [
            USER,
            {
                "role": "assistant",
                "content": "So",
                "tool_calls": [made(), made() | {"id": "c2"}],
                "reasoning_content": "hm",
            },
            {"role": "tool", "tool_call_id": "c1", "content": "a b"},
            USER,
        ],
    ),
    (
        {"input": [USER, SAID, THOUGHT, CALL | {"namespace": "fs"}, RESULT]},
        [
            USER,
            {"role": "assistant", "content": "So"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [made("fs__ls")],
                "reasoning_content": "hm",
            },
            {"role": "tool", "tool_call_id": "c1", "content": "a b"},
        ],
    ),
    (
        {
            "input": [
                {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
                {"role": "assistant", "content": "yes"},
                RESULT | {"output": [part("a"), part("b")]},
            ]
        },
        [
            {"role": "assistant", "content": "yes"},
            {"role": "tool", "tool_call_id": "c1", "content": "a\nb"},
        ],
    ),
]


@pytest.mark.parametrize(("fields", "messages"), ASKED)
def test_items_become_the_messages_of_a_chat_template(
    fields: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    TypeAdapter(ResponseCreateParamsNonStreaming).validate_python(
        {"model": "m", "input": "hi"} | fields
    )
    assert list(parse(**fields).messages) == messages


def test_every_honoured_field_is_read() -> None:
    fields: dict[str, Any] = {
        "tools": [TOOL, SPACE],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "stream": True,
        "max_output_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.5,
        "reasoning": {"effort": "low", "summary": "auto"},
        "prompt_cache_key": "k",
        "metadata": {"a": "b"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
    }
    body = {"model": "m", "input": "hi"} | fields
    TypeAdapter(ResponseCreateParamsStreaming).validate_python(body)
    request = parse(**fields)
    function = {"name": "ls", "parameters": {"type": "object"}, "strict": False}
    assert request == GenerationRequest(
        model="m",
        messages=(USER,),
        tools=(
            {"type": "function", "function": function},
            {"type": "function", "function": function | {"name": "fs__ls"}},
        ),
        one_call=True,
        stream=True,
        max_tokens=9,
        temperature=0.5,
        top_p=0.5,
        reasoning_effort="low",
        effort_at="reasoning.effort",
        session=("k", "prompt_cache_key"),
        own=request.own,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "service_tier": "auto", "client_metadata": {"a": "b"}, "background": False},
        {"truncation": "disabled", "text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"tools": [], "include": [], "stream_options": {"include_obfuscation": False}},
        {"top_logprobs": 0, "conversation": None, "prompt_cache_retention": "24h"},
        {"reasoning": {"summary": "detailed"}, "metadata": {"a": "b"}, "instructions": ""},
    ],
)
def test_neutral_values_change_nothing(fields: dict[str, Any]) -> None:
    found, plain = parse(**fields), parse()
    assert found.messages == plain.messages
    assert (found.tools, found.reasoning_effort) == ((), None)


VALUES: list[tuple[str, Any]] = [
    ("model", 5),
    ("input", []),
    ("input", None),
    ("n", 1),
    ("background", True),
    ("conversation", "c"),
    ("prompt", {"id": "p"}),
    ("truncation", "auto"),
    ("top_logprobs", 1),
    ("max_tool_calls", 2),
    ("tool_choice", "required"),
    ("previous_response_id", "resp_1"),
]
INNER: list[tuple[str, dict[str, Any]]] = [
    ("include[0]", {"include": ["message.output_text.logprobs"]}),
    ("text.format", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}),
    ("reasoning.effort", {"reasoning": {"effort": "hard"}}),
    ("reasoning.mode", {"reasoning": {"mode": "pro"}}),
    ("stream_options.include_obfuscation", {"stream_options": {"include_obfuscation": True}}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "rm"}}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "web_search"}}),
    (
        "tool_choice.tools[0]",
        {
            "tools": [TOOL],
            "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "rm"}]},
        },
    ),
    ("tools[0]", {"tools": [{"type": "custom", "name": "patch"}]}),
    ("tools[0].name", {"tools": [TOOL | {"name": ""}]}),
    ("tools[0]", {"tools": [SPACE | {"tools": [{"type": "custom"}]}]}),
    ("tools[0].tools[0].type", {"tools": [SPACE | {"tools": [{}]}]}),
    ("tools[1]", {"tools": [TOOL, TOOL | {"parameters": deep(80)}]}),
    ("context_management[0].type", {"context_management": [{}]}),
    ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
    ("input[0].content", {"input": [{"role": "user", "content": 5}]}),
    ("input[0].output", {"input": [RESULT | {"output": 5}]}),
    ("input[0].call_id", {"input": [CALL | {"call_id": 5}]}),
    ("input[0].type", {"input": [{"type": 5}]}),
]


# What goes back


def reply(request: GenerationRequest, spoken: Responses | None = None) -> Any:
    return (spoken or Responses()).reply(request, ReplyHead(version=3, prompt_tokens=12, created=0))


def finished(finish: Finish = "stop", **of: Any) -> FinishedReply:
    return FinishedReply(Reply(**{"text": "fine"} | of), finish, TokenCounts(12, 7, 5), 3)


events = partial(read_stream, ResponseStreamEvent)
LS = ToolCall("c1", "fs__ls", "{}")


def test_a_whole_reply_is_their_response() -> None:
    writer = reply(parse(tools=[TOOL, SPACE], instructions="Be brief.", metadata={"a": "b"}))
    done = finished("calls", text="So", reasoning="hm", tool_calls=(LS,))
    response = Response.model_validate(writer.whole(done))
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    called: Any = response.output[2]
    assert (called.name, called.namespace, called.call_id) == ("ls", "fs", "c1")
    assert (response.id, response.status, response.output_text) == (writer.id, "completed", "So")
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 5
    assert response.usage.total_tokens == 19


@pytest.mark.parametrize(("finish", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_a_reply_that_was_cut_is_incomplete(finish: Finish, status: str) -> None:
    response = Response.model_validate(reply(parse()).whole(finished(finish)))
    assert response.status == status
    assert (response.incomplete_details is None) == (status == "completed")
    assert events(reply(parse()).end(finished(finish)))[-1]["type"] == f"response.{status}"


def streamed(writer: Any, deltas: Sequence[Delta], done: FinishedReply) -> list[Any]:
    sent = writer.begin() + b"".join(writer.deltas([delta], 3) for delta in deltas)
    return events(sent + writer.keep_alive() + writer.end(done))


def test_a_stream_ends_with_the_reply_that_it_was() -> None:
    pieces = [
        Delta("reasoning", "h"),
        Delta("reasoning", "m"),
        Delta("text", "So\n"),
        Delta("text", '"it" is'),
        Delta("tool_call", call=LS),
        Delta("tool_call", call=LS),
    ]
    done = finished("calls", text='So\n"it" is', reasoning="hm", tool_calls=(LS, LS))
    request = parse(tools=[SPACE])
    found = streamed(reply(request), pieces, done)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    last = found[-1]["response"]
    items = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert last["output"] == items
    whole = reply(request).whole(done)
    for one, other in zip(last["output"], whole["output"], strict=True):
        assert {**one, "id": ""} == {**other, "id": ""}
    assert last["usage"] == whole["usage"]
    indices = [e["output_index"] for e in found if e["type"] == "response.output_item.added"]
    assert indices == [0, 1, 2, 3]


def test_an_empty_reply_has_an_empty_message() -> None:
    done = finished(text="")
    (item,) = streamed(reply(parse()), [], done)[-1]["response"]["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")
    thought = streamed(reply(parse()), [Delta("reasoning", "hm")], done)[-1]["response"]["output"]
    assert [item["type"] for item in thought] == ["reasoning", "message"]


def test_a_reply_that_breaks_off_has_failed() -> None:
    writer = reply(parse())
    error = RequestError("It is away.", status=HTTPStatus.SERVICE_UNAVAILABLE)
    *_, last = events(writer.deltas([Delta("text", "a")], 3) + writer.error(error))
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "It is away."}
