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
from typing import Any

CAPACITY = 600_000
"""Ids kept, fifty system prompts of an agent. With packed copy and text one takes some fifty bytes,
and every text as much as `_ENTRY` of them."""
_ENTRY = 8
_ASIDE = 8_000
"""Characters from which on encoding is worth the way to another thread: two milliseconds."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text's ids."""

    ids: tuple[int, ...]
    packed: bytes
    """The ids as little-endian int32."""
    starts: array[int] | None = None
    """Index in the text of each id's first character; None: it was not asked for."""

    def between(self, start: int, end: int) -> slice:
        """The ids whose first character lies in text[start:end]."""
        assert self.starts is not None
        return slice(bisect_left(self.starts, start), bisect_left(self.starts, end))


class Encoder:
    """Remembers what it has encoded, the longest unused forgotten first."""

    def __init__(self, tokenizer: Any, capacity: int = CAPACITY) -> None:
        """`tokenizer`: of transformers; a fast one tells where in the text an id begins."""
        self._tokenizer = tokenizer
        self.tells_starts = bool(getattr(tokenizer, "is_fast", False))
        self._capacity = capacity
        self._known: OrderedDict[str, Encoded] = OrderedDict()
        self._held = 0
        # One thread: more of them would only take the processor from the event loop.
        self._thread = ThreadPoolExecutor(1, "encode", initializer=_after_the_event_loop)
        # Texts come one at a time: there is nothing that its own threads could share.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._coming: dict[tuple[str, bool], asyncio.Future[dict[str, Encoded]]] = {}

    def __len__(self) -> int:
        """What it holds, in ids."""
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
                self._held += _ENTRY + len(entry.ids)
        while self._held > self._capacity and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._held -= _ENTRY + len(oldest.ids)

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
            self._held -= _ENTRY + len(entry.ids)

    def _encode(self, text: str, with_starts: bool = False) -> Encoded:
        starts = None
        if self.tells_starts:
            # What the tokenizer's own encode() calls, without a tenth of a millisecond around it.
            backend = self._tokenizer.backend_tokenizer
            if len(text) < _ASIDE:
                found = backend.encode(text, add_special_tokens=False)
            else:  # of a single text it keeps the interpreter's lock, for seconds
                (found,) = backend.encode_batch([text], add_special_tokens=False)
            ids = found.ids
            if with_starts:  # for a long prompt that alone takes milliseconds
                starts = array("i", [start for start, _ in found.offsets])
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        packed = array("i", ids)
        if sys.byteorder == "big":
            packed.byteswap()
        return Encoded(tuple(ids), packed.tobytes(), starts)


def _after_the_event_loop() -> None:
    """Where both want the same processor, requests that are served go before one that begins."""
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
