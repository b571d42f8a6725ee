"""Values of the types that the official clients send, made from the types themselves."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterator
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
)

from pydantic import TypeAdapter
from typing_extensions import get_type_hints, is_typeddict

from tests.support.pictures import picture, url_of

IMAGE = picture(96, 64)
_SPECIAL: dict[str, Any] = {
    "data": base64.b64encode(IMAGE).decode(),
    "image_url": url_of(IMAGE),
    "file_data": "data:application/pdf;base64," + base64.b64encode(b"%PDF-1.7 " * 200).decode(),
    "result": base64.b64encode(IMAGE).decode(),
    "encrypted_content": "Zm9v" * 500,
    "input": {"path": "a.txt"},
    "arguments": '{"path": "a.txt"}',
}
"""Values of members by name, where the type is only a text, or anything."""


def values(hint: Any, name: str = "", depth: int = 0) -> Iterator[Any]:
    """Yield a value for each alternative of a type."""
    origin = get_origin(hint)
    if origin in (Annotated, Required, NotRequired):
        yield from values(get_args(hint)[0], name, depth)
    elif origin in (Union, UnionType):
        for one in get_args(hint):
            if one is not NoneType:
                yield from values(one, name, depth)
    elif origin is Literal:
        yield get_args(hint)[0]
    elif is_typeddict(hint):
        yield from _objects(hint, depth + 1)
    elif origin is dict or hint is dict:
        yield {"path": "a.txt"}
    elif origin is not None:  # Iterable, list, Sequence
        yield from ([one] for one in values(get_args(hint)[0], name, depth))
    elif hint is bool:
        yield True
    elif hint in (int, float):
        yield 1
    else:
        yield _SPECIAL.get(name, f"the {name}")


def _objects(kind: Any, depth: int) -> Iterator[dict[str, Any]]:
    """Yield objects with all members, varied one at a time, and one with the fewest."""
    hints = get_type_hints(kind, include_extras=True)
    each = {n: list(values(hint, n, depth)) for n, hint in hints.items()} if depth < 6 else {}
    whole = {name: found[0] for name, found in each.items() if found}
    yield whole
    for name, found in each.items():
        yield from (whole | {name: other} for other in found[1:])
    fewest = {name: whole[name] for name in whole if get_origin(hints[name]) is Required}
    if fewest != whole and depth == 1:
        yield fewest


def read_stream(kind: Any, streamed: bytes, *, untyped: Collection[str] = ()) -> list[Any]:
    """Streamed events, each checked against the client's own type unless it has none."""
    found: list[Any] = []
    for block in streamed.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        if told["type"] not in untyped:
            TypeAdapter(kind).validate_python(told)
        found.append(told)
    return found
