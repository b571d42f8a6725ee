"""Parse fields that several formats share."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Raw

from tinker_claw.errors import RequestError
from tinker_claw.formats.base import Json
from tinker_claw.formats.body import (
    INT64,
    Neutral,
    Object,
    PartReader,
    decoded,
    members,
    shorten_name,
    without_halves,
)
from tinker_claw.formats.parts import MAX_DEPTH, joined, with_parts
from tinker_claw.images import MessagePart, parts_of
from tinker_claw.types import EFFORTS, KnownMessage, KnownTools, Message, Reply, Tool, ToolCall

STOP_STRINGS = 4
"""Most stop strings of a request, as at OpenAI."""
STOP_CHARACTERS = 256
"""Most characters of one stop string; as much text may have to be held back at any time."""

TEXT_ONLY = "this model writes text only; leave it out"
PLAIN_TEXT = Neutral(
    "a reply is not constrained to JSON here; offer a tool with this schema and name it in "
    "tool_choice, which forces a call with arguments in JSON",
    {"type": "text"},
)


def common(fields: Object, hottest: int, *lengths: str) -> Json:
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


def openai(fields: Object, tools: tuple[Tool, ...], *lengths: str, nested: bool) -> Json:
    """Arguments of a GenerationRequest that OpenAI's two formats have; see `_openai_calls`."""
    key = fields.text("prompt_cache_key")
    return {
        **common(fields, 2, *lengths),
        **_openai_calls(fields, tools, nested=nested),
        "one_call": not fields.flag("parallel_tool_calls", True),
        "session": (key, "prompt_cache_key") if key else None,
    }


def top_k(fields: Object) -> int | None:
    """The field `top_k`; 0 and -1, in use elsewhere for all tokens, are none."""
    value = fields.get("top_k")
    if type(value) is int and value in (0, -1):
        return None
    return fields.integer("top_k", 1, INT64)


def stop_strings(fields: Object, name: str, most: int = STOP_STRINGS) -> tuple[str, ...]:
    """A string or a list of at most so many; "" is none."""
    sent = fields.get(name, "")
    strings: list[Any] = sent if isinstance(sent, list) else [] if sent == "" else [sent]
    if not all(isinstance(text, str) and text for text in strings):
        raise fields.wrong("must be a string or a list of strings", name)
    if len(strings) > most:
        raise fields.wrong(f"must hold at most {most} strings", name)
    if max(map(len, strings), default=0) > STOP_CHARACTERS:
        raise fields.wrong(f"holds more than {STOP_CHARACTERS} characters in a string", name)
    return tuple(dict.fromkeys(strings))


def effort_level(fields: Object, name: str) -> str | None:
    """One of EFFORTS; None: absent."""
    return fields.one_of(name, EFFORTS) if name in fields else None


def unmet_verbosity(fields: Object) -> list[str]:
    """A sentence about a verbosity that is passed over; medium asks for nothing."""
    level = fields.one_of("verbosity", ("low", "medium", "high"), "medium")
    at = fields.place("verbosity")
    return [] if level == "medium" else [f"{at} {level}: ask for it in the prompt"]


def function_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a message of the assistant. `arguments`: JSON."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def unmade_edits(edits: Sequence[Object]) -> list[str]:
    """Sentences about edits of the history, none of which is made. The chat template decides which
    thinking is shown again."""
    kinds = [shorten_name(edit.string("type")) for edit in edits]
    return [
        f"{kind} (context_management): nothing is taken out of a history here"
        for kind in kinds
        if not kind.startswith("clear_thinking")
    ]


def arguments_of(fields: Object, name: str) -> str:
    """Arguments of a call as JSON: sent as such, as an object, or not at all."""
    sent = fields.get(name)
    if isinstance(sent, str):
        # They are JSON in JSON, which some chat formats read.
        return without_halves(sent.encode()).decode() or "{}"
    arguments = fields.object(name)
    refuse_deep(arguments)
    return json.dumps(fields.get(name, {}), ensure_ascii=False, separators=(",", ":"))


def name_of(fields: Object) -> str:
    """Name of a tool that was called; a call without one was another server's mistake."""
    return fields.text("name") or "unknown"


def result(id: str, content: Sequence[MessagePart]) -> KnownMessage:
    """Result of a tool. `id`: of the call; "": the next one without a result."""
    return with_parts({"role": "tool", "tool_call_id": id}, content)


def paired(messages: Iterable[KnownMessage]) -> list[Message]:
    """Give ids to calls and results that came without, in their order.

    A result that answers no call stays where it is: it is data like any other.
    """
    identified, waiting = list[Message](), OrderedDict[str, None]()
    for at, message in enumerate(messages):
        ids, calls = dict[str, Any](), message.get("tool_calls", ())
        if not all(call["id"] for call in calls):
            calls = [call | {"id": call["id"] or f"call{at}n{n}"} for n, call in enumerate(calls)]
            ids = {"tool_calls": calls}
        waiting |= dict.fromkeys(call["id"] for call in calls)
        if message["role"] == "tool":
            id = message["tool_call_id"] or next(iter(waiting), "")
            if id != message["tool_call_id"]:
                ids = {"tool_call_id": id}
            waiting.pop(id, None)
        identified.append(KnownMessage({**message, **ids}, message.parts) if ids else message)
    return identified


def called(call: ToolCall) -> dict[str, Any]:
    """A call of a reply, in a message of the assistant."""
    return function_call(call.id, call.name, call.arguments)


def assistant(
    parts: Iterable[MessagePart], thought: Sequence[str], calls: Sequence[Any]
) -> KnownMessage:
    """A message of the assistant, whose parts a client keeps one by one."""
    message = with_parts({"role": "assistant"}, joined(parts, glued=True))
    if calls:
        message["tool_calls"] = list(calls)
    if thought:
        message["reasoning_content"] = "".join(thought)
    return message


def as_message(reply: Reply) -> Message:
    """A reply as a client would send it back."""
    thought = [reply.reasoning] if reply.reasoning else []
    return assistant([MessagePart(reply.text)], thought, [*map(called, reply.tool_calls)])


Convert = Callable[[Object], Sequence[KnownMessage]]
"""Converts an item of a history to messages."""


def item_messages(
    convert: Convert, raw: Raw, at: str, reader: PartReader
) -> tuple[KnownMessage, ...]:
    """Return the messages of an item, which is named in the errors about it. `at`: its place."""
    return reader.cached(lambda: _converted(convert, decoded(raw), at), convert, bytes(raw))


def _converted(convert: Convert, item: Any, at: str) -> tuple[KnownMessage, ...]:
    try:
        return tuple(convert(Object(item, at)))
    except RequestError as error:
        sent = members(item)
        kinds = (f"{name} {sent[name]}" for name in ("role", "type") if type(sent.get(name)) is str)
        what = next(kinds, "")
        where = f"{at} ({shorten_name(what)})" if what else at
        raise RequestError(
            f"{error} It stands in {where}.",
            status=error.status,
            code=error.code,
            param=error.param,
        ) from error


def conversation(
    items: Sequence[Raw],
    convert: Convert,
    at: str,
    reader: PartReader,
    *,
    thought_begins: bool = False,
) -> tuple[list[Message], list[str]]:
    """Return the messages in the items of a body, and where each stands; the assistant's in a row
    are one.

    Args:
        at: the field that holds the items.
        thought_begins: an item that only thinks begins another message, once one has said more.
    """
    rows, places = list[_Row](), list[str]()
    for i, raw in enumerate(items):
        place = f"{at}[{i}]"
        for n, message in enumerate(item_messages(convert, raw, place, reader)):
            if not (rows and rows[-1].goes_on(message, thought_begins)):
                rows.append(_Row([], []))
                places.append(place)
            rows[-1].messages.append(message)
            rows[-1].origins.append((n, bytes(raw)))
    return paired(row.joined(reader) for row in rows), places


@dataclass(slots=True)
class _Row:
    """Messages that are one."""

    messages: list[KnownMessage]
    origins: list[tuple[int, bytes]]
    """The number of each within an item, and the item."""

    def goes_on(self, message: Message, thought_begins: bool) -> bool:
        if not self.messages[0]["role"] == message["role"] == "assistant":
            return False
        thinks = "reasoning_content" in message and not _says(message)
        return not (thought_begins and thinks and any(map(_says, self.messages)))

    def joined(self, reader: PartReader) -> KnownMessage:
        if len(self.messages) == 1:
            return self.messages[0]
        numbers, items = zip(*self.origins, strict=True)
        return reader.cached(lambda: _one_reply(self.messages), (_one_reply, numbers), *items)


def _says(message: Message) -> bool:
    """Return whether a message of the assistant does more than think."""
    return bool(message["content"] or "tool_calls" in message)


def _one_reply(messages: Sequence[Message]) -> KnownMessage:
    """Messages of the assistant in a row, as one."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    thought = [m["reasoning_content"] for m in messages if "reasoning_content" in m]
    return assistant([part for m in messages for part in parts_of(m)], thought, calls)


def system_message(texts: Sequence[str], reader: PartReader) -> KnownMessage:
    """The system message of texts of several authors."""
    return reader.cached(lambda: _head(texts), _head, *(text.encode() for text in texts))


def _head(texts: Sequence[str]) -> KnownMessage:
    heads = [text if text.endswith("\n\n") else f"{text}\n\n" for text in texts[:-1]]
    return with_parts({"role": "system"}, joined(map(MessagePart, [*heads, texts[-1]])))


def function_tool(fields: Object, schema: str = "parameters") -> Tool:
    """A function that the model may call.

    Args:
        schema: this format's name for the member that describes the arguments.
    """
    function: dict[str, Any] = {"name": fields.string("name")}
    if "description" in fields:
        function["description"] = fields.text("description")
    if schema in fields:
        fields.object(schema)
        function["parameters"] = fields[schema]
    if "strict" in fields:
        function["strict"] = fields.flag("strict")
    return {"type": "function", "function": function}


def forced(tools: tuple[Tool, ...], name: str | None, at: str) -> Json:
    """A call of one of the tools, as arguments of a GenerationRequest.

    Args:
        name: of the tool; None: any of them.
        at: the field that requires it.
    """
    offered = [tool["function"]["name"] for tool in tools]
    if not offered:
        raise RequestError(f"{at}: there are no tools to call; offer functions.", param=at)
    if name is not None and name not in offered:
        raise RequestError(
            f"{at} names {shorten_name(name)}, which is none of the functions offered: "
            f"{shorten_name(', '.join(offered))}.",
            param=at,
        )
    return {"tools": tools, "must_call": tuple(dict.fromkeys(offered)) if name is None else (name,)}


def _openai_calls(fields: Object, tools: tuple[Tool, ...], *, nested: bool) -> Json:
    """Read `tool_choice`, as OpenAI's two formats have it.

    Args:
        nested: the choice is in a member named after its type.
    """
    at = "tool_choice"
    sent = fields.get(at, "auto")
    choice = fields.object(at) if isinstance(sent, dict) else Object({"type": sent}, at)
    kind = choice.get("type")
    inner = choice.object(kind) if nested and isinstance(kind, str) else choice
    if kind == "none":
        return {"may_call": False}
    if kind in ("auto", "required"):
        return forced(tools, None, at) if kind == "required" else {"tools": tools}
    if kind == "allowed_tools":
        return _allowed(inner, tools, at, nested=nested)
    if isinstance(sent, str) or not isinstance(kind, str):
        raise fields.wrong(
            "must be auto, none, required, or an object of the type allowed_tools or function", at
        )
    if kind != "function":
        raise fields.wrong(
            f"asks for a tool of type {shorten_name(kind)}, which was left out: this server runs "
            "no tools itself; name a function",
            at,
        )
    return forced(tools, inner.string("name"), at)


def _allowed(choice: Object, tools: tuple[Tool, ...], at: str, *, nested: bool) -> Json:
    """The functions of a choice among some tools, which the model is shown alone."""
    mode, names = choice.one_of("mode", ("auto", "required"), "auto"), set[str]()
    offered = {tool["function"]["name"] for tool in tools}
    for entry in choice.objects("tools"):
        if entry.get("type", "function") != "function":
            continue  # left out, like the tool itself
        name = (entry.object("function") if nested else entry).string("name")
        if name not in offered:
            raise entry.wrong(f"names {shorten_name(name)}, which is none of the functions offered")
        names.add(name)
    kept = KnownTools([tool for tool in tools if tool["function"]["name"] in names])
    if mode == "required":
        return forced(kept, None, at)
    return {"tools": kept} if kept else {"may_call": False}


def offered(
    tools: Iterable[Object], usual: str, function_of: Callable[[Object], Tool], advice: str
) -> tuple[KnownTools, tuple[str, ...]]:
    """Return the functions, and sentences about tools of other types, which are left out.

    Args:
        usual: type of a function.
        advice: what to do where there are tools and none is a function.
    """
    functions, missing = list[Tool](), list[str]()
    for tool in tools:
        kind = tool.string("type")
        if kind == usual:
            functions.append(function_of(tool))
            continue
        missing.append(
            f"{shorten_name(kind)} ({tool.at}): this server runs no tools itself, so it was not "
            "offered"
        )
    if missing and not functions:
        raise RequestError(f"{missing[0]}; {advice}", param="tools[0]")
    return KnownTools(functions), tuple(missing)


def refuse_deep(value: Object) -> None:
    """Raise RequestError where lists and objects are nested too deeply; without recursion."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            entry
            for outer in level
            for entry in (outer.values() if isinstance(outer, dict) else outer)
            if type(entry) is dict or type(entry) is list
        ]
    if level:
        raise value.wrong(f"is nested more than {MAX_DEPTH} levels deep")
