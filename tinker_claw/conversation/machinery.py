"""Detect text that looks like machinery: written by a harness that no table lists.

Rule: a text is doubted for speaking of "the user" to somebody, for what it says of how a
conversation is kept, and for its form; never for its style, its capitals or its wishes. Signs add
up, and signs of a person lower the sum. Nothing is learned from a doubted text, in either
direction.
"""

from __future__ import annotations

import re
from typing import Final

from tinker_claw.conversation.harnesses import MACHINERY

MOST_CHARS: Final = 6_000
"""Characters of a text's beginning that are looked at, and as many of its end."""
ENOUGH: Final = 2.0
"""Sum of weights from which on a text is doubted."""

_TAG: Final = re.compile(
    r"\s*<([a-z]+(?:[-_:][a-z]+)+)(?:\s[^>\n]{0,200})?>\n(?P<rest>.*)", re.DOTALL
)
"""A tag of several words on a line of its own, as harnesses wrap notes in."""
_SENTENCE: Final = re.compile(r"\s*[^\s<>{}]+(?: [^\s<>{}]+){3}")
"""Prose, which is what stands in a note; in a component stands markup."""
_TRANSCRIPT: Final = re.compile(
    r"\s*(?:# )?USER:?\s.*^(?:# )?ASSISTANT:?\s", re.DOTALL | re.MULTILINE
)

# Weights are round on purpose: two strong signs are enough, one never is.
_WEIGHTS: Final = {"alone": 2.5, "strong": 1.5, "weak": 1.0}
_SIGNS: Final = tuple(
    (weight, re.compile(sign, re.IGNORECASE | re.DOTALL))
    for kind, weight in _WEIGHTS.items()
    for sign in MACHINERY[kind]
)
_NOUNS: Final = re.compile(MACHINERY["nouns"], re.IGNORECASE)
_NOUN_WEIGHT, _NOUN_MOST = 0.5, 5
_PERSON: Final = re.compile(MACHINERY["person"])
_PERSON_WEIGHT, _PERSON_MOST = 0.75, 2.0
_COMPACTION: Final = re.compile(MACHINERY["compaction"], re.IGNORECASE)


def looks_like_machinery(text: str) -> bool:
    """Whether a text without evidence that a person typed it should teach nothing."""
    if len(text) > 2 * MOST_CHARS:
        text = f"{text[:MOST_CHARS]}\n{text[-MOST_CHARS:]}"
    return _is_note(text) or _TRANSCRIPT.match(text) is not None or weight(text) >= ENOUGH


def _is_note(text: str) -> bool:
    """Whether a text begins with prose that is wrapped in a tag."""
    tag = _TAG.match(text)
    if tag is None or f"\n</{tag[1]}>" not in text:
        return False
    return _SENTENCE.match(tag["rest"]) is not None


def weight(text: str) -> float:
    """Sum of the weights of a text's signs of machinery."""
    nouns = {noun.lower() for noun in _NOUNS.findall(text)}
    found = sum(weight for weight, sign in _SIGNS if sign.search(text))
    found += _NOUN_WEIGHT * max(0, min(_NOUN_MOST, len(nouns)) - 1)
    return found - min(_PERSON_MOST, _PERSON_WEIGHT * len(_PERSON.findall(text)))


def about_compaction(text: str) -> bool:
    """Whether a doubted text asks for a summary: the conversation goes on after it."""
    return _COMPACTION.search(text) is not None
