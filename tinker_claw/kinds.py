"""Kinds of requests, found by the words of a request and its form.

Rule: what is unsure is of no kind: a request that shows none, or two.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

_LOOKED_AT = 240
"""Characters of a request that are read."""
_ENDS = re.compile(r"[:：]\s|：|\n\s*\n")
"""What often ends the request proper, and begins a text that it is about."""
_UNSPACED = re.compile(r"[\u3040-\u9fff\uac00-\ud7af]")
"""A letter of writing without blanks."""


def kind_of(request: str) -> str:
    """Return the kind of a request; "" where that is unsure."""
    text = request[:_LOOKED_AT]
    found = _kinds(_ENDS.split(text)[0]) or _kinds(text)
    return found[0] if len(found) == 1 else ""


def _kinds(text: str) -> list[str]:
    return [kind for kind, cue in _cues() if cue.search(text)]


@cache
def _cues() -> list[tuple[str, re.Pattern[str]]]:
    known = tomllib.loads(files("tinker_claw").joinpath("kinds.toml").read_text("utf-8"))
    flags = re.IGNORECASE | re.DOTALL
    return [
        (kind, re.compile("|".join([*_words(cue["words"]), *cue["forms"]]), flags))
        for kind, cue in known.items()
    ]


def _words(given: str) -> Iterator[str]:
    """Yield a regular expression for each word."""
    for word in given.split():
        letters = re.escape(word.removesuffix("*")).replace(r"\-", "[- ]?")
        more = "" if word.endswith("*") else r"\w{0,3}\b"
        yield letters if _UNSPACED.match(word) else rf"\b{letters}{more}"
