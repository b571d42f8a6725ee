"""Bytes to a JSON object that is safe to work with, and its values, checked one by one.

Rule: whatever the bytes are, the outcome is an object or a RequestError; no string in the object
is one that cannot be encoded again, and no name in it was given twice. A value that was checked has
exactly the type and the range that were asked for; anything else is refused by name. True is no
number, and no comparison turns a huge integer into a float.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, NoReturn, cast

import msgspec

from tinker_claw.errors import RequestError

INT64 = 2**63
# An escaped surrogate. Most bodies hold none, and then no string needs a second look.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def load_body(body: bytes) -> dict[str, Any]:
    """The non-null fields of a JSON object.

    Raises:
        RequestError: it is none, holds text that is no text, or says something twice.
    """
    try:
        fields = _loaded(body)
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


def _loaded(text: bytes) -> Any:
    return _decoder.decode(text.decode())


class Unread(Exception):
    """Not to be read piece by piece: whoever reads the whole body says what is wrong, if anything
    is."""


_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


def pieces_of(body: bytes) -> dict[str, bytes]:
    """The non-null members of an object that is written without blanks, as their bytes. That they
    are JSON is not known of each: whoever reads one finds out.

    Raises:
        Unread: it is something else, or says something twice.
    """
    try:
        found = _MEMBERS.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unread from error
    told: list[Any] = []
    for name, value in found.items():
        told += [b",", msgspec.json.encode(name), b":", value]
    if b"".join([b"{", *told[1:], b"}"]) != body:
        raise Unread
    return {name: piece for name, value in found.items() if (piece := bytes(value)) != b"null"}


def items_of(piece: bytes) -> list[bytes]:
    """The items of a list, as their bytes.

    Raises:
        Unread: it is no list.
    """
    try:
        return list(map(bytes, _ITEMS.decode(piece)))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unread from error


def load_piece(piece: bytes) -> Any:
    """The value in a piece.

    Raises:
        Unread: it is not what a body may hold.
    """
    try:
        value = _loaded(piece)
        if _SURROGATE.search(piece):
            _refuse_lone_surrogates({"": value})
    except (RecursionError, ValueError, RequestError) as error:
        raise Unread from error
    return value


ROOM = 64_000_000
"""For what was made of pieces, in bytes: some hundred long sessions."""
_ENTRY = 1000
"""What a piece takes beside its bytes, its text, and what was found out about it; bytes."""


class KnownPieces:
    """What was made of pieces of earlier requests, by their bytes. A session sends its history
    again with every request. Nobody learns by the time that it takes what others have said: to
    every user only their own are known.

    Once half of the room is full, what is not asked for until the other half is full is forgotten.
    To count which one was asked for last would cost more than all that is done of a known message.
    """

    def __init__(self, room: int = ROOM) -> None:
        """`room`: bytes."""
        self._half = room // 2
        self._new: dict[str, dict[bytes, Any]] = {}
        self._old: dict[str, dict[bytes, Any]] = {}
        self._size = 0
        self._lock = Lock()  # large bodies are read in a thread

    def of(self, user: str, pieces: Sequence[bytes]) -> dict[bytes, Any]:
        """What was made of those that are known."""
        with self._lock:
            new, old = self._new.get(user, {}), self._old.get(user, {})
            found = {piece: new[piece] for piece in pieces if piece in new}
            if old and len(found) < len(pieces):
                again = {p: old[p] for p in pieces if p in old and p not in found}
                self._add(user, again)
                found |= again
            return found

    def learn(self, user: str, made: Mapping[bytes, Any]) -> None:
        with self._lock:
            self._add(user, made)

    def clear(self) -> None:
        with self._lock:
            self._new, self._old, self._size = {}, {}, 0

    def _add(self, user: str, made: Mapping[bytes, Any]) -> None:
        for piece, value in made.items():
            size = _ENTRY + 4 * len(piece)
            if self._size + size > self._half:
                self._old, self._new, self._size = self._new, {}, 0
            if size <= self._half:
                self._new.setdefault(user, {})[piece] = value
                self._size += size


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


# One for all: to make it takes longer than to read most fields.
_decoder = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_object)


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


def string(value: Any, at: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise RequestError(f"{at} must be a string.", param=at)
    return value


def flag(value: Any, at: str, default: bool = False) -> bool:
    """None means absent."""
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{at} must be true or false.", param=at)
    return value


def integer(value: Any, at: str, low: int, high: int) -> int:
    """An integer in [low, high)."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{at} must be an integer.", param=at)
    if not low <= value < high:
        raise RequestError(f"{at} must be at least {low} and below {high}.", param=at)
    return value


def number(value: Any, at: str, low: float, high: float, *, open_low: bool = False) -> float:
    """A number in [low, high], or in (low, high] where `open_low`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError(f"{at} must be a number.", param=at)
    if not low <= value <= high or (open_low and value == low):
        least = f"above {low}" if open_low else f"at least {low}"
        raise RequestError(f"{at} must be {least} and at most {high}.", param=at)
    return float(value)


def members(value: Any, at: str) -> dict[str, Any]:
    """The non-null members of an object; None means absent."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{at} must be an object.", param=at)
    inner = cast("dict[str, Any]", value)
    return {name: entry for name, entry in inner.items() if entry is not None}


def items(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{at} must be a list.", param=at)
    return cast("list[Any]", value)


def shown(name: str) -> str:
    """A client's own name for something, short enough to be sent back."""
    return name if len(name) <= 80 else f"{name[:80]}…"
