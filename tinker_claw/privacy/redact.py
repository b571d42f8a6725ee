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
class _Secret:
    start: int
    end: int
    kind: str
    name: str


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
            rules.scanner()

    def holds(self, text: str) -> str | None:
        """Return a description of a secret found, or None."""
        secret = next(iter(self._search(text)), None)
        if secret is None:
            return None
        return f"{'a secret' if secret.kind == SECRETS else 'personal data'} ({secret.name})"

    def values(self, text: str) -> tuple[str, ...]:
        """Return the secrets that a text holds."""
        return tuple(
            dict.fromkeys(text[secret.start : secret.end] for secret in self._search(text))
        )

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
        for secret in sorted(self._search(text), key=lambda secret: (secret.start, -secret.end)):
            if secret.end <= at:
                continue
            parts += [text[at : secret.start], f"[redacted: {secret.name}]"]
            at = secret.end
        return "".join([*parts, text[at:]]) if parts else text

    def _search(self, text: str) -> Iterable[_Secret]:
        lowered = text.lower()
        if len(lowered) != len(text):  # for example a dotted Turkish I
            # On bytes, lower() changes ASCII letters only; a Python loop takes milliseconds.
            lowered = text.encode(errors="surrogatepass").lower().decode(errors="surrogatepass")
        for rule in self._rules:
            group = "cut" if "cut" in rule.pattern.groupindex else 0
            for match in _matches(rule, text, lowered):
                yield _Secret(*match.span(group), rule.kind, rule.name)
        if self._maintained:
            for start, end, name in rules.search(text):
                yield _Secret(start, end, SECRETS, name)


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
                holds = rule.holds(match)
                behind, tries = max(behind, match.end()), 0 if holds else tries - 1
                if holds:
                    yield match
            at = lowered.find(begin, at + 1)
