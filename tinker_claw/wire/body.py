"""Bytes to a JSON object that is safe to work with.

Rule: whatever the bytes are, the outcome is an object or a RequestError; no string in the object
is one that cannot be encoded again, and no name in it was given twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn, cast

from tinker_claw.errors import RequestError
from tinker_claw.wire.values import shown

# An escaped surrogate. Most bodies hold none, and then no string needs a second look.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def load_body(body: bytes) -> dict[str, Any]:
    """The non-null fields of a JSON object.

    Raises:
        RequestError: it is none, holds text that is no text, or says something twice.
    """
    try:
        fields = json.loads(
            body.decode(), parse_constant=_refuse_constant, object_pairs_hook=_object
        )
    except RecursionError as error:
        raise RequestError("The body is nested too deeply.") from error
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise RequestError("The body must be a JSON object.")
    fields = cast("dict[str, Any]", fields)
    if _SURROGATE.search(body):
        _refuse_lone_surrogates(fields)
    # null means absent, everywhere in this API.
    return {name: value for name, value in fields.items() if value is not None}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a name given twice, parsers keep one; which one was meant is for the client to say."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    twice = next(name for name, _ in pairs if name in seen or seen.add(name))
    told = _encodable(shown(twice))
    raise RequestError(f"The body gives {told} twice in one object.", param=told)


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def _refuse_lone_surrogates(fields: dict[str, Any]) -> None:
    """Half a surrogate pair is no text: it cannot be encoded, tokenised or stored."""
    for path, text in _strings(fields):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            at = _encodable(path)
            raise RequestError(f"{at} holds half a surrogate pair.", param=at) from error


def _strings(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every string with its path, keys included; a stack, because bodies may be deep."""
    stack: list[tuple[str, Any]] = [(shown(name), value) for name, value in fields.items()]
    yield from ((shown(name), name) for name in fields)
    while stack:
        path, value = stack.pop()
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, list):
            stack.extend((f"{path}[{i}]", v) for i, v in enumerate(cast("list[Any]", value)))
        elif isinstance(value, dict):
            inner = cast("dict[str, Any]", value)
            yield from ((path, name) for name in inner)
            stack.extend((f"{path}.{shown(name)}", v) for name, v in inner.items())
