"""Requests: what is accepted, what it comes to, and which field a refusal names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tinker_claw.errors import RequestError
from tinker_claw.wire import ChatRequest, parse_chat, sse

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "ls", "description": "d", "parameters": {}}}


def parse(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", "messages": [USER]} | fields).encode())


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def test_a_bare_request_gets_the_defaults() -> None:
    assert parse() == ChatRequest(model="m", messages=(USER,))


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
        chat_template_kwargs={"enable_thinking": False},
        prompt_cache_key="k",
    )
    assert request == ChatRequest(
        model="m",
        messages=(USER,),
        tools=(TOOL,),
        stream=True,
        include_usage=True,
        max_tokens=7,
        temperature=0.0,
        top_p=0.5,
        top_k=20,
        seed=-3,
        enable_thinking=False,
        prompt_cache_key="k",
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
    ],
)
def test_neutral_values_change_nothing(fields: dict[str, Any]) -> None:
    assert parse(**fields) == parse()


def test_the_newer_name_of_the_token_limit_wins() -> None:
    assert parse(max_tokens=5, max_completion_tokens=9).max_tokens == 9


def test_tool_choice_none_hides_the_tools() -> None:
    assert parse(tools=[TOOL], tool_choice="none").tools == ()


def test_messages_come_out_in_one_shape() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "out"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "c1", "content": "", "name": "ls"},
        {"role": "assistant", "content": "done", "annotations": [], "audio": None},
    ]
    assert parse(messages=messages).messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "out", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "r"},
        {"role": "tool", "content": "", "tool_call_id": "c1", "name": "ls"},
        {"role": "assistant", "content": "done"},
    )


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("model", {"model": None}),
    ("model", {"model": 5}),
    ("messages", {"messages": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": {"role": "user"}}),
    ("messages[0]", {"messages": ["hi"]}),
    ("messages[0].role", {"messages": [{"content": "x"}]}),
    ("messages[0].role", {"messages": [{"role": "function", "content": "x"}]}),
    ("messages[0].role", {"messages": [{"role": ["user"], "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": ["x"]}]}),
    (
        "messages[0].content[0].text",
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    ),
    (
        "messages[0].content[1]",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "see"},
                        {"type": "image_url", "image_url": {"url": "data:"}},
                    ],
                }
            ]
        },
    ),
    ("messages[0].content", {"messages": [{"role": "assistant", "content": None}]}),
    ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[0].tool_call_id", {"messages": [USER | {"tool_call_id": "c"}]}),
    ("messages[0].tool_calls", {"messages": [USER | {"tool_calls": [CALL]}]}),
    ("messages[0].tool_calls", {"messages": [{"role": "assistant", "tool_calls": "x"}]}),
    ("messages[0].tool_calls[0]", {"messages": [{"role": "assistant", "tool_calls": [3]}]}),
    (
        "messages[0].tool_calls[0].function",
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
    ),
    (
        "messages[0].tool_calls[0].function.arguments",
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}],
                }
            ]
        },
    ),
    ("messages[0].cache", {"messages": [USER | {"cache": 1}]}),
    ("messages[0].name", {"messages": [USER | {"name": 3}]}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -5}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": True}),
    ("max_completion_tokens", {"max_completion_tokens": "9"}),
    ("n", {"n": 2}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": True}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.01}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": False}),
    ("seed", {"seed": 2**63}),
    ("seed", {"seed": 1.0}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": True}),
    ("stream_options.every", {"stream_options": {"every": 1}}),
    ("stream_options.include_usage", {"stream_options": {"include_usage": 1}}),
    ("tools", {"tools": {}}),
    ("tools[0]", {"tools": ["ls"]}),
    ("tools[0]", {"tools": [{"type": "web_search"}]}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": ""}}]}),
    (
        "tools[1].function.parameters",
        {"tools": [TOOL, {"type": "function", "function": {"name": "f", "parameters": []}}]},
    ),
    (
        "tools[0].function.description",
        {"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
    ),
    (
        "tools[0].function.strict",
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
    ),
    (
        "tools[0].function",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep(80)}}]},
    ),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "required"}),
    (
        "tool_choice",
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "ls"}}},
    ),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("stop", {"stop": ["\n"]}),
    ("logprobs", {"logprobs": True}),
    ("top_logprobs", {"top_logprobs": 5}),
    ("logit_bias", {"logit_bias": {"5": 1}}),
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("frequency_penalty", {"frequency_penalty": -1}),
    ("parallel_tool_calls", {"parallel_tool_calls": False}),
    ("reasoning_effort", {"reasoning_effort": "high"}),
    ("prompt_cache_key", {"prompt_cache_key": 7}),
    ("chat_template_kwargs", {"chat_template_kwargs": []}),
    ("chat_template_kwargs.tone", {"chat_template_kwargs": {"tone": "x"}}),
    (
        "chat_template_kwargs.enable_thinking",
        {"chat_template_kwargs": {"enable_thinking": "no"}},
    ),
    ("grammar", {"grammar": "root ::= x"}),
    ("messages[0].content", {"messages": [{"role": "user", "content": "half \ud83d"}]}),
    ("user", {"user": "\udc00"}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED)
def test_a_refusal_names_the_field(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as raised:
        parse(**fields)
    assert raised.value.param == param
    assert raised.value.status == 400
    assert param in str(raised.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"model": NaN}',
        b'{"temperature": Infinity}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"\xff\xfe",
        b'{"model": "\xed\xa0\x80"}',
        '{"model": "m"}'.encode("utf-16"),
    ],
    ids=lambda body: body[:12].decode("latin-1"),
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_chat(body)


def test_a_number_beyond_floats_is_out_of_range() -> None:
    with pytest.raises(RequestError, match="temperature"):
        parse_chat(
            b'{"model": "m", "messages": [{"role":"user","content":"x"}], "temperature":1e999}'
        )


def test_whole_surrogate_pairs_are_text() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "\U0001f600"}]})
    assert "\\ud83d" in body
    assert parse_chat(body.encode()).messages[0]["content"] == "\U0001f600"


def test_an_event_is_one_line_of_utf8() -> None:
    assert sse({"a": "ü\n"}) == 'data: {"a":"ü\\n"}\n\n'.encode()
