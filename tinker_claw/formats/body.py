"""Decode request bodies to JSON objects, and check their members one by one.

Rule: whatever the bytes are, the outcome is an object or a RequestError; every string in the object
can be encoded again. A field of a request is in exactly one table of its format:
honoured fields are read, ignored ones could not change a reply, neutral ones may only hold a value
that asks for nothing. Any other is refused by name, with the reason. A value that was checked has
exactly the type and the range that were asked for. True is not a number, and no comparison turns a
huge integer into a float.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial
from operator import itemgetter
from threading import Lock
from typing import Any, TypeVar, cast

import msgspec
from cachetools import LRUCache

from tinker_claw.errors import RequestError
from tinker_claw.formats.base import GenerationRequest, Route, WireFormat

INT64 = 2**63
_Parsed = TypeVar("_Parsed")
_anything = msgspec.json.Decoder()
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])
_text_or_items = msgspec.json.Decoder(str | list[msgspec.Raw])
_NULL = msgspec.Raw(b"null")
NO_ITEMS = msgspec.Raw(b"[]")


def _decode(
    raw: msgspec.Raw | bytes,
    decoder: msgspec.json.Decoder[_Parsed],
    otherwise: Callable[[], RequestError] | None = None,
) -> _Parsed:
    """Decode JSON. `otherwise`: makes the error where it is of another type than the decoder's."""
    try:
        return decoder.decode(raw)
    except RecursionError as error:
        raise RequestError("The body is nested too deeply.") from error
    except (msgspec.MsgspecError, ValueError) as error:
        # msgspec reports half a surrogate pair as truncated data.
        message = f"The body is not valid JSON, or holds half a surrogate pair: {error}."
        if otherwise is not None and isinstance(error, msgspec.ValidationError):
            raise otherwise() from error
        raise RequestError(message) from error


_ESCAPE = re.compile(
    rb"\\(?:\\|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2}))|(?P<raw>\xed[\xa0-\xbf][\x80-\xbf])"
)
"""An escaped backslash in JSON, a pair, half a pair, or half a pair as no UTF-8 has it."""


def without_halves(raw: bytes) -> bytes:
    """Replace halves of surrogate pairs in JSON by U+FFFD: tools cut texts within an emoji."""
    if not (b"\\ud" in raw or b"\\uD" in raw or b"\xed" in raw):
        return raw  # most, in a tenth of the time
    return _ESCAPE.sub(_whole, raw)


def _whole(match: re.Match[bytes]) -> bytes:
    if match["raw"]:
        return "\ufffd".encode()
    return rb"\ufffd" if match["half"] else match[0]


class Neutral:
    """A field that may be sent as long as it asks for nothing."""

    def __init__(self, because: str, *values: Any) -> None:
        """Accept these values, besides null. `because`: why no other one can be honoured."""
        self.because = because
        self.values = values


class Fields:
    """Fields of an object: those that are honoured, ignored, or accepted with neutral values."""

    def __init__(
        self, honoured: str, ignored: str = "", neutral: Mapping[str, Neutral] | None = None
    ) -> None:
        """`honoured`, `ignored`: names with blanks between them."""
        self.honoured, self.ignored = frozenset(honoured.split()), frozenset(ignored.split())
        self.neutral = neutral or {}

    def check(self, members: Object) -> Object:
        """Return the object.

        Raises:
            RequestError: names its first field that cannot be honoured.
        """
        for name, value in members.items():
            if name in self.honoured or name in self.ignored:
                continue
            neutral = self.neutral.get(name)
            if neutral is None:
                raise members.wrong("is not a field that this server knows", name)
            if not any(_same(value, allowed) for allowed in neutral.values):
                raise members.wrong(f"is not supported with this value: {neutral.because}", name)
        return members


def _same(value: Any, allowed: Any) -> bool:
    """Return whether two values are equal; True does not equal 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


class Object(dict[str, Any]):
    """The members of a JSON object without nulls, which mean absent everywhere.

    Its methods raise RequestError, naming the member, where its value is not of their type.
    """

    __slots__ = ("at",)

    def __init__(self, value: Any, at: str = "") -> None:
        """`value`: None is an empty object; `at`: its path in the body, "" for the body."""
        if value is not None and not isinstance(value, dict):
            raise RequestError(f"{at} must be an object.", param=at)
        sent = cast("dict[str, Any]", value or {})
        super().__init__({name: member for name, member in sent.items() if member is not None})
        self.at = at

    def place(self, name: str) -> str:
        """Path of a member in the body."""
        return f"{self.at}.{shorten_name(name)}" if self.at else shorten_name(name)

    def wrong(self, why: str, name: str | None = None) -> RequestError:
        """Return an error about a member, or the object itself. `why`: the rest of the sentence."""
        at = self.at if name is None else self.place(name)
        return RequestError(f"{at} {why}.", param=at)

    def string(self, name: str, *, empty: bool = False) -> str:
        """A string that must be there, and not be "" unless `empty`."""
        value = self.get(name)
        if not isinstance(value, str) or not (value or empty):
            raise self.wrong("must be a string", name)
        return value

    def text(self, name: str) -> str:
        """A string; "": absent, or empty."""
        return self.string(name, empty=True) if name in self else ""

    def one_of(self, name: str, choices: Collection[str], default: str | None = None) -> str:
        value = self.get(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(f"must be one of {', '.join(choices)}", name)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong("must be true or false", name)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in [low, high); None: absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong("must be an integer", name)
        if not low <= value < high:
            raise self.wrong(f"must be at least {low} and below {high}", name)
        return value

    def number(
        self, name: str, low: float, high: float, default: float, *, open_low: bool = False
    ) -> float:
        """A number in [low, high], or in (low, high] where `open_low`."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong("must be a number", name)
        if not low <= value <= high or (open_low and value == low):
            least = f"above {low}" if open_low else f"at least {low}"
            raise self.wrong(f"must be {least} and at most {high}", name)
        return float(value)

    def object(self, name: str, fields: Fields | None = None) -> Object:
        """An object that may have these fields; None: any. An absent one is empty."""
        inner = Object(self.get(name), self.place(name))
        return inner if fields is None else fields.check(inner)

    def scalars(self, name: str, why: str) -> Object:
        """An object of strings, numbers and booleans. `why`: the error for any other value."""
        inner = self.object(name)
        for member, value in inner.items():
            if not isinstance(value, str | int | float):
                raise inner.wrong(why, member)
        return inner

    def listed(self, name: str, *, required: bool = False) -> list[Any]:
        value = self.get(name, None if required else [])
        if not isinstance(value, list):
            raise self.wrong("must be a list", name)
        return cast("list[Any]", value)

    def objects(self, name: str, *, required: bool = False) -> list[Object]:
        """The objects in a list."""
        at = self.place(name)
        entries = self.listed(name, required=required)
        return [Object(entry, f"{at}[{i}]") for i, entry in enumerate(entries)]


def members(value: Any) -> dict[str, Any]:
    """Return the members of an object; {}: the value is none."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def decoded(raw: msgspec.Raw) -> Any:
    """Return the value of a part of a body."""
    return _decode(raw, _anything)


def load_body(body: bytes, raw: Collection[str] = ()) -> Object:
    """Decode a JSON object.

    Args:
        raw: fields that are not decoded, but left as `msgspec.Raw`.

    Raises:
        RequestError: it is not one, or holds invalid text.
    """
    fields = _decode(body, _members, lambda: RequestError("The body must be a JSON object."))
    return Object(
        {
            name: value if name in raw and value != _NULL else decoded(value)
            for name, value in fields.items()
        }
    )


def raw_items(fields: Object, name: str, wanted: str, *, text: bool = False) -> Any:
    """Return the items of a list, not decoded, or a string; neither is empty.

    Args:
        wanted: what the field must be, for the error about any other value.
        text: whether it may be a string.
    """
    wrong = partial(fields.wrong, f"must be {wanted}", name)
    items = _decode(fields.get(name, _NULL), _text_or_items if text else _items, wrong)
    if not items:
        raise wrong()
    return items


ROOM = 64_000_000
"""Bytes of the cache of parsed parts: some hundred long sessions."""
_ENTRY = 1000
"""Bytes that a cached part takes besides those counted by its length."""


class PartCache:
    """Cache of parsed parts of earlier requests: a session sends its history again with each. Every
    user has their own, so that nobody can tell by response times what others have said.
    """

    def __init__(self, room: int = ROOM) -> None:
        """`room`: bytes."""
        self.parsed = LRUCache[Any, tuple[int, Any]](room, getsizeof=itemgetter(0))
        """Size and value of each part, by its key."""
        self.lock = Lock()
        """Held for a moment: the event loop reads, and so does a thread, for large bodies."""


class PartReader:
    """Reads the parts of one body, those of its user's earlier requests from the cache."""

    def __init__(self, cache: PartCache, user: str) -> None:
        self._cache = cache
        self._user = user
        self._new = dict[Any, Any]()

    def read(self, make: Callable[[Any, str], _Parsed], raw: msgspec.Raw, at: str) -> _Parsed:
        """Decode a part, and call the function with it and with its place, for an error."""
        return self.cached(lambda: make(decoded(raw), at), make, bytes(raw))

    def cached(self, find_out: Callable[[], _Parsed], name: Any, *parts: bytes) -> _Parsed:
        """Return what a function returns, or has returned for the same parts under this name."""
        key = self._user, name, *parts
        with self._cache.lock:
            _, part = self._cache.parsed.get(key, (0, None))
        if part is not None:
            return part
        if key not in self._new:
            self._new[key] = find_out()
        return self._new[key]

    def remember(self) -> None:
        """Cache the parts that were new."""
        for key, part in self._new.items():
            room = _ENTRY + 4 * sum(map(len, key[2:]))
            with self._cache.lock:
                if room <= self._cache.parsed.maxsize:
                    self._cache.parsed[key] = room, part


class CachingFormat(WireFormat):
    """A format that caches the parsed parts of earlier requests.

    Its requests' `own` holds their reader.
    """

    fields: Fields
    raw: Collection[str]
    """Fields that are read part by part."""

    def __init__(self) -> None:
        self._cache = PartCache()

    def parse(self, body: bytes, route: Route, user: str) -> GenerationRequest:
        reader = PartReader(self._cache, user)
        request = self.request(self.fields.check(load_body(body, self.raw)), route, reader)
        request.own["reader"] = reader
        return request

    @abstractmethod
    def request(self, fields: Object, route: Route, reader: PartReader) -> GenerationRequest:
        """Read the fields of a body, whose names are all known; see `parse`."""

    def remember(self, request: GenerationRequest, user: str) -> None:
        request.own["reader"].remember()

    def forget(self) -> None:
        self._cache = PartCache()  # another: requests that were read before know the old one


def shorten_name(name: str) -> str:
    """Shorten a client's own name for something, to be sent back."""
    return name if len(name) <= 80 else f"{name[:80]}…"
