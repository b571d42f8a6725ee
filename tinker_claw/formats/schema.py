"""Whether the calls in a reply fit the schemas of strict tools, to which nothing constrains them.

Rule: schema and arguments come from outside, so a check has an end: so many steps, no regular
expressions, nothing fetched. Strict tools are written in a part of JSON Schema, and that is known
here; what is not is taken as fitting. Nothing of the arguments is repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

from tinker_claw.types import ToolCall

_STEPS = 20_000
"""Of one call: a schema and a value looked at together. Schemas can be written so that they refer
to themselves, or that each level doubles the work."""
_DEPTH = 100
_LONG = ("enum", "required", "type", "properties")
"""What a single look goes through."""

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


class _Enough(Exception):
    """It goes on for too long to be told."""


def misfits(tools: Iterable[Mapping[str, Any]], calls: Sequence[ToolCall]) -> str | None:
    """What of the calls breaks the schema of a strict tool, in a sentence; None: nothing."""
    functions = [tool["function"] for tool in tools]
    strict = {f["name"]: f.get("parameters") or {} for f in functions if f.get("strict")}
    found = [
        f"the call of {call.name} does not fit its schema: {why}"
        for call in calls
        if call.name in strict and (why := misfit(strict[call.name], call.arguments))
    ]
    return "; ".join(found) or None


def misfit(schema: Any, arguments: str) -> str | None:
    """Where the arguments of a call do not fit, and how; None: they do, as far as can be told."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return "its arguments are no JSON"
    try:
        return _Check(schema).misfit(schema, value, "arguments", 0)
    except _Enough:
        return None


class _Check:
    """One schema against one value."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0

    def misfit(self, schema: Any, value: Any, at: str, depth: int) -> str | None:
        long = [schema.get(name) for name in _LONG] if isinstance(schema, dict) else []
        self._steps += 1 + sum(len(one) for one in long if isinstance(one, list | dict))
        if self._steps > _STEPS or depth > _DEPTH:
            raise _Enough
        if schema is False:
            return f"{at} must not be there"
        if not isinstance(schema, dict):
            return None
        told = cast("dict[str, Any]", schema)
        if (why := _of_its_kind(told, value)) is not None:
            return f"{at} {why}"
        for part, inner, where in self._parts(told, value, at):
            if (why := self.misfit(part, inner, where, depth + 1)) is not None:
                return why
        for choices in (told.get("anyOf"), told.get("oneOf")):
            options = _list(choices)
            if options and all(self.misfit(one, value, at, depth + 1) for one in options):
                return f"{at} is none of what it may be"
        return None

    def _parts(self, schema: dict[str, Any], value: Any, at: str) -> Iterator[tuple[Any, Any, str]]:
        """Schemas that must hold as well, each with the value that it is about and its name."""
        if isinstance(reference := schema.get("$ref"), str):
            yield self._referred(reference), value, at
        for one in _list(schema.get("allOf")):
            yield one, value, at
        if isinstance(value, dict):
            fields = cast("dict[str, Any]", value)
            properties = _object(schema.get("properties"))
            for name, one in properties.items():
                if name in fields:
                    yield one, fields[name], f"{at}.{name}"
            if "patternProperties" not in schema:
                others = schema.get("additionalProperties", True)
                for name in fields:
                    if name not in properties:
                        yield others, fields[name], f"a field of {at} that is not named"
        elif isinstance(value, list) and "prefixItems" not in schema:
            for n, one in enumerate(cast("list[Any]", value)):
                yield schema.get("items", True), one, f"{at}[{n}]"

    def _referred(self, reference: str) -> Any:
        """The part of this schema that a reference names; True, which all fits, for any other."""
        path, _, pointer = reference.partition("#")
        found = self._root if not path else True
        for name in pointer.split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            found = _object(found).get(key, True)
        return found


def _of_its_kind(schema: dict[str, Any], value: Any) -> str | None:
    """What is wrong with a value by itself."""
    kinds = schema.get("type")
    types = [kinds] if isinstance(kinds, str) else _list(kinds)
    if types and not any(_is(value, name) for name in types):
        return f"is not of type {' or '.join(map(str, types))}"
    allowed = _list(schema.get("enum"))
    if allowed and not any(_same(value, one) for one in allowed):
        return "is none of the values that it may have"
    if "const" in schema and not _same(value, schema["const"]):
        return "is not the value that it must have"
    if isinstance(value, dict):
        wanted = (name for name in _list(schema.get("required")) if isinstance(name, str))
        missing = next((name for name in wanted if name not in value), None)
        return None if missing is None else f"has no field {missing}"
    if isinstance(value, str | list):
        names = ("minLength", "maxLength") if isinstance(value, str) else ("minItems", "maxItems")
        size = len(cast("str | list[Any]", value))
    else:
        names, size = ("minimum", "maximum"), _number(value)
        above = _number(schema.get("exclusiveMinimum"))
        below = _number(schema.get("exclusiveMaximum"))
        if size is not None and above is not None and size <= above:
            return "is too small"
        if size is not None and below is not None and size >= below:
            return "is too large"
    least, most = (_number(schema.get(name)) for name in names)
    if size is not None and least is not None and size < least:
        return "is too small"
    if size is not None and most is not None and size > most:
        return "is too large"
    return None


def _is(value: Any, name: Any) -> bool:
    types = _TYPES.get(name) if isinstance(name, str) else None
    if types is None:
        return True
    if isinstance(value, bool):
        return bool in types
    return isinstance(value, types) or (
        name == "integer" and isinstance(value, float) and value.is_integer()
    )


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
