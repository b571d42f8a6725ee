"""Parse the line `/private`, by which a user makes the rest of a chat private.

Rule: a line close to the marker counts as the marker, since only a missed one leaks; the line that
ends privacy must be exact. The history is sent again with every request, so the newest message with
such a line decides.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import IntEnum
from typing import Final

LINE: Final = "/private"
_OFF: Final = "/private off"
NEAR_MISS: Final = (
    "a line near /private counts as it: the session is neither recorded nor learned from until a "
    "message begins with the line /private off"
)
_HEAD = 200
"""Characters of a line within which the command must stand."""

_SLASH = re.compile(r"[/\\⁄∕⧸╱／＼﹨]")
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
    r"(?<![a-z0-9.~/\\])(?P<slash>[/\\]{1,3} {0,3})(?P<word>[a-z]{6,8})"
    r"(?![a-z0-9/\\]|[._-][a-z0-9])"  # a path, a file or a longer name goes on
)
_LIKE = 0.85
"""Similarity from which two words of some seven letters differ by one slip: a letter too many, one
too few, a wrong one, or two swapped."""
_NAME = re.compile(r"@\S+")
_WORDS = re.compile(r"[^\W_]+")
_NUMBER = re.compile(r"\d{1,3}[.)]")
"""Number of a list item."""
_BEFORE = frozenset(
    _WORDS.findall(
        "activate and be bitte enable go hello hey hi let lets now ok okay on please pls set so "
        "start switch to turn use yes"
    )
)
_AFTER = frozenset(_WORDS.findall("chat from here mode now off on please pls session start thanks"))


class Privacy(IntEnum):
    """Privacy of a request. The ledger keeps the number with the session."""

    OPEN = 0
    PRIVATE = 1
    """Served and forgotten."""
    AFTER = 2
    """No longer private, but private messages are still in the prompt: kept as text only, never
    trained."""


@dataclass(frozen=True, slots=True)
class Marker:
    """The newest marker line of a user."""

    privacy: Privacy
    exact: bool = True
    """Whether it is written as documented, rather than something close to it."""


def marked(said: Iterable[str]) -> Marker | None:
    """Return the newest marker among the user's messages; None: there is none.

    Args:
        said: the user's words, without an agent's additions, oldest first.
    """
    found: Marker | None = None
    for text in said:
        found = _marker(text) or found
    return found


def may_mark(text: str) -> bool:
    """Return whether a text may hold the marker; cheap, with no false negatives."""
    return _SLASH.search(text) is not None


def mentioned(texts: Iterable[str]) -> bool:
    """Return whether a transcript handed to a side call holds the marker, in whatever layout."""
    return any(
        found["slash"] == "/" and _is_like(found["word"])
        for text in texts
        for line in text.replace("\\n", "\n").split("\n")  # a long text holds the GIL for long
        if may_mark(line)
        for found in _COMMAND.finditer(_plain(line))
    )


def _marker(text: str) -> Marker | None:
    if not may_mark(text):
        return None
    first, _, more = text.lstrip().partition("\n")
    command = " ".join(first[:_HEAD].lower().split())
    if command == LINE:
        return Marker(Privacy.PRIVATE)
    ended = command == _OFF
    if (not ended and _near(first, alone=True)) or _near(more):
        # A message that holds both lines is private.
        return Marker(Privacy.PRIVATE, exact=False)
    return Marker(Privacy.AFTER) if ended else None


def _near(text: str, *, alone: bool = False) -> bool:
    """Return whether a text holds the command, or something meant as the command.

    Args:
        alone: whether the line is the first of the message. Other slashes count only there, since
            in code they begin comments and names.
    """
    for line in text.splitlines():  # at every kind of line end
        if may_mark(line):
            plain = _plain(line[:_HEAD])
            if any(_means(plain, found, alone=alone) for found in _COMMAND.finditer(plain)):
                return True
    return False


def _means(line: str, found: re.Match[str], *, alone: bool) -> bool:
    before, after, exact = line[: found.start()], line[found.end() :], found["word"] == LINE[1:]
    begins = not re.search(r"[a-z0-9]", _NUMBER.sub("", before, count=1))
    ends = "?" not in after and set(_WORDS.findall(after)) <= _AFTER
    if found["slash"] != "/":
        return alone and begins and ends and exact
    if not exact:
        return begins and ends and _is_like(found["word"])
    return begins or (ends and _leads(before))


def _leads(before: str) -> bool:
    """Return whether the words before the command only lead to it: `please`, `Claw,`, `@claw`."""
    gap = re.split(r"\w", before)[-1]
    said = set(_WORDS.findall(_NAME.sub("", before)))
    return said <= _BEFORE or any(sign in ".!;…,:" for sign in gap)


def _is_like(word: str) -> bool:
    """Return whether a word is the command, up to one mistyped key."""
    return SequenceMatcher(None, word, LINE[1:]).ratio() > _LIKE


def _plain(text: str) -> str:
    """Normalise a text: lower case, without invisible characters, full-width letters and other
    slashes replaced by the usual ones."""
    if text.isascii() and text.isprintable():
        return text.lower()
    return unicodedata.normalize("NFKD", text).translate(_PLAIN).lower()
