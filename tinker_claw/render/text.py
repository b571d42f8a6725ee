"""Token ids to text while they are still arriving.

Rule: a piece that was handed out never changes. Bytes of an unfinished character and white space
that may turn out to be trailing are held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_UNFINISHED = "\ufffd"
_CHARACTER_TOKENS = 4
"""A character has at most four bytes, so at most this many tokens are an unfinished one."""
_GARBAGE_TOKENS = 32
"""So many ids without one boundary between characters are no text; stop waiting for it."""


class _Decoder:
    """Decodes a growing run of ids, without the bytes of an unfinished last character."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0  # characters of the decoded ids that were handed out

    @property
    def waiting(self) -> bool:
        return bool(self._ids)

    def feed(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        text = self._decode(self._ids)
        if not text.endswith(_UNFINISHED) or len(self._ids) > _GARBAGE_TOKENS + len(ids):
            return self._take_all(text)
        # Only the last sign can still change: broken bytes before it stay broken.
        piece = text[self._shown : -1]
        self._shown = max(self._shown, len(text) - 1)
        self._trim()
        return piece

    def flush(self) -> str:
        return self._take_all(self._decode(self._ids)) if self._ids else ""

    def _take_all(self, text: str) -> str:
        piece = text[self._shown :]
        self._ids, self._shown = [], 0
        return piece

    def _trim(self) -> None:
        """Forget ids up to the last boundary, so that feeding costs the new ids only."""
        for kept in range(1, min(_CHARACTER_TOKENS, len(self._ids) - 1) + 1):
            head = self._decode(self._ids[:-kept])
            if not head.endswith(_UNFINISHED):
                self._ids = self._ids[-kept:]
                self._shown = max(0, self._shown - len(head))
                return


class Channel:
    """One of the strings of a reply, stripped of white space at both ends as it streams."""

    def __init__(self, decode: Decode) -> None:
        self._decoder = _Decoder(decode)
        self._held = ""
        self._pieces: list[str] = []

    @property
    def blank(self) -> bool:
        """Nothing but white space so far."""
        return not self._pieces and not self._decoder.waiting

    @property
    def text(self) -> str:
        """All that was handed out."""
        return "".join(self._pieces)

    def feed(self, ids: Sequence[int]) -> str:
        """What can be shown now that `ids` have arrived."""
        return self._show(self._decoder.feed(ids)) if ids else ""

    def cut(self) -> str:
        """A marker follows: an unfinished character will not be completed."""
        return self._show(self._decoder.flush())

    def _show(self, piece: str) -> str:
        if not self._pieces:
            piece = piece.lstrip()
        body = (self._held + piece).rstrip()
        self._held = (self._held + piece)[len(body) :]
        if body:
            self._pieces.append(body)
        return body
