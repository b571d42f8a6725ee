"""Prompts at the cost of what is new in them: the ids of what came before are remembered.

An agent sends its system prompt, its tools and its history again with every request. Rule: what is
remembered are ids, never text, under a salted digest of all that they were rendered from.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from cachetools import LRUCache

CAPACITY = 72_000_000
"""Bytes that are kept: some four hundred histories or system prompts of 15,000 ids."""
_ENTRY = 600
"""Bytes of an entry besides its ids."""
_NUMBERS: dict[int, int] = {}
"""Every id that was met, so that an id is one number, however often it is kept."""


class Ids(NamedTuple):
    """Ids as the ledger takes them, and as samplers do. Made from one another for every prompt they
    would cost more than rendering what is new in it."""

    packed: bytes
    """As little-endian int32."""
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, ids: Sequence[int]) -> Ids:
        """Pack a list of ids."""
        packed = array("i", ids)
        if sys.byteorder == "big":
            packed.byteswap()
        return cls(packed.tobytes(), tuple(map(_NUMBERS.setdefault, ids, ids)))

    @classmethod
    def joined(cls, parts: Iterable[Ids]) -> Ids:
        """Put ids one after the other."""
        packed, tokens = list[bytes](), list[int]()
        for part in parts:
            packed.append(part.packed)
            tokens.extend(part.tokens)
        return cls(b"".join(packed), tuple(tokens))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered request."""

    tokens: tuple[int, ...]
    hint_at: int | None
    """Index behind the content of the message that a hint belongs to; None: not known."""
    packed: bytes | None = field(default=None, repr=False, compare=False)
    """The tokens as little-endian int32, where they are at hand."""
    begun: int = 0
    """Number of last tokens that are the beginning of the reply, given to the model."""

    def followed_by(self, begun: Sequence[int]) -> Prompt:
        """This prompt, with a reply that begins so."""
        packed = None if self.packed is None else self.packed + Ids.of(begun).packed
        return Prompt((*self.tokens, *begun), self.hint_at, packed, len(begun))


class Known(NamedTuple):
    """The ids of messages in a row."""

    ids: Ids
    hint: int | None = None
    """Index of the message among them at whose end a hint would go; None: nobody has asked."""
    hint_at: int | None = None
    """Index behind the content of that message in these ids; None: not known."""


NOTHING = Known(Ids.of(()))


class PromptCache:
    """Remembers ids by name, the longest unused forgotten first. Any thread may use it."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        """`capacity`: in bytes."""
        self._known = LRUCache[bytes, Known](capacity, getsizeof=_held)
        self._lock = Lock()

    def get(self, name: bytes) -> Known | None:
        """What was kept under this name, if it is still there."""
        with self._lock:
            return self._known.get(name)

    def keep(self, name: bytes, known: Known, instead_of: bytes | None = None) -> None:
        """Remember ids, and no longer those under another name."""
        with self._lock:
            if instead_of is not None:
                self._known.pop(instead_of, None)
            with suppress(ValueError):  # more than there is room for
                self._known[name] = known

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._known.clear()


def _held(known: Known) -> int:
    """Bytes of an entry: four an id packed, and eight for its place in the tuple."""
    return _ENTRY + 12 * len(known.ids.tokens)
