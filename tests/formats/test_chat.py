"""Chat requests: accepted fields, their effect, and the field that a refusal names."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming,
    CompletionCreateParamsStreaming,
)

from tests.support.chats import parse_chat
from tinker_claw.errors import RequestError
from tinker_claw.formats.base import GenerationRequest
from tinker_claw.formats.body import Fields
from tinker_claw.formats.chat import FIELDS

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "ls", "description": "d", "parameters": {}}}


def assert_each_in_one_table(names: set[str], fields: Fields) -> None:
    assert names <= fields.honoured | fields.ignored | set(fields.neutral)
    assert not fields.honoured & fields.ignored
    assert not (fields.honoured | fields.ignored) & set(fields.neutral)


def parse(**fields: Any) -> GenerationRequest:
    return parse_chat(json.dumps({"model": "m", "messages": [USER]} | fields).encode())


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def test_every_honoured_field_is_read() -> None:
    request = parse(
        tools=[TOOL],
        tool_choice="auto",
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=20,
        seed=-3,
        stop=["a", "b", "a"],
        parallel_tool_calls=False,
        reasoning_effort="low",
        chat_template_kwargs={"enable_thinking": False},
        prompt_cache_key="k",
    )
    assert request == GenerationRequest(
        model="m",
        messages=(USER,),
        tools=(TOOL,),
        stream=True,
        wants_usage=True,
        max_tokens=7,
        temperature=0.0,
        top_p=0.5,
        top_k=20,
        seed=-3,
        stop=("a", "b"),
        one_call=True,
        reasoning_effort="low",
        template={"enable_thinking": False},
        session=("k", "prompt_cache_key"),
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "logprobs": False, "top_logprobs": None, "stop": None, "logit_bias": {}},
        {"stop": [], "presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"response_format": {"type": "text"}, "parallel_tool_calls": True, "top_k": -1},
        {"temperature": None, "max_tokens": None, "tools": None, "seed": None, "stream": None},
        {"reasoning_effort": None, "functions": None, "tools": [], "stream_options": {}},
        {"stop": "", "verbosity": "medium", "modalities": ["text"], "function_call": "auto"},
        {"prediction": {"type": "content", "content": "x"}, "prompt_cache_options": {}},
        {"chat_template_kwargs": {"enable_thinking": None}, "safety_identifier": "s"},
        {"stream_options": {"include_obfuscation": False}, "prompt_cache_retention": "24h"},
    ],
)
def test_neutral_values_change_nothing(fields: dict[str, Any]) -> None:
    assert parse(**fields) == parse()


def test_token_limit_and_stop_in_their_other_forms() -> None:
    assert parse(max_tokens=5, max_completion_tokens=9).max_tokens == 9
    assert parse(stop="\n").stop == ("\n",)


def test_every_field_of_the_openai_client_is_in_one_table() -> None:
    """A new release of the client with a new field fails here until we have decided."""
    theirs = set(get_type_hints(CompletionCreateParamsStreaming))
    theirs |= set(get_type_hints(CompletionCreateParamsNonStreaming))
    assert_each_in_one_table(theirs, FIELDS)


def test_messages_come_out_in_one_shape() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "out"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "c1", "content": "", "name": "ls"},
        {"role": "assistant", "content": "done", "annotations": [], "audio": None},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No!"}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}}],
        },
    ]
    assert parse(messages=messages).messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "out", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "r"},
        {"role": "tool", "content": "", "tool_call_id": "c1", "name": "ls"},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "No!"},
        {"role": "user", "content": "c"},
    )


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [fields]}


def forced(kind: str, **choice: Any) -> dict[str, Any]:
    """Fields of a request that offers a function and a custom tool, and names one."""
    custom = {"type": "custom", "custom": {"name": "patch"}}
    return {"tools": [TOOL, custom], "tool_choice": {"type": kind} | choice}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | fields}


VALUES: list[tuple[str, Any]] = [
    ("model", None),
    ("model", 5),
    ("messages", []),
    ("messages", {"role": "user"}),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_completion_tokens", "9"),
    ("n", 2),
    ("n", True),
    ("temperature", 10**400),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 2**63),
    ("seed", 2**63),
    ("seed", 1.0),
    ("stop", list("abcde")),
    ("stop", "x" * 257),
    ("stop", ["a", ""]),
    ("stop", [7]),
    ("stream", "yes"),
    ("stream_options", True),
    ("tools", {}),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x", "format": "wav"}),
    ("web_search_options", {}),
    ("moderation", {}),
    ("verbosity", "none"),
    ("min_p", 0.1),
    ("response_format", {"type": "json_object"}),
    ("logprobs", True),
    ("top_logprobs", 5),
    ("logit_bias", {"5": 1}),
    ("presence_penalty", 0.5),
    ("frequency_penalty", -1),
    ("parallel_tool_calls", "no"),
    ("reasoning_effort", "hard"),
    ("reasoning_effort", ["low"]),
    ("prompt_cache_key", 7),
    ("chat_template_kwargs", []),
    ("grammar", "root ::= x"),
]
INNER: list[tuple[str, dict[str, Any]]] = [
    ("messages[0]", {"messages": ["hi"]}),
    ("messages[0].role", message(content="x")),
    ("messages[0].role", message(role="robot", content="x")),
    ("messages[0].role", message(role=["user"], content="x")),
    ("messages[0].content", message(role="user", content=5)),
    ("messages[0].content[0].text", message(role="user", content=[{"type": "text", "text": 5}])),
    ("messages[0].refusal", message(role="assistant", content="x", refusal=3)),
    ("messages[0].name", message(role="user", content="x", name=3)),
    ("messages[0].tool_calls", message(role="assistant", tool_calls="x")),
    ("messages[0].tool_calls[0]", message(role="assistant", tool_calls=[3])),
    (
        "messages[0].tool_calls[0].function.name",
        message(role="assistant", tool_calls=[function(name=5)]),
    ),
    (
        "messages[0].tool_calls[0].function.arguments",
        message(role="assistant", tool_calls=[function(arguments=5)]),
    ),
    ("stream_options.every", {"stream_options": {"every": 1}}),
    ("stream_options.include_usage", {"stream_options": {"include_usage": 1}}),
    ("stream_options.include_obfuscation", {"stream_options": {"include_obfuscation": True}}),
    ("chat_template_kwargs.tone", {"chat_template_kwargs": {"tone": ["x"]}}),
    ("tool_choice.allowed_tools.mode", forced("allowed_tools", allowed_tools={"mode": "some"})),
    (
        "tool_choice.allowed_tools.tools[0]",
        forced("allowed_tools", allowed_tools={"tools": [function(name="rm")]}),
    ),
    ("tool_choice", forced("custom", custom={"name": "patch"})),
    ("tool_choice", forced("function", function={"name": "rm"})),
    ("tool_choice.function.name", forced("function")),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "any"}),
    ("tools[0]", {"tools": ["ls"]}),
    ("tools[0]", {"tools": [{"type": "web_search"}]}),
    ("tools[0].function.name", {"tools": [function(name="")]}),
    ("tools[1].function.parameters", {"tools": [TOOL, function(parameters=[])]}),
    ("tools[0].function.description", {"tools": [function(description=1)]}),
    ("tools[0].function.strict", {"tools": [function(strict="yes")]}),
    ("tools[0]", {"tools": [function(parameters=deep(80))]}),
    ("tools[1]", {"tools": [TOOL, TOOL | {"extra": deep(80)}]}),
]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"model": NaN}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"model": "m", "messages": [{"role":"user","content":"x"}], "temperature":1e999}',
        b"\xff\xfe",
        b'{"model": "\xed\xa0\x80"}',
        b'{"model": "m", "messages": [{"role":"user","content":"half \\ud83d"}]}',
        '{"model": "m"}'.encode("utf-16"),
    ],
    ids=lambda body: body[:12].decode("latin-1"),
)
def test_a_body_that_cannot_be_read_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_chat(body)
