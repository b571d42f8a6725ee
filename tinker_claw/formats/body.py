"""Bytes to a JSON object that is safe to work with, and its values, checked one by one.

Rule: whatever the bytes are, the outcome is an object or a RequestError; no string in the object
is one that cannot be encoded again. A value that was checked has exactly the type and the range
that were asked for; anything else is refused by name. True is no number, and no comparison turns a
huge integer into a float.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from threading import Lock
from typing import Any, TypeVar, cast

import msgspec

from tinker_claw.errors import RequestError

INT64 = 2**63
_Made = TypeVar("_Made")
_anything = msgspec.json.Decoder()
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])
_NULL = msgspec.Raw(b"null")


def _decode(
    raw: msgspec.Raw | bytes,
    decoder: msgspec.json.Decoder[_Made],
    otherwise: RequestError | None = None,
) -> _Made:
    """`otherwise`: raised of JSON that is of another type than the decoder's."""
    try:
        return decoder.decode(raw)
    except RecursionError as error:
        raise RequestError("The body is nested too deeply.") from error
    except (msgspec.MsgspecError, ValueError) as error:
        # Of half a surrogate pair, which no text holds, it says that the data were truncated.
        told = f"The body is not valid JSON, or holds half a surrogate pair: {error}."
        other = otherwise if isinstance(error, msgspec.ValidationError) else None
        raise other or RequestError(told) from error


def load_body(body: bytes, raw: Collection[str] = ()) -> dict[str, Any]:
    """Decode a JSON object, without its null fields.

    Args:
        raw: fields that are left as they stand, as `msgspec.Raw`.

    Raises:
        RequestError: it is none, or holds text that is no text.
    """
    fields = _decode(body, _members, RequestError("The body must be a JSON object."))
    # null means absent, everywhere in this API.
    return {
        name: value if name in raw else _decode(value, _anything)
        for name, value in fields.items()
        if value != _NULL
    }


def raw_items(value: msgspec.Raw | None, at: str) -> list[msgspec.Raw]:
    """The items of a list, as they stand.

    Raises:
        RequestError: it is none.
    """
    return _decode(value or _NULL, _items, RequestError(f"{at} must be a list.", param=at))


ROOM = 64_000_000
"""Bytes of what is known of earlier requests: some hundred long sessions."""
_ENTRY = 1000
"""Bytes of a part beside its own, its text's, and those of what was found out about it."""

Read = Callable[[Callable[[Any, str], Any], msgspec.Raw, str], Any]
"""Decode a part of a body, and call the function with it and with its place, for an error."""


def anew(make: Callable[[Any, str], _Made], raw: msgspec.Raw, at: str) -> _Made:
    """Read a part of a body of which nothing is known."""
    return make(_decode(raw, _anything), at)


class Known:
    """What was made of parts of earlier requests: a session sends its history again with each. To
    every user only their own are known, so that nobody learns by the time that it takes what others
    have said. A full room is emptied, and every session pays for its history once more.
    """

    def __init__(self, room: int = ROOM) -> None:
        """`room`: bytes."""
        self._room = self._left = room
        self._made: dict[Any, Any] = {}
        self._lock = Lock()  # large bodies are read in a thread

    def reader(self, user: str, new: dict[Any, Any]) -> Read:
        """Read parts of a body of this user's; what was made of unknown ones goes into `new`."""

        def read(make: Callable[[Any, str], Any], raw: msgspec.Raw, at: str) -> Any:
            key = user, make, bytes(raw)
            found = self._made.get(key)
            if found is None:
                found = new[key] = anew(make, raw, at)
            return found

        return read

    def learn(self, made: Mapping[Any, Any]) -> None:
        """Remember what a reader has found to be new."""
        with self._lock:
            for key, value in made.items():
                size = _ENTRY + 4 * len(key[-1])
                if self._left < size <= self._room:
                    self._made, self._left = {}, self._room
                if size <= self._left:
                    self._made[key] = value
                    self._left -= size

    def clear(self) -> None:
        """Forget all of it."""
        with self._lock:
            self._made, self._left = {}, self._room


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
