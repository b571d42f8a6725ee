"""A render whose texts are not encoded yet.

Rule: the chat format's code runs unchanged over a tokenizer that hands out a placeholder for each
text instead of its ids, and the ids are put in afterwards. The result is what the format gives with
the real tokenizer as long as it does not look into the ids that it is given; `Typesetter.try_out`
finds out, and whatever a layout cannot tell is rendered the plain way.

Running the format's code over every id of a long prompt, and encoding the prompt, is nearly all of
what a request costs; a layout costs by the message, and the ids of a known text are at hand.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tinker_claw.render.encoding import Encoded, Encoder, unpack
from tinker_claw.render.plain import CutTokenizer

_FRAME = 512
"""Characters that a format puts around a message's content in one text, at the very most."""


class UnknownPlaceholder(Exception):
    """A layout holds an id that is none of its own: the format keeps ids between renders."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one encoded text: the ids that begin in text[start:end]."""

    text: str
    start: int = 0
    end: int | None = None
    """None: to its end, uncut."""
    mixed: bool = False
    """Content and frame are in it, and it is not known where the one ends."""


class Typesetter:
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
        return [self._placeholder(Piece(text))] if text else []

    def __call__(self, text: str, *args: Any, **options: Any) -> Any:
        if self._open is None or not options.get("return_offsets_mapping"):
            return self._tokenizer(text, *args, **options)
        if not self._encoder.tells_starts:
            raise NotImplementedError
        cuts = self._cuts(text)
        pieces = [(a, b, Piece(text, a, b)) for a, b in pairwise(cuts)]
        if len(pieces) == 1:
            pieces = [(0, len(text), Piece(text, mixed=text != self._content))]
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


class Layout:
    """Ids and placeholders of one prompt."""

    def __init__(
        self,
        encoder: Encoder,
        ids: Sequence[int],
        pieces: Mapping[int, Piece],
        hint_at: int | None,
    ) -> None:
        """`hint_at`: index into `ids` behind the content that a hint belongs to.

        Raises:
            UnknownPlaceholder: not every placeholder has its piece.
        """
        self._encoder = encoder
        self._ids = ids
        self._pieces = pieces
        self._hint_at = hint_at
        self._ready: Mapping[str, Encoded] = {}
        if any(entry < 0 and entry not in pieces for entry in ids):
            raise UnknownPlaceholder

    async def prepare(self) -> None:
        """Encode what is new and long without holding up the event loop."""
        pieces = [self._pieces[entry] for entry in self._ids if entry < 0]
        cut = {piece.text for piece in pieces if piece.end is not None}
        self._ready = await self._encoder.prepare([piece.text for piece in pieces], starts=cut)

    @contextmanager
    def forgetting(self) -> Generator[None]:
        """What is encoded for the first time inside is not remembered."""
        new = self._encoder.unknown(piece.text for piece in self._pieces.values())
        try:
            yield
        finally:
            self._encoder.forget(new)

    def prompt(self) -> Prompt:
        """Put the ids in."""
        if not self._pieces:
            return Prompt(tuple(self._ids), self._hint_at)
        parts = [self._part(entry) for entry in self._ids]
        hint_at = None if self._hint_at is None else sum(map(len, parts[: self._hint_at])) // 4
        packed = b"".join(parts)
        return Prompt(unpack(packed), hint_at, packed)

    def _part(self, entry: int) -> bytes:
        """The packed ids of an entry."""
        if entry >= 0:
            return entry.to_bytes(4, "little")
        piece = self._pieces[entry]
        known = self._encoded(piece)
        if piece.end is None:
            return known.packed
        # A cut at the very end takes ids that begin behind it, too: bytes of a last character.
        return known.between(piece.start, piece.end if piece.end < len(piece.text) else 2**62)

    def _encoded(self, piece: Piece) -> Encoded:
        starts = piece.end is not None
        ready = self._ready.get(piece.text)
        if ready is not None and not (starts and ready.starts is None):
            return ready
        return self._encoder.encode(piece.text, starts=starts)
