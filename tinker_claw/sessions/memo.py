"""Results that are asked for again, the least used of them forgotten.

Rule: bounded by the size of what it holds, whatever it holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")
_ENTRY = 500
"""What an entry takes beside its text, bytes."""


class Memo(Generic[T]):
    """Keeps results up to `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self.size = 0
        """Bytes, roughly."""

    def get(self, key: Hashable) -> T | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, value: T, characters: int) -> None:
        """`characters`: of the texts in `key`; up to four bytes each."""
        size = 4 * characters + _ENTRY
        if size > self._capacity // 8:
            return  # one long text must not drive out a hundred others
        if key in self._entries:
            self.size -= self._entries.pop(key)[1]
        self._entries[key] = (value, size)
        self.size += size
        while self.size > self._capacity:
            self.size -= self._entries.popitem(last=False)[1][1]
