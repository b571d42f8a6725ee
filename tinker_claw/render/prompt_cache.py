"""Prompts at the cost of what is new in them: layouts, and the ids of texts and histories.

Rules: the chat format's code runs unchanged over a tokenizer that hands out a placeholder for each
text instead of its ids, and the ids are put in afterwards. The result is what the format gives with
the real tokenizer as long as it does not look into the ids that it is given; `Format` tries that
out, and whatever a layout cannot tell is rendered the plain way. A plain render costs by the id, a
layout by the message.

The ids of a text are exactly those that the tokenizer gives for it. An agent sends its system
prompt, its tools and its history again with every request: the ids of texts are remembered, and of
a conversation those of all messages up to a place from which it may go on.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
from array import array
from bisect import bisect_left
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from cachetools import LRUCache

from tinker_claw.render.outside_text import CutTokenizer

_FRAME = 512
"""Characters that a format puts around a message's content in one text, at the very most."""


class UnknownPlaceholder(Exception):
    """A layout holds an id that is none of its own: the format keeps ids between renders."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A stretch of one encoded text: the ids that begin in text[start:end]."""

    text: str
    start: int = 0
    end: int | None = None
    """None: to its end, uncut."""
    mixed: bool = False
    """Content and frame are in it, and it is not known where the one ends."""


class Ids(NamedTuple):
    """Ids as the ledger takes them, and as samplers do. Made from one another for every prompt they
    would cost more than the layout; an id is one number, however often it is kept."""

    packed: bytes
    """As little-endian int32."""
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, ids: Sequence[int]) -> Ids:
        packed = array("i", ids)
        if sys.byteorder == "big":
            packed.byteswap()
        return cls(packed.tobytes(), tuple(map(_NUMBERS.__getitem__, ids)))

    @classmethod
    def joined(cls, parts: Iterable[Ids]) -> Ids:
        packed, tokens = list[bytes](), list[int]()
        for part in parts:
            packed.append(part.packed)
            tokens.extend(part.tokens)
        return cls(b"".join(packed), tuple(tokens))

    def cut(self, start: int, end: int | None = None) -> Ids:
        last = None if end is None else 4 * end
        return Ids(self.packed[4 * start : last], self.tokens[start:end])

    @property
    def held(self) -> int:
        """What they take, in bytes."""
        return 12 * len(self.tokens)


class _Numbers(dict[int, int]):
    def __missing__(self, token: int) -> int:
        self[token] = token
        return token


class _Single(dict[int, Ids]):
    def __missing__(self, token: int) -> Ids:
        ids = self[token] = Ids.of([token])
        return ids


_NUMBERS = _Numbers()
"""Every id that was met."""
_ONE = _Single()
"""Those among them that formats write by themselves, alone."""

_NOTHING = Ids.of([])

Piece: TypeAlias = TextPiece | Ids
"""What a placeholder stands for."""


class PlaceholderTokenizer:
    """A tokenizer for chat formats that writes down what it was asked to encode.

    Placeholders are negative and never used twice.
    """

    def __init__(self, tokenizer: CutTokenizer, encoder: Encoder) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._open: dict[int, Piece] | None = None
        self._content: str | None = None
        self._last = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    @contextmanager
    def recording(self, content: str | None) -> Generator[Mapping[int, Piece]]:
        """Hand out placeholders; yields what they stand for.

        Args:
            content: a message's content, whose ids must be told from those around it.
        """
        self._open, self._content = {}, content
        try:
            yield self._open
        finally:
            self._open = None

    def encode(self, text: str, *args: Any, **options: Any) -> list[int]:
        if self._open is None:
            return self._tokenizer.encode(text, *args, **options)
        return [self._placeholder(TextPiece(text))] if text else []

    def known(self, ids: Ids) -> int:
        """A placeholder for ids that are at hand."""
        return self._placeholder(ids)

    def __call__(self, text: str, *args: Any, **options: Any) -> Any:
        if self._open is None or not options.get("return_offsets_mapping"):
            return self._tokenizer(text, *args, **options)
        if not self._encoder.tells_starts:
            raise NotImplementedError
        cuts = self._cuts(text)
        pieces = [(a, b, TextPiece(text, a, b)) for a, b in pairwise(cuts)]
        if len(pieces) == 1:
            pieces = [(0, len(text), TextPiece(text, mixed=text != self._content))]
        return {
            "input_ids": [self._placeholder(piece) for _, _, piece in pieces],
            "offset_mapping": [(start, end) for start, end, _ in pieces],
        }

    def _placeholder(self, piece: Piece) -> int:
        assert self._open is not None
        self._last -= 1
        self._open[self._last] = piece
        return self._last

    def _cuts(self, text: str) -> list[int]:
        """Where `content` may begin or end in `text`, which holds it and little else."""
        found = {0, len(text)}
        content = self._content or ""
        if len(text) - len(content) <= _FRAME:
            for form in {content, content.strip()} - {""}:  # some formats strip it
                at = text.find(form)
                while at >= 0:
                    found |= {at, at + len(form)}
                    at = text.find(form, at + 1)
        return sorted(found)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered request."""

    tokens: tuple[int, ...]
    hint_at: int | None
    """Index behind the content of the message that a hint belongs to; None: not known."""
    packed: bytes | None = field(default=None, repr=False, compare=False)
    """The tokens as little-endian int32, where they are at hand."""
    begun: int = 0
    """So many of the last tokens are the beginning of the reply, which was given to the model."""

    def followed_by(self, begun: Sequence[int]) -> Prompt:
        """This prompt, with a reply that begins so."""
        packed = None if self.packed is None else self.packed + Ids.of(begun).packed
        return Prompt((*self.tokens, *begun), self.hint_at, packed, len(begun))


@dataclass(frozen=True, slots=True)
class History:
    """The ids of the messages between the system message and one of the user's."""

    ids: Ids
    hint: int | None
    """Index of the message at whose end a hint would go; None: it is not among these."""
    hint_at: int | None
    """Index behind the content of that message in these ids; None: not known."""

    def parts(self) -> list[Ids]:
        """Up to the place for a hint, and what is behind it."""
        if self.hint_at is None:
            return [self.ids]
        return [self.ids.cut(0, self.hint_at), self.ids.cut(self.hint_at)]

    @property
    def held(self) -> int:
        """What it takes, in bytes."""
        return _ENTRY + self.ids.held


@dataclass(frozen=True, slots=True)
class Keep:
    """What of a prompt is remembered for the request that goes on from it."""

    digest: bytes
    """Of the messages."""
    start: int
    """Index in the layout's ids."""
    end: int
    hint: int | None
    """As in `History`."""
    instead_of: bytes | None
    """The digest of the shorter history that this one goes on from."""


class PromptLayout:
    """Ids and placeholders of one prompt."""

    def __init__(
        self,
        encoder: Encoder,
        ids: Sequence[int],
        pieces: Mapping[int, Piece],
        hint_at: int | None,
        keep: Sequence[Keep] = (),
    ) -> None:
        """
        Args:
            hint_at: index into `ids` behind the content that a hint belongs to.
            keep: what is to be remembered once it is encoded.

        Raises:
            UnknownPlaceholder: not every placeholder has its piece.
        """
        if not all(entry >= 0 or entry in pieces for entry in ids):
            raise UnknownPlaceholder
        self._encoder = encoder
        self._ids = ids
        self._hint_at = hint_at
        self._keep = keep
        places = {hint_at, *(place for it in keep for place in (it.start, it.end))}
        self._parts = _uncut(ids, pieces, places) if pieces else []
        self._ready: Mapping[str, Encoded] = {}

    async def prepare(self) -> None:
        """Encode what is new and long without holding up the event loop."""
        pieces = self._texts()
        cut = {piece.text for piece in pieces if piece.end is not None}
        self._ready = await self._encoder.prepare([piece.text for piece in pieces], starts=cut)

    @contextmanager
    def forgetting(self) -> Generator[None]:
        """What is encoded for the first time inside is not remembered."""
        self._keep = ()
        new = self._encoder.unknown(piece.text for piece in self._texts())
        try:
            yield
        finally:
            self._encoder.forget(new)

    def prompt(self) -> Prompt:
        """Put the ids in."""
        if not self._parts:
            return Prompt(tuple(self._ids), self._hint_at)
        parts = [self._encoded(part) for part in self._parts]
        hint_at = None if self._hint_at is None else _count(parts[: self._hint_at])
        for keep in self._keep:
            self._remember(keep, parts, hint_at)
        ids = Ids.joined(parts)
        return Prompt(ids.tokens, hint_at, ids.packed)

    def _remember(self, keep: Keep, parts: Sequence[Ids], hint_at: int | None) -> None:
        ids = Ids.joined(parts[keep.start : keep.end])
        if keep.hint is None or hint_at is None:
            history = History(ids, keep.hint, None)
        else:
            history = History(ids, keep.hint, hint_at - _count(parts[: keep.start]))
        self._encoder.remember(keep.digest, history, keep.instead_of)

    def _texts(self) -> list[TextPiece]:
        return [piece for piece in self._parts if isinstance(piece, TextPiece)]

    def _encoded(self, piece: Piece) -> Ids:
        if isinstance(piece, Ids):
            return piece
        known = self._ready.get(piece.text)
        if piece.end is None:
            return (known or self._encoder.encode(piece.text)).ids
        if known is None or known.starts is None:
            known = self._encoder.encode(piece.text, starts=True)
        # A cut at the very end takes ids that begin behind it, too: bytes of a last character.
        return known.between(piece.start, piece.end if piece.end < len(piece.text) else 2**62)


def _uncut(ids: Sequence[int], pieces: Mapping[int, Piece], places: Set[int | None]) -> list[Piece]:
    """What stands for each of the ids. A text that was cut where nobody has to know is whole again,
    and nothing stands for the rest of it: where ids begin costs far more to find than the ids.

    Args:
        places: indexes of ids between which and the one before it has to be known.
    """
    found: list[Piece] = []
    first, behind = 0, None
    for at, entry in enumerate(ids):
        piece = _ONE[entry] if entry >= 0 else pieces[entry]
        found.append(piece)
        if not isinstance(piece, TextPiece) or piece.end is None:
            behind = None
            continue
        if piece.start == 0:
            first = at
        elif behind != (piece.text, piece.start):
            first = len(ids)  # not all of it is here
        behind = piece.text, piece.end
        if (
            piece.end == len(piece.text)
            and first <= at
            and places.isdisjoint(range(first + 1, at + 1))
        ):
            found[first:] = [TextPiece(piece.text), *[_NOTHING] * (at - first)]
    return found


def _count(parts: Iterable[Ids]) -> int:
    return sum(len(part.tokens) for part in parts)


CAPACITY = 144_000_000
"""Bytes that are kept: three quarters for texts and their ids, some five hundred system prompts of
an agent; one for histories and what is in front of them, some two hundred of 15,000 ids.
"""
_ENTRY = 300
"""Bytes of what holds a text and its ids together."""
_ASIDE = 8_000
"""Characters from which on encoding is worth the way to another thread: two milliseconds."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text and its ids."""

    text: str
    ids: Ids
    starts: array[int] | None = None
    """Index in the text of each id's first character; None: it was not asked for."""

    def between(self, start: int, end: int) -> Ids:
        """Those whose first character lies in text[start:end]."""
        assert self.starts is not None
        return self.ids.cut(bisect_left(self.starts, start), bisect_left(self.starts, end))

    @property
    def held(self) -> int:
        """What it takes, in bytes."""
        starts = 0 if self.starts is None else 4 * len(self.starts)
        return _ENTRY + sys.getsizeof(self.text) + self.ids.held + starts


class Encoder:
    """Remembers what it has encoded, the longest unused forgotten first."""

    def __init__(self, tokenizer: CutTokenizer, capacity: int = CAPACITY) -> None:
        """`capacity`: in bytes."""
        self._tokenizer = tokenizer
        self.tells_starts = tokenizer.tells_starts
        texts = capacity - capacity // 4
        self._known = LRUCache[str, Encoded](texts, getsizeof=lambda entry: entry.held)
        self._histories = LRUCache[bytes, History](capacity // 4, getsizeof=lambda it: it.held)
        # One thread: more of them would only take the processor from the event loop.
        self._thread = ThreadPoolExecutor(1, "encode", initializer=_after_the_event_loop)
        # Texts come one at a time: there is nothing that its own threads could share.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._coming: dict[tuple[str, bool], asyncio.Future[dict[str, Encoded]]] = {}
        self._quickening = False

    def __len__(self) -> int:
        """What it holds, in bytes."""
        return int(self._known.currsize + self._histories.currsize)

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
        found = {text: self._encode(text, starts) for text, starts in wanted}
        if not self._quickening:  # whoever sends long texts once will do so again
            self._quickening = True
            texts = [text for text, _ in wanted]
            # No daemon: an interpreter that ends under native code is aborted.
            threading.Thread(target=self._quicken, args=(texts,), name="fast tokenizer").start()
        return found

    def _quicken(self, met: Sequence[str]) -> None:
        _after_the_event_loop()
        self._tokenizer.quicken(met)
        with suppress(AttributeError):  # where C's library has no such function
            ctypes.CDLL(None).malloc_trim(0)  # to read the vocabulary has taken much, and freed it

    def _arrived(self, coming: asyncio.Future[dict[str, Encoded]]) -> None:
        self._coming = {want: future for want, future in self._coming.items() if future != coming}
        if not coming.cancelled() and coming.exception() is None:
            self._learn(coming.result())

    def _learn(self, encoded: Mapping[str, Encoded]) -> None:
        for text, entry in encoded.items():
            if not self._knows(text, entry.starts is not None):
                with suppress(ValueError):  # one that is larger than all there is room for
                    self._known[text] = entry

    def encode(self, text: str, *, starts: bool = False) -> Encoded:
        """Ids of `text`, from memory or anew; `starts`: with where they begin."""
        entry = self._known.get(text)
        if entry is None or (starts and entry.starts is None):
            entry = self._encode(text, starts)
            self._learn({text: entry})
        return entry

    def history(self, digest: bytes) -> History | None:
        """The ids of a conversation that went on from there before, if they are remembered."""
        return self._histories.get(digest)

    def remember(self, digest: bytes, history: History, instead_of: bytes | None) -> None:
        """Keep the ids of a conversation, and no longer those of its beginning."""
        if instead_of is not None:
            self._histories.pop(instead_of, None)
        with suppress(ValueError):  # one that is larger than all there is room for
            self._histories[digest] = history

    def forget(self, texts: Iterable[str]) -> None:
        """Keep neither text nor ids of these."""
        for text in texts:
            self._known.pop(text, None)

    def clear(self) -> None:
        """Keep nothing."""
        self._known.clear()
        self._histories.clear()

    def _encode(self, text: str, with_starts: bool = False) -> Encoded:
        ids, starts = self._tokenizer.encoded(text, with_starts=with_starts)
        return Encoded(text, Ids.of(ids), starts)


def _after_the_event_loop() -> None:
    """Where both want the same processor, requests that are served go before one that begins."""
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
