"""Prompt cache: remembers the ids of texts, so that only new ones are encoded.

An agent sends its system prompt, its tools and its history again with every request. Rule: only ids
are kept, never text, under a salted digest of the text.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from threading import Lock
from typing import TypeAlias

from cachetools import LRUCache

CAPACITY = 52_000_000
"""Capacity in bytes: texts of some five million ids."""
_ENTRY = 400
"""Bytes of an entry besides its ids."""
_AT_ONCE = 100_000
"""Ids that are interned in one call, which other threads wait for."""
_NUMBERS: dict[int, int] = {}
"""Interned ids: each is one shared int object, however often it is kept."""


Ids: TypeAlias = tuple[int, ...]


def interned(ids: Sequence[int]) -> Ids:
    """Return the ids as shared int objects."""
    shared = list[int]()
    for at in range(0, len(ids), _AT_ONCE):
        part = ids[at : at + _AT_ONCE]
        shared.extend(map(_NUMBERS.setdefault, part, part))
    return tuple(shared)


class PromptCache:
    """Cache of the ids of texts, evicting the least recently used. Thread-safe."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        """Create a cache of `capacity` bytes."""
        # Eight bytes for each place in the tuple.
        self._entries = LRUCache[bytes, Ids](capacity, lambda ids: _ENTRY + 8 * len(ids))
        self._salt = os.urandom(32)
        self._lock = Lock()

    def get(self, text: str) -> Ids | None:
        """Return the ids of a text, or None."""
        with self._lock:
            return self._entries.get(self._name(text))

    def encoded(self, text: str, encode: Callable[[str], Sequence[int]], *, remembers: bool) -> Ids:
        """Return the ids of a text; `encode` is called on a cache miss."""
        ids = self.get(text)
        if ids is None:
            ids = interned(encode(text))
            if remembers:
                with self._lock, suppress(ValueError):  # larger than the cache
                    self._entries[self._name(text)] = ids
        return ids

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()

    def _name(self, text: str) -> bytes:
        # A guarded text holds halves of surrogate pairs.
        written = text.encode(errors="surrogatepass")
        return blake2b(written, key=self._salt, digest_size=16).digest()
