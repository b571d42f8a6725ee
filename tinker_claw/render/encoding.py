"""Text to ids, each text once.

Rule: the ids of a text are exactly those that the tokenizer gives for it. An agent sends its system
prompt, its tools and its history again with every request; only what is new is worth encoding.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tinker_claw.render.plain import CutTokenizer

CAPACITY = 96_000_000
"""Bytes of texts and their ids that are kept: some five hundred system prompts of an agent."""
_ENTRY = 300
"""Bytes of what holds a text and its ids together."""
_ASIDE = 8_000
"""Characters from which on encoding is worth the way to another thread: two milliseconds."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text's ids."""

    packed: bytes
    """As little-endian int32: as a tuple they take ten times the room."""
    starts: array[int] | None = None
    """Index in the text of each id's first character; None: it was not asked for."""

    def between(self, start: int, end: int) -> bytes:
        """The packed ids whose first character lies in text[start:end]."""
        assert self.starts is not None
        return self.packed[4 * bisect_left(self.starts, start) : 4 * bisect_left(self.starts, end)]

    @property
    def held(self) -> int:
        """What it takes, in bytes."""
        return _ENTRY + len(self.packed) + (0 if self.starts is None else 4 * len(self.starts))


def unpack(packed: bytes) -> tuple[int, ...]:
    """Ids of little-endian int32."""
    ids = array("i", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)


def pack(ids: Iterable[int]) -> bytes:
    """The reverse of `unpack`."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class Encoder:
    """Remembers what it has encoded, the longest unused forgotten first."""

    def __init__(self, tokenizer: CutTokenizer, capacity: int = CAPACITY) -> None:
        """`capacity`: in bytes."""
        self._tokenizer = tokenizer
        self.tells_starts = tokenizer.tells_starts
        self._capacity = capacity
        self._known: OrderedDict[str, Encoded] = OrderedDict()
        self._held = 0
        # One thread: more of them would only take the processor from the event loop.
        self._thread = ThreadPoolExecutor(1, "encode", initializer=_after_the_event_loop)
        # Texts come one at a time: there is nothing that its own threads could share.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._coming: dict[tuple[str, bool], asyncio.Future[dict[str, Encoded]]] = {}

    def __len__(self) -> int:
        """What it holds, in bytes."""
        return self._held

    def unknown(self, texts: Iterable[str]) -> list[str]:
        """Those of the texts that have yet to be encoded, each once."""
        return [text for text in dict.fromkeys(texts) if text not in self._known]

    async def prepare(
        self, texts: Iterable[str], *, starts: Collection[str] = ()
    ) -> Mapping[str, Encoded]:
        """Encode long texts that are not known yet in a thread, so that the event loop goes on.

        Requests that bring the same text at the same time wait for one encoding of it. What was
        waited for is returned, because it may be more than is remembered.

        Args:
            starts: those of the texts of which it will be asked where their ids begin.
        """
        wanted = [(text, text in starts) for text in dict.fromkeys(texts)]
        missing = [want for want in wanted if not self._knows(*want)]
        if sum(len(text) for text, _ in missing) < _ASIDE:
            return {}
        new = [want for want in missing if want not in self._coming]
        if new:
            loop = asyncio.get_running_loop()
            coming = loop.run_in_executor(self._thread, self._compute, new)
            coming.add_done_callback(self._arrived)
            self._coming |= dict.fromkeys(new, coming)
        ready: dict[str, Encoded] = {}
        for awaited in list(dict.fromkeys(self._coming[want] for want in missing)):
            # Shielded: a client that hangs up must not take it from the others.
            ready |= await asyncio.shield(awaited)
        return ready

    def _knows(self, text: str, starts: bool) -> bool:
        entry = self._known.get(text)
        return entry is not None and not (starts and entry.starts is None)

    def _compute(self, wanted: Sequence[tuple[str, bool]]) -> dict[str, Encoded]:
        return {text: self._encode(text, starts) for text, starts in wanted}

    def _arrived(self, coming: asyncio.Future[dict[str, Encoded]]) -> None:
        self._coming = {want: future for want, future in self._coming.items() if future != coming}
        if not coming.cancelled() and coming.exception() is None:
            self._learn(coming.result())

    def _learn(self, encoded: Mapping[str, Encoded]) -> None:
        for text, entry in encoded.items():
            if not self._knows(text, entry.starts is not None):
                self._forget(text)
                self._known[text] = entry
                self._held += sys.getsizeof(text) + entry.held
        while self._held > self._capacity:
            oldest, entry = self._known.popitem(last=False)
            self._held -= sys.getsizeof(oldest) + entry.held

    def encode(self, text: str, *, starts: bool = False) -> Encoded:
        """Ids of `text`, from memory or anew; `starts`: with where they begin."""
        entry = self._known.get(text)
        if entry is None or (starts and entry.starts is None):
            entry = self._encode(text, starts)
            self._learn({text: entry})
        else:
            self._known.move_to_end(text)
        return entry

    def forget(self, texts: Iterable[str]) -> None:
        """Keep neither text nor ids of these."""
        for text in texts:
            self._forget(text)

    def clear(self) -> None:
        """Keep nothing."""
        self._known.clear()
        self._held = 0

    def _forget(self, text: str) -> None:
        entry = self._known.pop(text, None)
        if entry is not None:
            self._held -= sys.getsizeof(text) + entry.held

    def _encode(self, text: str, with_starts: bool = False) -> Encoded:
        ids, starts = self._tokenizer.encoded(text, with_starts=with_starts)
        return Encoded(pack(ids), starts)


def _after_the_event_loop() -> None:
    """Where both want the same processor, requests that are served go before one that begins."""
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
