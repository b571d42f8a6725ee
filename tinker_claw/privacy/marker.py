"""The line in the chat by which a user says that the rest is private.

Rule: the line stands alone, first in a message of the user's. The history is sent again with every
request, so the newest such line in it decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum

LINE = "/private"
_OFF = "/private off"
_HEAD = 200
"""Characters of a message among which the line ends."""
_MENTION = re.compile(r"(?<![\w./-])/private(?![\w./-])", re.IGNORECASE)


class Privacy(IntEnum):
    """Of a request. The ledger keeps the number with the session."""

    OPEN = 0
    PRIVATE = 1
    """Served and forgotten."""
    AFTER = 2
    """No longer private, but what was is still in the prompt: kept as text only, never trained."""


def marked(said: Iterable[str]) -> Privacy | None:
    """What the newest marker among the user's messages says; None: there is none.

    Args:
        said: what the user wrote, without what an agent adds to it, oldest first.
    """
    found: Privacy | None = None
    for text in said:
        head = text.lstrip()[:_HEAD].lower()
        if head.startswith(LINE):
            line = " ".join(head.partition("\n")[0].split())
            if line == LINE:
                found = Privacy.PRIVATE
            elif line == _OFF:
                found = Privacy.AFTER
    return found


def mentioned(texts: Iterable[str]) -> bool:
    """A transcript that was handed to a side call holds the marker, however it is laid out."""
    return any(_MENTION.search(text) for text in texts)
