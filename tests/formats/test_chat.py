"""Chat requests: accepted fields, their effect, and the field that a refusal names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
from msgspec import Raw
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming,
    CompletionCreateParamsStreaming,
)

from tests.lab.mutations import Mutants
from tinker_claw.errors import RequestError
from tinker_claw.formats.base import GenerationRequest, ReplyHead
from tinker_claw.formats.body import Fields, PartCache
from tinker_claw.formats.chat import FIELDS, Chat, parse_chat
from tinker_claw.formats.chat_reply import ChatReply
from tinker_claw.types import Delta

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
ASSISTANT = {"role": "assistant", "content": "x"}
SYSTEM = {"role": "system", "content": "be brief"}
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


def test_a_bare_request_gets_the_defaults() -> None:
    assert parse() == GenerationRequest(model="m", messages=(USER,))


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


def test_the_newer_name_of_the_token_limit_wins() -> None:
    assert parse(max_tokens=5, max_completion_tokens=9).max_tokens == 9


def test_one_stop_string_is_a_list_of_one() -> None:
    assert parse(stop="\n").stop == ("\n",)


def test_tool_choice_none_hides_the_tools_and_forbids_calls() -> None:
    request = parse(tools=[TOOL], tool_choice="none")
    assert request.tools == ()
    assert not request.may_call
    assert parse(tools=[TOOL], tool_choice="auto").may_call


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


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("model", {"model": None}),
    ("model", {"model": 5}),
    ("messages", {"messages": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": {"role": "user"}}),
    ("messages[0]", {"messages": ["hi"]}),
    ("messages[0].role", {"messages": [{"content": "x"}]}),
    ("messages[0].role", {"messages": [{"role": "robot", "content": "x"}]}),
    ("messages[0].role", {"messages": [{"role": ["user"], "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages[0].refusal", {"messages": [ASSISTANT | {"refusal": 3}]}),
    (
        "messages[0].content[0].text",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
    ),
    ("messages[0].tool_calls", {"messages": [{"role": "assistant", "tool_calls": "x"}]}),
    ("messages[0].tool_calls[0]", {"messages": [{"role": "assistant", "tool_calls": [3]}]}),
    (
        "messages[0].tool_calls[0].function.name",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]},
    ),
    (
        "messages[0].tool_calls[0].function.arguments",
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": 5}}],
                }
            ]
        },
    ),
    ("messages[0].name", {"messages": [USER | {"name": 3}]}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -5}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": True}),
    ("max_completion_tokens", {"max_completion_tokens": "9"}),
    ("n", {"n": 2}),
    ("n", {"n": True}),
    ("temperature", {"temperature": 10**400}),
    ("temperature", {"temperature": []}),
    ("top_p", {"top_p": {}}),
    ("top_k", {"top_k": 2**63}),
    ("stop", {"stop": list("abcde")}),
    ("stop", {"stop": {"a": 1}}),
    ("stop", {"stop": "x" * 257}),
    ("stop", {"stop": ["a", ""]}),
    ("stop", {"stop": [7]}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("function_call", {"function_call": {"name": "f"}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("audio", {"audio": {"voice": "x", "format": "wav"}}),
    ("web_search_options", {"web_search_options": {}}),
    ("moderation", {"moderation": {}}),
    ("verbosity", {"verbosity": "none"}),
    ("min_p", {"min_p": 0.1}),
    ("stream_options.include_obfuscation", {"stream_options": {"include_obfuscation": True}}),
    (
        "tool_choice.allowed_tools.mode",
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "some"}}},
    ),
    (
        "tool_choice.allowed_tools.tools[0]",
        {
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"tools": [{"type": "function", "function": {"name": "rm"}}]},
            },
        },
    ),
    (
        "tool_choice",
        {
            "tools": [TOOL, {"type": "custom", "custom": {"name": "patch"}}],
            "tool_choice": {"type": "custom", "custom": {"name": "patch"}},
        },
    ),
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
    ("tools[0].function.name", {"tools": [{"type": "function"}]}),
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
        {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
    ),
    (
        "tools[0]",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep(80)}}]},
    ),
    ("tools[1]", {"tools": [TOOL, TOOL | {"extra": deep(80)}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "any"}),
    (
        "tool_choice",
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "rm"}}},
    ),
    ("tool_choice.function.name", {"tools": [TOOL], "tool_choice": {"type": "function"}}),
    ("response_format", {"response_format": {"type": "grammar"}}),
    ("logprobs", {"logprobs": 3}),
    ("top_logprobs", {"top_logprobs": 5}),
    ("logit_bias", {"logit_bias": {"5": 1}}),
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("frequency_penalty", {"frequency_penalty": -1}),
    ("parallel_tool_calls", {"parallel_tool_calls": "no"}),
    ("reasoning_effort", {"reasoning_effort": "hard"}),
    ("reasoning_effort", {"reasoning_effort": ["low"]}),
    ("prompt_cache_key", {"prompt_cache_key": 7}),
    ("chat_template_kwargs", {"chat_template_kwargs": []}),
    ("chat_template_kwargs.tone", {"chat_template_kwargs": {"tone": ["x"]}}),
    ("grammar", {"grammar": "root ::= x"}),
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


def test_a_name_is_not_echoed_at_full_length() -> None:
    with pytest.raises(RequestError) as raised:
        parse(**{"x" * 10_000: 1})
    assert len(str(raised.value)) < 200


def test_a_number_beyond_floats_is_out_of_range() -> None:
    with pytest.raises(RequestError, match="out of range"):
        parse_chat(
            b'{"model": "m", "messages": [{"role":"user","content":"x"}], "temperature":1e999}'
        )


@pytest.mark.parametrize("text", ["half \ud83d", "\udc00", "\ud83d\ud83d"])
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    for fields in ({"messages": [{"role": "user", "content": text}]}, {"user": text}, {text: 1}):
        with pytest.raises(RequestError, match="half a surrogate pair"):
            parse(**fields)


def test_whole_surrogate_pairs_are_text() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "\U0001f600"}]})
    assert "\\ud83d" in body
    assert parse_chat(body.encode()).messages[0]["content"] == "\U0001f600"


def test_an_event_is_one_line_of_utf8() -> None:
    reply = ChatReply(parse(), ReplyHead(version=3, prompt_tokens=1, created=0))
    begin, _, rest = reply.deltas([Delta("text", "ü\n")], 3).decode().partition('"delta":')
    assert begin.startswith(f'data: {{"id":"{reply.id}","object":"chat.completion.chunk",')
    assert rest == '{"content":"ü\\n"},"finish_reason":null}]}\n\n'


def written(*said: Any, **fields: Any) -> bytes:
    """JSON as clients write it, without blanks."""
    body = {"model": "m", "messages": list(said), **fields}
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def read_as(chat: Chat, body: bytes, user: str = "ann") -> GenerationRequest:
    request = chat.parse(body, chat.routes[0], user)
    chat.remember(request, user)
    return request


def told(read: Callable[[], GenerationRequest]) -> Any:
    """The request without what is remembered of it, or the text of a refusal."""
    try:
        return replace(read(), own={})
    except RequestError as error:
        return str(error), error.param, error.status


def test_a_known_history_changes_neither_request_nor_refusal() -> None:
    chat, mutants = Chat(), Mutants("m")
    for number in range(800):
        body = mutants.make(number).body
        whole = told(lambda body=body: parse_chat(body))
        for _ in range(2):
            assert told(lambda body=body: read_as(chat, body)) == whole


def test_what_is_known_as_tools_is_no_message_and_no_message_is_tools() -> None:
    said, tool = {"role": "user", "content": "hi"}, {"type": "function", "function": {"name": "f"}}
    chat = Chat()
    read_as(chat, written(said, tools=[tool]))
    for body in (written([tool], tools=[tool]), written(said, tools=said), written([])):
        whole = told(lambda body=body: parse_chat(body))
        assert isinstance(whole, tuple), "a refusal"
        assert told(lambda body=body: read_as(chat, body)) == whole


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"seed":NaN}',
        b'{"model":"m","messages":[{"role":"user","content":"a\nb"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"hi"}]} x',
        b'{"model":"m","messages":[]}',
        b'{"model":"m","messages":{"role":"user"}}',
        b'{"model":"m"}',
        b"[]",
        b"",
    ],
)
def test_what_is_wrong_is_said_as_of_a_body_that_is_read_whole(body: bytes) -> None:
    chat = Chat()
    read_as(chat, written(USER))
    whole = told(lambda: parse_chat(body))
    assert isinstance(whole, tuple), "a refusal"
    assert told(lambda: read_as(chat, body)) == whole


def test_what_is_remembered_is_bounded() -> None:
    known = PartCache(room=20_000)

    def make(raw: str, at: str) -> tuple[str, str]:
        return raw, at

    for number in range(200):
        new: dict[Any, Any] = {}
        read = known.reader("ann", new)
        for text in ("old", str(number), "x" * 9000):
            assert read(make, Raw(json.dumps(text)), "here") == (text, "here")
        known.learn(new)
        assert ("ann", make, json.dumps("x" * 9000).encode()) not in known._parsed, "too large"
        assert 0 < len(known._parsed) < 20
        assert ("ann", make, json.dumps(str(number)).encode()) in known._parsed
