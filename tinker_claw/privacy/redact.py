"""Redaction of secrets and personal data from texts.

Rule: only the name of a removed part stays in its place. The same text gives the same result, and
redacting a result again changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tinker_claw.privacy import rules
from tinker_claw.privacy.rules import RULES, SECRETS, Match, Rule

_ROUNDS = 8
"""Most passes over a text: removing one secret may reveal the one beside it."""
_TRIES = 4


def name_digest(name: str) -> str:
    """Return what is kept of a client's name for something, where the name holds a secret."""
    return f"redacted-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:32]}"


@dataclass(frozen=True, slots=True)
class _Found:
    start: int
    end: int
    name: str
    what: str


class Redactor:
    """Finds and removes some kinds of secrets and personal data."""

    def __init__(self, kinds: Iterable[str]) -> None:
        """Redact `kinds`, a subset of KINDS."""
        wanted = frozenset(kinds)
        self._rules = tuple(rule for rule in RULES if rule.kind in wanted)
        self._maintained = SECRETS in wanted

    def load(self) -> None:
        """Load all rules, so that the first text does not wait for them."""
        if self._maintained:
            rules.load()

    def holds(self, text: str) -> str | None:
        """Return a description of a secret found, or None."""
        return next((found.what for found in self._search(text)), None)

    def values(self, text: str) -> tuple[str, ...]:
        """Return the secrets that a text holds."""
        return tuple(dict.fromkeys(text[one.start : one.end] for one in self._search(text)))

    def redact(self, text: str) -> str:
        """Return the text with secrets removed."""
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
        if len(lowered) != len(text):  # for example a dotted Turkish I
            # On bytes, lower() changes ASCII letters only; a Python loop takes milliseconds.
            lowered = text.encode(errors="surrogatepass").lower().decode(errors="surrogatepass")
        for rule in self._rules:
            group = "cut" if "cut" in rule.pattern.groupindex else 0
            for match in _matches(rule, text, lowered):
                yield _Found(*match.span(group), rule.name, rule.what)
        if self._maintained:
            for start, end, name in rules.search(text):
                yield _Found(start, end, name, f"a secret ({name})")


def _matches(rule: Rule, text: str, lowered: str) -> Iterator[Match]:
    """Yield a rule's matches. Literals are searched first, which is far faster than a pattern.

    Inside a failed match only a few other positions are tried, so that the time stays proportional
    to the length.
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
