"""Texts without what must not be kept.

Rule: what is cut out leaves its name behind, and nothing else. The same text gives the same result,
and a result that is redacted again stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tinker_claw.privacy import rules
from tinker_claw.privacy.rules import LONG, RULES, SECRETS, Match, Rule

_ROUNDS = 8
"""What stands beside something that was cut out may show itself only then."""
_TRIES = 4


@dataclass(frozen=True, slots=True)
class _Found:
    start: int
    end: int
    name: str
    what: str


class Redactor:
    """Finds and cuts out some kinds of what must not be kept."""

    def __init__(self, kinds: Iterable[str]) -> None:
        """`kinds`: of KINDS."""
        wanted = frozenset(kinds)
        rules = [rule for rule in RULES if rule.kind in wanted]
        self._rules = tuple(rule for rule in rules if not rule.heads)
        self._heads: dict[str, list[Rule]] = {}
        for rule in rules:
            for head in rule.heads:
                self._heads.setdefault(head, []).append(rule)
        self._maintained = SECRETS in wanted

    def load(self) -> None:
        """Have all rules ready, so that the first text does not wait for them."""
        if self._maintained:
            rules.load()

    def holds(self, text: str) -> str | None:
        """What there is in a text that must not be kept, for a sentence; None: nothing."""
        return next((found.what for found in self._search(text)), None)

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
            parts += [text[at : found.start], f"[redacted: {found.name}]"]
            at = found.end
        return "".join([*parts, text[at:]]) if parts else text

    def _search(self, text: str) -> Iterable[_Found]:
        lowered = text.lower()
        if len(lowered) != len(text):  # as of a Turkish I with a dot
            # Of bytes, ASCII's letters alone are made small; one by one it takes milliseconds.
            lowered = text.encode(errors="surrogatepass").lower().decode(errors="surrogatepass")
        if self._heads:
            yield from self._tokens(text)
        for rule in self._rules:
            group = "cut" if "cut" in rule.pattern.groupindex else 0
            for match in _matches(rule, text, lowered):
                yield _Found(*match.span(group), rule.name, rule.what)
        if self._maintained:
            for start, end, name in rules.search(text):
                yield _Found(start, end, name, f"a secret ({name})")

    def _tokens(self, text: str) -> Iterator[_Found]:
        for begin in LONG.finditer(f"\n{text}"):
            at = begin.start()  # one letter further right in the text that begins with a new line
            for head in (text[at], text[at : at + 2]):
                for rule in self._heads.get(head, ()):
                    if (match := rule.pattern.match(text, at)) and rule.holds(match):
                        yield _Found(*match.span(), rule.name, rule.what)


def _matches(rule: Rule, text: str, lowered: str) -> Iterator[Match]:
    """Where a rule's literals stand in most texts is found far faster than a pattern is.

    Inside of what was no match after all only a few others are tried, so that the time grows with
    the length and no faster.
    """
    if not rule.begins:
        yield from filter(rule.holds, rule.pattern.finditer(text))
    for begin in rule.begins:
        at, behind, tries = lowered.find(begin), 0, 0
        while at >= 0:
            if at >= behind:
                tries = _TRIES
            match = rule.pattern.match(text, at) if tries else None
            if match is not None:
                found = rule.holds(match)
                behind, tries = max(behind, match.end()), 0 if found else tries - 1
                if found:
                    yield match
            at = lowered.find(begin, at + 1)
