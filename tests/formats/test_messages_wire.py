"""Anthropic's Messages: what is accepted, what it comes to, which field a refusal names, and that
what goes back is what Anthropic's own types know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, get_type_hints

import pytest
from anthropic.types import (
    Message,
    MessageCountTokensParams,
    RawMessageStreamEvent,
    ToolParam,
)
from anthropic.types.beta import message_create_params as beta
from anthropic.types.message_create_params import (
    MessageCreateParamsNonStreaming,
    MessageCreateParamsStreaming,
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
from tinker_claw.formats.messages import _TOOL, FIELDS, Messages
from tinker_claw.images import parts_of
from tinker_claw.types import Delta, Reply

TURN, COUNT, *_ = Messages.routes
USER = {"role": "user", "content": "hi"}
HINT = {"type": "ephemeral"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "x"}
USE = {"type": "tool_use", "id": "c1", "name": "ls", "input": {"path": "ü"}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "a b"}
TOOL = {"name": "ls", "description": "d", "input_schema": {"type": "object"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path":"ü"}'}}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text} | more


def by(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def parse(route: Any = TURN, **fields: Any) -> GenerationRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [USER]} | fields
    found = Messages().parse(json.dumps(body).encode(), route, "ann")
    return replace(found, own={"thinking": found.own["thinking"]})  # without what it remembers


def test_every_field_of_the_anthropic_client_is_in_one_table() -> None:
    """A new release of the client with a new field fails here until we have decided."""
    theirs = set(get_type_hints(MessageCreateParamsStreaming))
    theirs |= set(get_type_hints(MessageCreateParamsNonStreaming))
    theirs |= set(get_type_hints(MessageCountTokensParams))
    theirs |= set(get_type_hints(beta.MessageCreateParamsStreaming)) - {"betas"}  # a header
    assert_each_in_one_table(theirs, FIELDS)
    assert_each_in_one_table(set(get_type_hints(ToolParam)), _TOOL)


ASKED: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({}, [USER]),
    ({"system": "Be brief."}, [{"role": "system", "content": "Be brief."}, USER]),
    (
        {"system": [said("A", cache_control=HINT), said("B")]},
        [{"role": "system", "content": "A\n\nB"}, USER],
    ),
    (  # Claude Code's, another one in every request
        {
            "system": [
                said("x-anthropic-billing-header: cc_version=2.1.330.a1b; cch=36ee5;"),
                said("A"),
            ]
        },
        [{"role": "system", "content": "A"}, USER],
    ),
    (
        {"system": "x-anthropic-billing-header: cch=0aaa9;\nA"},
        [{"role": "system", "content": "A"}, USER],
    ),
    (
        {"messages": [by("user", said("a"), said("b")), by("assistant", said("c")), USER]},
        [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}, USER],
    ),
    (
        {
            "messages": [
                USER,
                by("assistant", THOUGHT, said("So"), USE),
                by("user", RESULT, said("and?")),
            ]
        },
        [
            USER,
            {
                "role": "assistant",
                "content": "So",
                "tool_calls": [CALL],
                "reasoning_content": "hm",
            },
            {"role": "tool", "tool_call_id": "c1", "content": "a b"},
            {"role": "user", "content": "and?"},
        ],
    ),
    (
        {
            "messages": [
                USER,
                by("assistant", said("So")),
                by("assistant", USE),
                by("user", RESULT | {"content": [said("no")], "is_error": True}),
            ]
        },
        [
            USER,
            {"role": "assistant", "content": "So", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "Error: no"},
        ],
    ),
    (
        {
            "messages": [
                USER,
                by("assistant", {"type": "redacted_thinking", "data": "?"}, said("x")),
                {"role": "system", "content": "New rules."},
                USER,
            ]
        },
        [
            USER,
            {"role": "assistant", "content": "x"},
            {"role": "system", "content": "New rules."},
            USER,
        ],
    ),
]


@pytest.mark.parametrize(("fields", "messages"), ASKED)
def test_messages_become_those_of_a_chat_template(
    fields: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [USER]} | fields
    TypeAdapter(MessageCreateParamsNonStreaming).validate_python(body)
    assert list(parse(**fields).messages) == messages


def test_a_message_knows_its_parts() -> None:
    (message,) = parse(messages=[by("user", said("a"), said("b"))]).messages
    assert [part.text for part in parts_of(message)] == ["a\n", "b"]
    (message,) = parse(messages=[by("user", said("a"))]).messages
    assert [part.text for part in parts_of(message)] == ["a"]


def test_every_honoured_field_is_read() -> None:
    fields: dict[str, Any] = {
        "tools": [TOOL | {"cache_control": HINT, "strict": True}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "stream": True,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 20,
        "stop_sequences": ["a", "b"],
        "thinking": {"type": "enabled", "budget_tokens": 2048},
        "output_config": {"effort": "low"},
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})},
    }
    body = {"model": "m", "max_tokens": 9, "messages": [USER]} | fields
    TypeAdapter(MessageCreateParamsStreaming).validate_python(body)
    function = {"name": "ls", "description": "d", "parameters": TOOL["input_schema"]}
    assert parse(**fields) == GenerationRequest(
        model="m",
        messages=(USER,),
        tools=({"type": "function", "function": function | {"strict": True}},),
        one_call=True,
        stream=True,
        max_tokens=9,
        temperature=0.5,
        top_p=0.5,
        top_k=20,
        stop=("a", "b"),
        reasoning_effort="low",
        effort_at="output_config.effort",
        session=("s", "metadata.user_id"),
        own={"thinking": True},
    )


@pytest.mark.parametrize(
    ("fields", "effort", "shows"),
    [
        ({}, None, False),
        ({"thinking": {"type": "adaptive"}}, None, True),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, None, False),
        ({"thinking": {"type": "disabled"}}, "none", False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "high", True),
        ({"output_config": {"effort": "high"}}, None, False),
        ({"output_config": {"effort": "max"}}, "max", False),
    ],
)
def test_thinking_is_switched_and_shown_as_asked(
    fields: dict[str, Any], effort: str | None, shows: bool
) -> None:
    request = parse(**fields)
    assert (request.reasoning_effort, request.own["thinking"]) == (effort, shows)


@pytest.mark.parametrize(
    ("user", "session"),
    [
        ("ann", None),
        ("{", None),
        ("[]", None),
        ('{"session_id": 5}', None),
        ('{"session_id": "s1"}', "s1"),
        (
            "user_1_account__session_00000000-0000-4000-8000-000000000000",
            "00000000-0000-4000-8000-000000000000",
        ),
    ],
)
def test_a_user_id_names_a_session_only_where_it_says_so(user: str, session: str | None) -> None:
    found = parse(metadata={"user_id": user}).session
    assert found == (None if session is None else (session, "metadata.user_id"))


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_control": HINT, "service_tier": "auto", "speed": "standard", "container": None},
        {"tool_choice": {"type": "auto"}, "tools": [], "stop_sequences": [], "mcp_servers": []},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"messages": [USER | {"id": "m1", "cache_control": HINT}]},
        {"metadata": {"user_id": None}, "thinking": None, "user_profile_id": "u"},
    ],
)
def test_neutral_values_change_nothing(fields: dict[str, Any]) -> None:
    assert parse(**fields) == parse()


def test_a_prompt_is_counted_without_a_limit_for_its_reply() -> None:
    body = {"model": "m", "messages": [USER]}
    TypeAdapter(MessageCountTokensParams).validate_python(body)
    assert parse(COUNT, max_tokens=None).max_tokens is None


VALUES: list[tuple[str, Any]] = [
    ("max_tokens", None),
    ("max_tokens", 0),
    ("model", ""),
    ("n", 1),
    ("logprobs", True),
    ("temperature", 1.5),
    ("stop_sequences", [str(n) for n in range(65)]),
    ("top_k", -2),
    ("mcp_servers", [{"type": "url"}]),
    ("container", "c"),
    ("tool_choice", {"type": "any"}),
    ("messages", []),
]
SERVED = {"type": "web_search_20250305", "name": "web_search"}
"""Tool that the service itself would run."""
INNER: list[tuple[str, dict[str, Any]]] = [
    ("thinking.type", {"thinking": {"type": "between_tools"}}),
    ("thinking.type", {"thinking": {"budget_tokens": 5}}),
    ("thinking.display", {"thinking": {"type": "adaptive", "display": "loud"}}),
    ("output_config.effort", {"output_config": {"effort": "hard"}}),
    ("output_config.format", {"output_config": {"format": {"type": "json_schema"}}}),
    ("context_management.edits[0].type", {"context_management": {"edits": [{}]}}),
    ("metadata.name", {"metadata": {"name": "x"}}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "rm"}}),
    (
        "tool_choice",
        {"tools": [TOOL, SERVED], "tool_choice": {"type": "tool", "name": "web_search"}},
    ),
    ("tool_choice.name", {"tools": [TOOL], "tool_choice": {"type": "tool"}}),
    ("tool_choice.type", {"tools": [TOOL], "tool_choice": {"type": "some"}}),
    (
        "tool_choice",
        {"tools": [TOOL], "tool_choice": {"type": "any"}, "thinking": {"type": "enabled"}},
    ),
    ("tools[0]", {"tools": [SERVED]}),
    ("tools[0].input_schema", {"tools": [{"name": "ls"}]}),
    ("tools[0].name", {"tools": [TOOL | {"name": ""}]}),
    ("tools[1]", {"tools": [TOOL, TOOL | {"input_schema": deep(80)}]}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages[0].content[0].text", {"messages": [by("user", said("x") | {"text": 5})]}),
    ("messages[0].content[0].is_error", {"messages": [by("user", RESULT | {"is_error": 5})]}),
    ("messages[0].content[0].input", {"messages": [by("assistant", USE | {"input": 5}), USER]}),
    ("messages[1].content[0].id", {"messages": [USER, by("assistant", USE | {"id": 5}), USER]}),
    ("system[0]", {"system": [{"type": "image"}]}),
]


# What goes back


def reply(request: GenerationRequest) -> Any:
    return Messages().reply(request, ReplyHead(version=3, prompt_tokens=12, created=0))


def finished(finish: Finish = "stop", stop: str | None = None, **of: Any) -> FinishedReply:
    return FinishedReply(Reply(**{"text": "fine"} | of), finish, TokenCounts(12, 7, 5), 3, stop)


events = partial(read_stream, RawMessageStreamEvent, untyped=("ping", "error"))


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        ("stop", None, "end_turn"),
        ("length", None, "max_tokens"),
        ("stop string", "END", "stop_sequence"),
    ],
)
def test_why_a_reply_ended(finish: Finish, stop: str | None, reason: str) -> None:
    done = finished(finish, stop)
    message = Message.model_validate(reply(parse()).whole(done))
    assert (message.stop_reason, message.stop_sequence) == (reason, stop)
    delta = events(reply(parse()).end(done))[-2]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": stop}


def streamed(writer: Any, deltas: Sequence[Delta]) -> list[Any]:
    sent = writer.begin() + b"".join(writer.deltas([delta], 3) for delta in deltas)
    return events(sent + writer.keep_alive() + writer.end(finished()))


def test_thinking_that_nobody_asked_for_is_not_sent() -> None:
    found = streamed(reply(parse()), [Delta("reasoning", "hm"), Delta("text", "So")])
    assert "thinking" not in json.dumps(found)
    message = reply(parse()).whole(finished(reasoning="hm"))
    assert [block["type"] for block in message["content"]] == ["text"]


def test_an_empty_reply_has_an_empty_block() -> None:
    writer = reply(parse())
    assert Message.model_validate(writer.whole(finished(text=""))).content[0].type == "text"
    for thought in ([], [Delta("reasoning", "hm")]):
        found = streamed(reply(parse(thinking={"type": "adaptive"})), thought)
        blocks = [e["content_block"]["type"] for e in found if e["type"] == "content_block_start"]
        assert blocks == ["thinking"] * len(thought) + ["text"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_their_shape(status: int, kind: str) -> None:
    error = RequestError("No.", status=HTTPStatus(status))
    body = {"type": "error", "error": {"type": kind, "message": "No."}}
    assert Messages().error(error) == body
    assert events(reply(parse()).error(error)) == [body]
