"""Parse fields that several formats share."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from msgspec import Raw

from tinker_claw.errors import RequestError
from tinker_claw.formats.body import (
    INT64,
    Neutral,
    Object,
    Read,
    listed_together,
    shorten_name,
    without_halves,
)
from tinker_claw.formats.parts import MAX_DEPTH, joined
from tinker_claw.types import EFFORTS, KnownMessage, KnownTools, Message, Reply, Tool, ToolCall

STOP_STRINGS = 4
"""Most stop strings of a request, as at OpenAI."""
STOP_CHARACTERS = 256
"""Most characters of one stop string; as much text may have to be held back at any time."""

TEXT_ONLY = "this model writes text only; leave it out"
PLAIN_TEXT = Neutral(
    ({"type": "text"},),
    "a reply is not constrained to JSON here; offer a tool with this schema and name it in "
    "tool_choice, which forces a call with arguments in JSON",
)


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
    value = fields.get(name)
    if value is None or (isinstance(value, str) and value in EFFORTS):
        return value
    raise fields.wrong(f"must be one of {', '.join(EFFORTS)}", name)


def unmet_verbosity(fields: Object) -> list[str]:
    """A sentence about a verbosity that is passed over; medium asks for nothing."""
    level = fields.get("verbosity", "medium")
    if level not in ("low", "medium", "high"):
        raise fields.wrong("must be low, medium or high", "verbosity")
    at = fields.place("verbosity")
    return [] if level == "medium" else [f"{at} {level}: ask for it in the prompt"]


def parted(texts: Sequence[str]) -> str:
    """Join texts of several authors with blank lines."""
    heads = [text if text.endswith("\n\n") else f"{text}\n\n" for text in texts[:-1]]
    return joined([*heads, *texts[-1:]])


def function_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a message of the assistant. `arguments`: JSON."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_of(fields: Object, name: str) -> str:
    """Arguments of a call as JSON: sent as such, as an object, or not at all."""
    sent = fields.get(name)
    if isinstance(sent, str):
        # They are JSON in JSON, which some chat formats read.
        return without_halves(sent.encode()).decode() or "{}"
    arguments = fields.object(name)
    refuse_deep(arguments)
    return json.dumps(fields.get(name, {}), ensure_ascii=False, separators=(",", ":"))


def name_of(fields: Object, name: str = "name") -> str:
    """Name of a tool that was called; a call without one was another server's mistake."""
    return fields.optional(name, empty=True) or "unknown"


def result(id: str | None, content: str) -> Message:
    """Result of a tool. `id`: of the call; None or "": the next one without a result."""
    return {"role": "tool", "tool_call_id": id or "", "content": content}


def paired(messages: Iterable[Message]) -> list[Message]:
    """Give ids to calls and results that came without, in their order.

    A result that answers no call stays where it is: it is data like any other.
    """
    identified, waiting = list[Message](), OrderedDict[str, None]()
    for at, message in enumerate(messages):
        calls = cast("Sequence[dict[str, Any]]", message.get("tool_calls", ()))
        if not all(call["id"] for call in calls):
            calls = [call | {"id": call["id"] or f"call{at}n{n}"} for n, call in enumerate(calls)]
            message = KnownMessage({**message, "tool_calls": calls})
        waiting |= dict.fromkeys(call["id"] for call in calls)
        if message["role"] == "tool":
            if not message["tool_call_id"] and waiting:
                message = KnownMessage({**message, "tool_call_id": next(iter(waiting))})
            waiting.pop(message["tool_call_id"], None)
        identified.append(message)
    return identified


@contextmanager
def naming(at: str, raw: Any) -> Generator[None]:
    """Name the message in the errors about it.

    Args:
        at: its place in the body.
        raw: the message.
    """
    try:
        yield
    except RequestError as error:
        sent = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
        what = next(
            (f"{n} {sent[n]}" for n in ("role", "type") if isinstance(sent.get(n), str)), ""
        )
        where = f"{at} ({shorten_name(what)})" if what else at
        raise RequestError(
            f"{error} It stands in {where}.",
            status=error.status,
            code=error.code,
            param=error.param,
        ) from error


def called(call: ToolCall) -> dict[str, Any]:
    """A call of a reply, in a message of the assistant."""
    return function_call(call.id, call.name, call.arguments)


def assistant(texts: Sequence[str], thought: Sequence[str], calls: Sequence[Any]) -> Message:
    """A message of the assistant, whose parts a client keeps one by one."""
    text = joined([text for text in texts if text], glued=True)
    message: dict[str, Any] = {"role": "assistant", "content": text}
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
) -> tuple[list[Message], list[str]]:
    """Return the messages in the items of a body, and where each stands; the assistant's in a row
    are one.

    Args:
        messages_of: converts one item.
        reply_of: converts a list of items, all the assistant's, to one message.
        at: the field that holds the items.
        thought_begins: an item that only thinks begins another message, once one has said more.
    """
    rows = list[_Row]()
    for i, raw in enumerate(items):
        messages = read(messages_of, raw, place := f"{at}[{i}]")
        for message in messages:
            says = bool(message["content"] or "tool_calls" in message)
            row = _Row(place, [message], [raw], alone=len(messages) == 1, says=says)
            assistant_s = bool(rows) and rows[-1].role == row.role == "assistant"
            thinks = not says and "reasoning_content" in message
            if assistant_s and not (thought_begins and rows[-1].says and thinks):
                rows[-1].add(row)
            else:
                rows.append(row)
    return [row.joined(reply_of, at, read) for row in rows], [row.at for row in rows]


@dataclass(slots=True)
class _Row:
    """Messages that are one, and the items that they stand in."""

    at: str
    """Where the first item stands in the body."""
    messages: list[KnownMessage]
    items: list[Raw]
    alone: bool
    """Whether no item holds further messages, so that the items say the whole."""
    says: bool
    """Whether any of them does more than think."""

    @property
    def role(self) -> str:
        return self.messages[0]["role"]

    def add(self, row: _Row) -> None:
        self.messages += row.messages
        self.items += row.items
        self.alone &= row.alone
        self.says |= row.says

    def joined(self, reply_of: Callable[[Any, str], KnownMessage], at: str, read: Read) -> Message:
        if len(self.messages) == 1:
            return self.messages[0]
        if not self.alone:
            return KnownMessage(one_reply(self.messages))
        return read(reply_of, listed_together(self.items), at)


def system_message(texts: list[str], at: str) -> KnownMessage:
    """The system message of texts of several authors. `at`: where they stand; they were checked."""
    return KnownMessage({"role": "system", "content": parted(texts)})


def function_tool(fields: Object, schema: str = "parameters") -> Tool:
    """A function that the model may call.

    Args:
        schema: this format's name for the member that describes the arguments.
    """
    function: dict[str, Any] = {"name": fields.string("name")}
    if "description" in fields:
        function["description"] = fields.string("description", empty=True)
    if schema in fields:
        fields.object(schema)
        function["parameters"] = fields[schema]
    if "strict" in fields:
        function["strict"] = fields.flag("strict")
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
        raise RequestError(f"{at}: there are no tools to call; offer functions.", param=at)
    if name is not None and name not in offered:
        raise RequestError(
            f"{at} names {shorten_name(name)}, which is none of the functions offered: "
            f"{shorten_name(', '.join(offered))}.",
            param=at,
        )
    return {"tools": tools, "must_call": tuple(dict.fromkeys(offered)) if name is None else (name,)}


def _openai_calls(fields: Object, tools: tuple[Tool, ...], *, nested: bool) -> Calls:
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


def _allowed(choice: Object, tools: tuple[Tool, ...], at: str, *, nested: bool) -> Calls:
    """The functions of a choice among some tools, which the model is shown alone."""
    mode, names = choice.get("mode", "auto"), set[str]()
    if mode not in ("auto", "required"):
        raise choice.wrong("must be auto or required", "mode")
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


def left_out(kind: str, at: str) -> str:
    """Say that a tool was left out. `kind`: its type."""
    return f"{shorten_name(kind)} ({at}): this server runs no tools itself, so it was not offered"


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
