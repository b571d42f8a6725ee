"""Texts without what must not be kept.

Rule: what is cut out leaves its name behind, and nothing else. The same text gives the same result,
and a result that is redacted again stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tinker_claw.privacy.rules import RULES, Match, Rule

_ROUNDS = 8
"""What stands beside something that was cut out may show itself only then."""


@dataclass(frozen=True, slots=True)
class _Found:
    start: int
    end: int
    rule: Rule


class Redactor:
    """Finds and cuts out some kinds of what must not be kept."""

    def __init__(self, kinds: Iterable[str]) -> None:
        """`kinds`: of KINDS."""
        wanted = frozenset(kinds)
        self._rules = tuple(rule for rule in RULES if rule.kind in wanted)

    def holds(self, text: str) -> str | None:
        """What there is in a text that must not be kept, for a sentence; None: nothing."""
        return next((found.rule.what for found in self._search(text)), None)

    def redact(self, text: str) -> str:
        """The text without it."""
        for _ in range(_ROUNDS):
            left = self._cut(text)
            if left == text:
                break
            text = left
        return text

    def _cut(self, text: str) -> str:
        parts, at = list[str](), 0
        for found in sorted(self._search(text), key=lambda found: (found.start, -found.end)):
            if found.end <= at:
                continue
            parts += [text[at : found.start], f"[redacted: {found.rule.name}]"]
            at = found.end
        return "".join([*parts, text[at:]]) if parts else text

    def _search(self, text: str) -> Iterable[_Found]:
        lowered = text.lower()
        if len(lowered) != len(text):  # as of a Turkish I with a dot
            lowered = "".join(c.lower() if c.isascii() else c for c in text)
        for rule in self._rules:
            group = "cut" if "cut" in rule.pattern.groupindex else 0
            for match in _matches(rule, text, lowered):
                if rule.valid is None or rule.valid(match):
                    yield _Found(*match.span(group), rule)


def _matches(rule: Rule, text: str, lowered: str) -> Iterator[Match]:
    """Where a rule's literals stand in most texts is found far faster than a pattern is."""
    if not rule.begins:
        yield from rule.pattern.finditer(text)
    for begin in rule.begins:
        at, behind = lowered.find(begin), 0
        while at >= 0:
            match = rule.pattern.match(text, at) if at >= behind else None
            if match is not None:
                behind = match.end()
                yield match
            at = lowered.find(begin, at + 1)
