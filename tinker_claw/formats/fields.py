"""Parse fields that several formats share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from msgspec import Raw

from tinker_claw.errors import RequestError
from tinker_claw.formats.base import EFFORTS, Joined
from tinker_claw.formats.body import INT64, Fields, Object, Read, listed_together, shown
from tinker_claw.images import Pictured, read_data, read_url
from tinker_claw.types import KnownMessage, Message, Reply, Tool, ToolCall

STOP_STRINGS = 4
"""Most stop strings of a request, as at OpenAI."""
STOP_CHARACTERS = 256
"""Most characters of one stop string; as much text may have to be held back at any time."""
MAX_DEPTH = 64
"""Levels of nesting in one tool: deeper ones would overflow the encoder's stack later."""

# The image's own header tells its type.
_BASE64 = Fields("type data", "media_type")
_URL = Fields("type url")

TEXT_ONLY = "this model writes text only"
MOST_CHOICES = 8
MOST_LOGPROBS = 20
"""Most top logprobs per token, as at OpenAI and, by default, in inference servers."""


def common(fields: Object, hottest: int, *lengths: str) -> dict[str, Any]:
    """Arguments of a GenerationRequest that all formats have.

    Args:
        hottest: the highest temperature.
        lengths: the fields that bound the reply; the first one sent counts.
    """
    most = [fields.integer(name, 1, INT64) for name in lengths]
    return {
        "model": fields.string("model"),
        "stream": fields.flag("stream"),
        "max_tokens": next(filter(None, most), None),
        "temperature": fields.number("temperature", 0, hottest, 1.0),
        "top_p": fields.number("top_p", 0, 1, 1.0, open_low=True),
    }


def openai(fields: Object, tools: tuple[Tool, ...], *lengths: str, nested: bool) -> dict[str, Any]:
    """Arguments of a GenerationRequest that OpenAI's two formats have; see `_openai_calls`."""
    key = fields.optional("prompt_cache_key", empty=True)
    return {
        **common(fields, 2, *lengths),
        **_openai_calls(fields, tools, nested=nested),
        "one_call": not fields.flag("parallel_tool_calls", True),
        "session": (key, "prompt_cache_key") if key else None,
    }


def stop_strings(fields: Object, name: str) -> tuple[str, ...]:
    """A string or a list of them; "" is none."""
    sent = fields.get(name, "")
    given: list[Any] = sent if isinstance(sent, list) else [] if sent == "" else [sent]
    if not all(isinstance(text, str) and text for text in given):
        raise fields.wrong("must be a string or a list of strings", name)
    if len(given) > STOP_STRINGS:
        raise fields.wrong(f"must hold at most {STOP_STRINGS} strings", name)
    if max(map(len, given), default=0) > STOP_CHARACTERS:
        raise fields.wrong(f"holds more than {STOP_CHARACTERS} characters in a string", name)
    return tuple(dict.fromkeys(given))


def effort_level(fields: Object, name: str) -> str | None:
    """One of EFFORTS; None: absent."""
    value = fields.get(name)
    if value is None or (isinstance(value, str) and value in EFFORTS):
        return value
    raise fields.wrong(f"must be one of {', '.join(EFFORTS)}", name)


def text_of(given: Object, name: str, part: Callable[[Object], str], *, empty: bool = False) -> str:
    """Text of a string or of a list of parts; it knows its parts.

    Args:
        part: reads one of them.
        empty: there may be none.
    """
    content = given.get(name, [])
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not (content or empty):
        raise given.wrong("must be a string or a list of parts", name)
    return joined([part(one) for one in given.objects(name)])


def joined(texts: Sequence[str]) -> str:
    """Texts of the parts of one message; "" of none."""
    if len(texts) > 1:
        return Joined.of(texts)
    return texts[0] if texts else ""


def parted(texts: Sequence[str]) -> str:
    """Join texts of several authors with blank lines."""
    heads = [text if text.endswith("\n\n") else f"{text}\n\n" for text in texts[:-1]]
    return joined([*heads, *texts[-1:]])


def function_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a message of the assistant. `arguments`: JSON."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def called(call: ToolCall) -> dict[str, Any]:
    """A call of a reply, in a message of the assistant."""
    return function_call(call.id, call.name, call.arguments)


def assistant(texts: Sequence[str], thought: Sequence[str], calls: Sequence[Any]) -> Message:
    """A message of the assistant, whose parts a client keeps one by one."""
    message: dict[str, Any] = {"role": "assistant", "content": joined([t for t in texts if t])}
    if calls:
        message["tool_calls"] = list(calls)
    if thought:
        message["reasoning_content"] = "".join(thought)
    return message


def as_message(reply: Reply) -> Message:
    """A reply as a client would send it back."""
    thought = [reply.reasoning] if reply.reasoning else []
    return assistant([reply.text], thought, [*map(called, reply.tool_calls)])


def one_reply(messages: Sequence[Message]) -> Message:
    """Messages of the assistant in a row, as one."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    thought = [m["reasoning_content"] for m in messages if "reasoning_content" in m]
    return assistant([message["content"] for message in messages], thought, calls)


def conversation(
    items: Sequence[Raw],
    messages_of: Callable[[Any, str], Sequence[KnownMessage]],
    reply_of: Callable[[Any, str], KnownMessage],
    at: str,
    read: Read,
    *,
    thought_begins: bool = False,
) -> list[Message]:
    """Return the messages in the items of a body; the assistant's in a row are one.

    Args:
        messages_of: converts one item.
        reply_of: converts a list of items, all the assistant's, to one message.
        at: the field that holds the items.
        thought_begins: an item that only thinks begins another message, once one has said more.
    """
    rows, says = list[tuple[KnownMessage, list[Raw]]](), False
    for i, raw in enumerate(items):
        for message in read(messages_of, raw, f"{at}[{i}]"):
            more = bool(message["content"] or "tool_calls" in message)
            assistant_s = bool(rows) and rows[-1][0]["role"] == message["role"] == "assistant"
            if assistant_s and not (thought_begins and says and not more):
                rows[-1][1].append(raw)
                says |= more
            else:
                rows.append((message, [raw]))
                says = more
    return [
        message if len(row) == 1 else read(reply_of, listed_together(row), at)
        for message, row in rows
    ]


def system_message(texts: list[str], at: str) -> KnownMessage:
    """The system message of texts of several authors. `at`: where they stand; they were checked."""
    return KnownMessage({"role": "system", "content": parted(texts)})


def unreadable(part: Object) -> RequestError:
    """Return the error for a part that is not read here: audio and files are never skipped."""
    kind = part.get("type")
    what = f"of type {shown(kind)}" if isinstance(kind, str) else "without a type"
    return part.wrong(
        f"is a part {what}, which is not read here; images are, of users and results of tools"
    )


def image_url(given: Object, name: str = "url") -> str:
    """An image in a data: URL, as the text that stands for it."""
    return Pictured.showing(read_url(given.string(name), given.place(name)))


def image_source(source: Object) -> str:
    """An image as Anthropic's format has it, as the text that stands for it."""
    if source.get("type") == "url":
        return image_url(_URL.check(source))
    if source.get("type") != "base64":
        raise source.wrong("must be base64 or url", "type")
    return Pictured.showing(read_data(_BASE64.check(source).string("data"), source.place("data")))


def function_tool(given: Object, schema: str = "parameters") -> Tool:
    """A function that the model may call.

    Args:
        schema: this format's name for the member that describes the arguments.
    """
    function: dict[str, Any] = {"name": given.string("name")}
    if "description" in given:
        function["description"] = given.string("description", empty=True)
    if schema in given:
        given.object(schema)
        function["parameters"] = given[schema]
    if "strict" in given:
        function["strict"] = given.flag("strict")
    return {"type": "function", "function": function}


class Calls(TypedDict, total=False):
    """Tools, and which calls a reply may or must have, as arguments of a GenerationRequest."""

    tools: tuple[Tool, ...]
    may_call: bool
    must_call: tuple[str, ...]


def forced(tools: tuple[Tool, ...], name: str | None, at: str) -> Calls:
    """A call of one of the tools.

    Args:
        name: of the tool; None: any of them.
        at: the field that requires it.
    """
    offered = [tool["function"]["name"] for tool in tools]
    if not offered:
        raise RequestError(f"{at}: there are no tools to call.", param=at)
    if name is not None and name not in offered:
        raise RequestError(f"{at} names {shown(name)}, which is none of the tools.", param=at)
    return {"tools": tools, "must_call": tuple(dict.fromkeys(offered)) if name is None else (name,)}


def schema_of(fields: Object, name: str, member: str | None = None) -> tuple[str, str] | None:
    """JSON Schema of the text that is asked for, and the field; None: any text.

    Args:
        member: holds name and schema; None: they are beside the type.
    """
    given, at = fields.object(name), fields.place(name)
    kind = given.get("type", "text")
    if kind == "text" and given.keys() <= {"type"}:
        return None
    if kind == "json_object":
        return '{"type":"object"}', at
    if kind != "json_schema":
        raise given.wrong("must be text, json_object or json_schema", "type")
    told = given.object(member) if member else given
    schema = told.get("schema")
    if not isinstance(schema, dict):
        raise told.wrong("must be an object", "schema")
    refuse_deep(told.object("schema"))
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":")), at


def _openai_calls(fields: Object, tools: tuple[Tool, ...], *, nested: bool) -> Calls:
    """Read `tool_choice`, as OpenAI's two formats have it.

    Args:
        nested: the choice is in a member named after its type.
    """
    at = "tool_choice"
    choice = fields.get(at, "auto")
    if choice == "none":
        return {"may_call": False}
    if choice in ("auto", "required"):
        return forced(tools, None, at) if choice == "required" else {"tools": tools}
    told = fields.object(at)
    if told.get("type") != "function":
        raise fields.wrong("must be auto, none, required or a function", at)
    return forced(tools, (told.object("function") if nested else told).string("name"), at)


def refuse_deep(given: Object) -> None:
    """Raise RequestError where lists and objects are nested too deeply; without recursion."""
    level: list[Any] = [given]
    for _ in range(MAX_DEPTH + 1):
        level = [
            entry
            for outer in level
            for entry in (outer.values() if isinstance(outer, dict) else outer)
            if type(entry) is dict or type(entry) is list
        ]
    if level:
        raise given.wrong(f"is nested more than {MAX_DEPTH} levels deep")
