"""Parse the line `/private`, by which a user makes the rest of a chat private.

Rule: a line that begins like the marker counts as the marker, since only a missed one leaks; the
line that ends privacy must be exact. The history is sent again with every request, so the newest
message with such a line decides.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import IntEnum
from typing import Final

LINE = "/private"
_OFF = "/private off"
NEAR_MISS = (
    "a line near /private counts as it: the session is neither recorded nor learned from until a "
    "message begins with the line /private off"
)
_HEAD = 200
"""Characters of a line within which the command must stand."""

_SLASH = re.compile(r"[/⁄∕⧸╱／]")
_UNSEEN = ("Cf", "Cc", "Mn", "Me")
"""Unicode categories of invisible and combining characters."""
_PLAIN: Final[dict[int, str | None]] = {
    **{
        code: None
        for codes in (range(0x10000), range(0xE0000, 0xE0200))
        for code in codes
        if unicodedata.category(chr(code)) in _UNSEEN
    },
    **dict.fromkeys(map(ord, "⁄∕⧸╱"), "/"),
    ord("\n"): "\n",
    ord("\t"): " ",
}
_COMMAND = re.compile(
    r"(?<![a-z0-9.~/])/ {0,3}(?P<word>[a-z]{6,8})"
    r"(?![a-z0-9/\\]|[._-][a-z0-9])"  # a path, a file or a longer name goes on
)
_BEGINNING = re.compile(r"(?:[^\w/]|_)*(?:\d{1,3}[.)] *)?")
"""Quotes, bullets, emoji and the number of a list item, which may stand before the command."""
_LIKE = 0.85
"""Similarity from which two words of some seven letters differ by one slip: a letter too many, one
too few, a wrong one, or two swapped."""


class Privacy(IntEnum):
    """Privacy of a request. The ledger keeps the number with the session."""

    OPEN = 0
    PRIVATE = 1
    """Served and forgotten."""
    ONCE_PRIVATE = 2
    """No longer private, but private messages are still in the prompt: kept as text only, never
    trained."""


@dataclass(frozen=True, slots=True)
class Marker:
    """The newest marker line of a user."""

    privacy: Privacy
    exact: bool = True
    """Whether it is written as documented, rather than something close to it."""


def marked(messages: Iterable[str]) -> Marker | None:
    """Return the newest marker among the user's messages; None: there is none.

    Args:
        messages: the user's words, without an agent's additions, oldest first.
    """
    return next(filter(None, map(_marker, reversed([*messages]))), None)


def ends(text: str) -> bool:
    """Return whether a text is the line that ends privacy."""
    marker = _marker(text)
    return marker is not None and marker.privacy is Privacy.ONCE_PRIVATE


def may_mark(text: str) -> bool:
    """Return whether a text may hold the marker; cheap, with no false negatives."""
    return _SLASH.search(text) is not None


def mentioned(texts: Iterable[str]) -> bool:
    """Return whether a transcript handed to a side call holds the marker, in whatever layout."""
    return any(
        _is_like(match["word"])
        for text in texts
        for line in text.replace("\\n", "\n").split("\n")  # a long text holds the GIL for long
        if may_mark(line)
        for match in _COMMAND.finditer(_plain(line))
    )


def _marker(text: str) -> Marker | None:
    if not may_mark(text):
        return None
    first, _, more = text.lstrip().partition("\n")
    command = " ".join(first[:_HEAD].lower().split())
    if command == LINE:
        return Marker(Privacy.PRIVATE)
    ended = command == _OFF
    if (not ended and _near(first)) or _near(more):
        # A message that holds both lines is private.
        return Marker(Privacy.PRIVATE, exact=False)
    return Marker(Privacy.ONCE_PRIVATE) if ended else None


def _near(text: str) -> bool:
    """Return whether a line begins with the command, or is the command but for one slip."""
    for line in text.splitlines():  # at every kind of line end
        if may_mark(line):
            plain = _plain(line[:_HEAD])
            start = _BEGINNING.match(plain)
            match = _COMMAND.match(plain, start.end() if start else 0)
            if match and (match["word"] == LINE[1:] or _is_alone(plain, match)):
                return True
    return False


def _is_alone(line: str, match: re.Match[str]) -> bool:
    """Return whether a word like the command is all that the line says."""
    return _is_like(match["word"]) and len(re.findall(r"\w+", line[match.end() :])) <= 1


def _is_like(word: str) -> bool:
    """Return whether a word is the command, up to one mistyped key."""
    return SequenceMatcher(None, word, LINE[1:]).ratio() > _LIKE


def _plain(text: str) -> str:
    """Normalise a text: lower case, without invisible characters, full-width letters and other
    slashes replaced by the usual ones."""
    if text.isascii() and text.isprintable():
        return text.lower()
    return unicodedata.normalize("NFKD", text).translate(_PLAIN).lower()
