"""What formats have in common: tables of fields, and the values that mean the same in each.

Rule: a field of a request is in exactly one table of its format. Honoured fields are read, ignored
ones could not change a reply, neutral ones may only hold a value that asks for nothing; any other
is refused, and each refusal says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tinker_claw.errors import RequestError
from tinker_claw.formats.base import EFFORTS, LARGEST_GROUP, Joined
from tinker_claw.formats.body import integer, items, members, shown, string
from tinker_claw.types import Attempt, Message, Tool

STOP_STRINGS = 4
"""As many as OpenAI takes."""
STOP_CHARACTERS = 256
"""Of one stop string: so much text may have to be held back at any time."""
MAX_DEPTH = 64
"""Levels of nesting in one tool: deeper ones would overflow the encoder's stack later."""

TEXT_ONLY = "this model writes text only"
MOST_CHOICES = 8
MOST_LOGPROBS = 20
"""As many as OpenAI tells, and as inference servers give unless they are told otherwise."""


@dataclass(frozen=True, slots=True)
class Neutral:
    """A field that may be sent as long as it asks for nothing."""

    values: tuple[Any, ...]
    """Besides null."""
    because: str
    """Why no other value can be honoured."""


class Fields:
    """What becomes of every field of an object."""

    def __init__(
        self, honoured: str, ignored: str = "", neutral: Mapping[str, Neutral] | None = None
    ) -> None:
        """`honoured`, `ignored`: names with blanks between them."""
        self.honoured, self.ignored = frozenset(honoured.split()), frozenset(ignored.split())
        self.neutral = neutral or {}

    def members(self, value: Any, at: str) -> dict[str, Any]:
        """The non-null members of an object that may have these fields; None means absent.

        Raises:
            RequestError: names the first one that cannot be honoured.
        """
        given = members(value, at)
        self.refuse_unknown(given, f"{at}.")
        return given

    def refuse_unknown(self, given: Mapping[str, Any], at: str = "") -> None:
        """
        Args:
            at: where the object stands, with a dot at its end; "" for the whole body.

        Raises:
            RequestError: names the first field that cannot be honoured.
        """
        for name, value in given.items():
            if name in self.honoured or name in self.ignored or value is None:
                continue
            neutral, where = self.neutral.get(name), f"{at}{shown(name)}"
            if neutral is None:
                raise RequestError(f"{where} is not a field that this server knows.", param=where)
            if not any(_same(value, allowed) for allowed in neutral.values):
                raise RequestError(
                    f"{where} is not supported with this value: {neutral.because}.", param=where
                )


def _same(value: Any, allowed: Any) -> bool:
    """Equal, and not as True equals 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def model_name(fields: Mapping[str, Any]) -> str:
    named = fields.get("model")
    if not isinstance(named, str) or not named:
        raise RequestError("model must name a model.", param="model")
    return named


def stop_strings(stop: Any, at: str) -> tuple[str, ...]:
    """Of a string or a list of them; None means absent."""
    if stop is None or stop == "":
        return ()
    if not isinstance(stop, str | list):
        raise RequestError(f"{at} must be a string or a list of strings.", param=at)
    given = [stop] if isinstance(stop, str) else cast("list[Any]", stop)
    if len(given) > STOP_STRINGS:
        raise RequestError(f"{at} must hold at most {STOP_STRINGS} strings.", param=at)
    for i, text in enumerate(given):
        where = at if isinstance(stop, str) else f"{at}[{i}]"
        if len(string(text, where)) > STOP_CHARACTERS:
            raise RequestError(f"{where} is longer than {STOP_CHARACTERS} characters.", param=where)
    return tuple(dict.fromkeys(given))


def effort_level(value: Any, at: str) -> str | None:
    """One of EFFORTS; None means absent."""
    if value is None or (isinstance(value, str) and value in EFFORTS):
        return value
    raise RequestError(f"{at} must be one of {', '.join(EFFORTS)}.", param=at)


def cache_session(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """The session that a `prompt_cache_key` names, and this field."""
    name = "prompt_cache_key"
    key = fields.get(name)
    return (key, name) if key is not None and string(key, name, empty=True) else None


def attempt_in(metadata: Any) -> Attempt | None:
    """Task and group in `metadata`, whose other members are the client's own affair."""
    given = members(metadata, "metadata")
    told = {name: given[name] for name in ("task_id", "group_id", "group_size") if name in given}
    if not told:
        return None
    size = told.get("group_size")
    if isinstance(size, str) and size.isascii() and size.isdigit() and len(size) < 9:
        size = int(size)  # OpenAI's metadata hold strings only
    where = "metadata.group_size"
    return Attempt(
        task=string(told["task_id"], "metadata.task_id") if "task_id" in told else None,
        group=string(told["group_id"], "metadata.group_id") if "group_id" in told else None,
        size=None if size is None else integer(size, where, 1, LARGEST_GROUP + 1),
    )


def text_of(content: Any, at: str, part: Callable[[Any, str], str]) -> str:
    """Text of a string or of a list of parts; it knows its parts.

    Args:
        part: reads one of them, which stands where it is told.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"{at} must be a string or a list of parts.", param=at)
    return joined([part(one, f"{at}[{j}]") for j, one in enumerate(cast("list[Any]", content))])


def joined(texts: Sequence[str]) -> str:
    """Texts of the parts of one message; "" of none."""
    if len(texts) > 1:
        return Joined.of(texts)
    return texts[0] if texts else ""


def parted(texts: Sequence[str]) -> str:
    """Texts that belong to no one sentence, such as those of several authors: a blank line parts
    them."""
    heads = [text if text.endswith("\n\n") else f"{text}\n\n" for text in texts[:-1]]
    return joined([*heads, *texts[-1:]])


def function_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a message of the assistant. `arguments`: JSON."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(texts: Sequence[str], thought: Sequence[str], calls: Sequence[Any]) -> Message:
    """A message of the assistant, of which a client keeps the parts one by one."""
    message: dict[str, Any] = {"role": "assistant", "content": joined([t for t in texts if t])}
    if calls:
        message["tool_calls"] = list(calls)
    if thought:
        message["reasoning_content"] = "".join(thought)
    return message


def unreadable(kind: Any, at: str) -> RequestError:
    """A part of a message that is no text: images, audio, files are never skipped."""
    what = f"of type {shown(kind)}" if isinstance(kind, str) else "without a type"
    return RequestError(f"{at}: this model reads text only, not a part {what}.", param=at)


def check_function(function: Mapping[str, Any], at: str, schema: str = "parameters") -> None:
    """The members of a function that the model may call.

    Args:
        schema: what this format calls the one that describes the arguments.
    """
    string(function.get("name"), f"{at}.name")
    if not isinstance(function.get("description", ""), str | None):
        raise RequestError(f"{at}.description must be a string.", param=f"{at}.description")
    if not isinstance(function.get(schema, {}), dict | None):
        raise RequestError(f"{at}.{schema} must be an object.", param=f"{at}.{schema}")
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError(f"{at}.strict must be true or false.", param=f"{at}.strict")


@dataclass(frozen=True, slots=True)
class Calls:
    """What of calls there may be in a reply."""

    tools: tuple[Tool, ...] = ()
    """The tools to show."""
    may: bool = True
    must: tuple[str, ...] = ()
    """Names of tools of which one must be called; (): the reply may do otherwise."""

    @classmethod
    def forced(cls, tools: tuple[Tool, ...], name: str | None, at: str) -> Calls:
        """
        Args:
            name: of the tool; None: any of them.
            at: the field that says so.
        """
        offered = [tool["function"]["name"] for tool in tools]
        if not offered:
            raise RequestError(f"{at}: there are no tools to call.", param=at)
        if name is not None and name not in offered:
            raise RequestError(f"{at} names {shown(name)}, which is none of the tools.", param=at)
        return cls(tools, must=tuple(dict.fromkeys(offered)) if name is None else (name,))


def schema_of(raw: Any, at: str, member: str | None = None) -> tuple[str, str] | None:
    """JSON Schema of the text that is asked for, and the field; None: any text.

    Args:
        member: where name and schema stand; None: beside the type.
    """
    given = members(raw, at)
    kind = given.get("type", "text")
    if kind == "text" and given.keys() <= {"type"}:
        return None
    if kind == "json_object":
        return '{"type":"object"}', at
    if kind != "json_schema":
        raise RequestError(f"{at}.type must be text, json_object or json_schema.", param=at)
    where = f"{at}.{member}" if member else at
    told = members(given.get(member), where) if member else given
    if not isinstance(told.get("schema"), dict):
        raise RequestError(f"{where}.schema must be an object.", param=f"{where}.schema")
    if _deep(told["schema"], MAX_DEPTH):
        raise RequestError(
            f"{where}.schema is nested more than {MAX_DEPTH} levels deep.", param=f"{where}.schema"
        )
    return json.dumps(told["schema"], ensure_ascii=False, separators=(",", ":")), at


def openai_calls(choice: Any, tools: tuple[Tool, ...], *, nested: bool) -> Calls:
    """Of `tool_choice`, as OpenAI's two wires have it.

    Args:
        nested: what is chosen stands in a member that is called as its type.
    """
    at = "tool_choice"
    if choice in ("auto", "none", "required"):
        if choice == "none":
            return Calls(may=False)
        return Calls.forced(tools, None, at) if choice == "required" else Calls(tools)
    told = members(choice, at)
    if told.get("type") == "function":
        return Calls.forced(tools, _function_name(told, at, nested=nested), at)
    if told.get("type") != "allowed_tools":
        raise RequestError(
            f"{at} must be auto, none, required, a function or allowed_tools.", param=at
        )
    if nested:
        at = f"{at}.allowed_tools"
        told = members(told.get("allowed_tools"), at)
    names = {
        _function_name(members(one, f"{at}.tools[{i}]"), f"{at}.tools[{i}]", nested=nested)
        for i, one in enumerate(items(told.get("tools"), f"{at}.tools"))
    }
    allowed = tuple(tool for tool in tools if tool["function"]["name"] in names)
    if told.get("mode") not in ("auto", "required"):
        raise RequestError(f"{at}.mode must be auto or required.", param=f"{at}.mode")
    if told["mode"] == "required" or len(allowed) < len(names):
        for name in names:
            Calls.forced(tools, name, f"{at}.tools")
    return Calls.forced(allowed, None, at) if told["mode"] == "required" else Calls(allowed)


def _function_name(told: Mapping[str, Any], at: str, *, nested: bool) -> str:
    where = f"{at}.function" if nested else at
    given = members(told.get("function"), where) if nested else told
    return string(given.get("name"), f"{where}.name")


def refuse_deep(tools: Sequence[Any]) -> None:
    """Raises RequestError, naming the tool."""
    if _deep(tools, MAX_DEPTH + 1):
        at = next(f"tools[{i}]" for i, tool in enumerate(tools) if _deep(tool, MAX_DEPTH))
        raise RequestError(f"{at} is nested more than {MAX_DEPTH} levels deep.", param=at)


def _deep(value: Any, limit: int) -> bool:
    """Whether lists and objects are nested deeper than `limit`; counted without recursion."""
    level: list[Any] = [value]
    for _ in range(limit + 1):
        if not level:
            return False
        level = [
            entry
            for outer in level
            for entry in (outer.values() if type(outer) is dict else outer)
            if type(entry) is dict or type(entry) is list
        ]
    return True
