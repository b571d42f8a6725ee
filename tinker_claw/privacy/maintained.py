"""Secrets by the rules that others maintain: Kingfisher's, for some hundred services.

Rule: only rules that are sure of themselves, and only what they find, by its place; nothing is
asked of any service. A text is searched in pieces, so that the time grows with its length and no
faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kingfisher_sdk import Scanner

_PIECE: Final = 65_536
"""Characters."""
_OVERLAP: Final = 4_096
"""Of one piece and the next; no secret but a private key, which rules.py knows, is longer."""
_SHORTEST: Final = 20
"""Characters of a text; shorter ones hold none that these rules know."""


def search(text: str) -> Iterator[tuple[int, int, str]]:
    """Where secrets begin and end, and what they are called."""
    for at in range(0, max(len(text) - _OVERLAP, 1), _PIECE):
        piece = text[at : at + _PIECE + _OVERLAP]
        if len(piece) >= _SHORTEST:
            for start, end, name in _in_piece(piece):
                yield at + start, at + end, name


def load() -> None:
    """Have the rules ready: a second where they have been compiled before, else several."""
    _scanner()


def _in_piece(piece: str) -> Iterator[tuple[int, int, str]]:
    encoded = piece.encode(errors="replace")
    at = offset = 0  # characters, and the bytes that they take
    findings = [found for found in _scanner().scan(encoded) if found.visible]
    for found in sorted(findings, key=lambda found: found.location["start_offset"]):
        begin = found.location["start_offset"]
        at, offset = at + len(encoded[offset:begin].decode(errors="ignore")), begin
        start = piece.find(found.secret, at)
        if start >= 0:
            yield start, start + len(found.secret), _name(found.rule_id)


def _name(rule: str) -> str:
    return rule.rpartition(".")[2].replace("-", " ")


@cache
def _scanner() -> Scanner:
    from kingfisher_sdk import Rules, Scanner  # most commands need none of it

    return Scanner(Rules(confidence="high"), base64=False)
