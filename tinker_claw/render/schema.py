"""Types of arguments that a chat format writes as bare text.

Rule: what a tool's JSON Schema allows as text stays text. Only where it does not, the value is read
as JSON. Checked are types, enum and const, through $ref, anyOf, oneOf and allOf; the agent checks
the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from math import isfinite
from typing import Any, NoReturn, cast

_WORDS = {"True": True, "False": False, "None": None}
"""Spellings in the templates of some formats."""
_KINDS: Mapping[Any, Any] = {
    "string": str,
    "number": (int, float),
    "object": dict,
    "array": list,
    "null": type(None),
}
_DEEPEST = 32
"""Most references and alternatives within each other; a schema may refer to itself."""


def typed(text: str, name: str, parameters: Any) -> Any:
    """Return the value of an argument.

    Args:
        parameters: the schema of all arguments.
    """
    schema = _of(name, parameters)
    if _accepts(schema, text, parameters):
        return text
    try:
        value = json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError):
        value = _WORDS.get(text.strip(), text)
    if isinstance(value, float) and not isfinite(value):
        return text
    return value if _accepts(schema, value, parameters) else text


def _of(name: str, parameters: Any) -> Any:
    """Return the schema of one argument; True: there is none."""
    if not isinstance(parameters, Mapping):
        return True
    schema = cast("Mapping[str, Any]", parameters)
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return cast("Mapping[str, Any]", properties)[name]
    others = schema.get("additionalProperties", True)
    return others if isinstance(others, Mapping) else True


def _accepts(schema: Any, value: Any, root: Any, depth: int = 0) -> bool:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return schema is not False
    keywords = cast("Mapping[str, Any]", schema)
    accepts = partial(_accepts, value=value, root=root, depth=depth + 1)
    if value is None and keywords.get("nullable") is True:
        return True
    choices = [keywords["const"]] if "const" in keywords else keywords.get("enum")
    if isinstance(choices, list) and not any(_same(choice, value) for choice in choices):
        return False
    if "$ref" in keywords and not accepts(_target(keywords["$ref"], root)):
        return False
    for name, holds in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        inner = keywords.get(name)
        if isinstance(inner, list) and not holds(map(accepts, inner)):
            return False
    types = _types(keywords)
    return not types or any(_is(value, kind) for kind in types)


def _types(schema: Mapping[str, Any]) -> list[Any]:
    """Return the types that a schema names, or that its keywords are about."""
    named = schema.get("type")
    if named is not None:
        return cast("list[Any]", named) if isinstance(named, list) else [named]
    about = {"properties": "object", "items": "array"}
    return [kind for keyword, kind in about.items() if keyword in schema]


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, _KINDS.get(kind, ()))


def _same(wanted: Any, value: Any) -> bool:
    return wanted == value and isinstance(wanted, bool) == isinstance(value, bool)


def _target(ref: Any, root: Any) -> Any:
    """Return the schema that a reference names; True: it is not found."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return True
    target = root
    for step in ref.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or step not in target:
            return True
        target = cast("Mapping[str, Any]", target)[step]
    return target


def no_constant(text: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python's JSON reads."""
    raise ValueError(f"{text} is not in JSON")
