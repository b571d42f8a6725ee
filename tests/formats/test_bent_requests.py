"""Messages and Responses requests with one value replaced: read, or refused.

Rule: there is no third way; whatever stands where, a format raises nothing but a RequestError.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.formats import test_chat, test_responses
from tests.formats import test_messages_wire as test_messages
from tests.lab.mutations import DEEP, VALUES
from tinker_claw.errors import RequestError
from tinker_claw.formats.base import (
    FinishedReply,
    ReplyHead,
    TokenCounts,
    WireFormat,
)
from tinker_claw.formats.chat import Chat
from tinker_claw.formats.messages import Messages
from tinker_claw.formats.responses import Responses
from tinker_claw.types import Reply, cached

OF_MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "system": [test_messages.said("A", cache_control=test_messages.HINT)],
    "messages": [
        test_messages.by("user", test_messages.said("a")),
        test_messages.by("assistant", test_messages.THOUGHT, test_messages.USE),
        test_messages.by("user", test_messages.RESULT | {"is_error": True}),
        {"role": "user", "content": "b"},
    ],
    "tools": [test_messages.TOOL],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "stop_sequences": ["x"],
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"effort": "low"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
    "metadata": {"user_id": "u"},
    "temperature": 1,
    "top_p": 1,
    "top_k": 5,
    "stream": True,
}
OF_RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "A",
    "input": [
        test_responses.USER,
        test_responses.THOUGHT,
        test_responses.SAID,
        test_responses.CALL | {"namespace": "fs"},
        test_responses.RESULT | {"output": [test_responses.part("a")]},
    ],
    "tools": [test_responses.TOOL, test_responses.SPACE],
    "tool_choice": "auto",
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "stream_options": {"include_obfuscation": False},
    "metadata": {"task_id": "t", "group_id": "g", "group_size": "2"},
    "max_output_tokens": 9,
    "parallel_tool_calls": False,
    "prompt_cache_key": "k",
    "store": False,
    "temperature": 1,
    "top_p": 1,
    "stream": True,
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values of a body."""
    yield path
    inner: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        inner = enumerate(value)
    for name, one in inner:
        yield from places(one, (*path, name))


def bent(body: dict[str, Any]) -> Iterator[bytes]:
    """Yield the body with each of its values replaced by each of the mutations' values."""
    yield json.dumps(body).encode()
    for path in list(places(body))[1:]:
        for value in VALUES:
            changed = copy.deepcopy(body)
            holder: Any = changed
            for name in path[:-1]:
                holder = holder[name]
            holder[path[-1]] = json.loads("[" * 900 + "]" * 900) if value == DEEP else value
            yield json.dumps(changed).encode()


@pytest.mark.parametrize(
    ("parse", "param", "fields"),
    [
        (of.parse, param, fields)
        for of in (test_chat, test_messages, test_responses)
        for param, fields in (*((name, {name: value}) for name, value in of.VALUES), *of.INNER)
    ],
)
def test_a_refusal_names_the_field(parse: Any, param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as raised:
        parse(**fields)
    assert (raised.value.param, raised.value.status) == (param, 400)
    assert param in str(raised.value)


HEAD = ReplyHead(version=3, prompt_tokens=12, created=0)
DONE = FinishedReply(Reply("fine"), "stop", TokenCounts(12, 7, 5), 3)


@pytest.mark.parametrize(
    ("spoken", "body"),
    [
        (
            Chat(),
            {"model": "m", "messages": OF_MESSAGES["messages"][-1:], "tools": [test_chat.TOOL]},
        ),
        (Messages(), OF_MESSAGES),
        (Responses(), OF_RESPONSES),
    ],
)
def test_what_was_found_out_about_a_message_is_not_sought_again(
    spoken: WireFormat, body: dict[str, Any]
) -> None:
    request, sought = spoken.parse(json.dumps(body).encode(), spoken.routes[0], "ann"), list[Any]()

    def found_out(about: Any) -> int:
        sought.append(about)
        return len(sought)

    for _ in range(2):
        for message in request.messages:
            cached(found_out, message)
        cached(found_out, request.tools)
    assert sought == [*request.messages, request.tools]


@pytest.mark.parametrize(
    ("spoken", "body"), [(Messages(), OF_MESSAGES), (Responses(), OF_RESPONSES)]
)
def test_a_bent_request_is_read_or_refused_by_name(
    spoken: WireFormat, body: dict[str, Any]
) -> None:
    reasons, read = list[str](), 0
    for changed in bent(body):
        try:
            request = spoken.parse(changed, spoken.routes[0], "ann")
        except RequestError as error:
            reasons.append(str(error))
        else:
            assert all(isinstance(m["content"], str) for m in request.messages)
            assert json.dumps(spoken.reply(request, HEAD).whole(DONE))
            read += 1
    assert min(len(reasons), read) > 500
    assert all(0 < len(reason) < 500 for reason in reasons)
