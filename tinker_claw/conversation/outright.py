"""Parse messages that only rate the previous reply: a thumb, /good or /bad, or a denied call.

Rule: nothing is guessed. A message that says anything besides the verdict is one like any other,
which the judge reads. What follows /bad is the reason. /good stands alone, or before a reason
that a colon or "because" begins: "/good morning" praises nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tinker_claw.conversation.harnesses import HARNESSES
from tinker_claw.prose import quotable
from tinker_claw.types import NextState, Vote

# Skin tones, and selectors of how an emoji is drawn; keyboards write neither, one or both.
_LOOKS = "[\U0001f3fb-\U0001f3ff\ufe0e\ufe0f]*"
_THUMBS = {
    score: re.compile(rf"(?:{thumb}{_LOOKS}\s*)+")
    for score, thumb in ((1, "\N{THUMBS UP SIGN}"), (-1, "\N{THUMBS DOWN SIGN}"))
}
_GOOD = re.compile(
    r"/good(?:\s*:\s+(?P<reason>.*)|\s+(?P<because>because\b.*))?", re.IGNORECASE | re.DOTALL
)
_BAD = re.compile(r"/bad(?:\s*:\s+|\s+|\Z)(?P<reason>.*)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Outright:
    """Explicit verdict of a user on the reply before."""

    score: int
    """+1 or -1."""
    reason: str = ""

    @property
    def asks(self) -> bool:
        """Return whether the feedback says what was wrong, so that the next reply is a retry."""
        return self.score < 0 and bool(self.reason)


def outright(text: str) -> Outright | None:
    """Parse a person's own words as a verdict; None: they say something else, or more."""
    text = text.strip()
    for score, thumbs in _THUMBS.items():
        if thumbs.fullmatch(text):
            return Outright(score)
    if match := _BAD.fullmatch(text):
        return Outright(-1, quotable(match["reason"]).strip())
    if match := _GOOD.fullmatch(text):
        return Outright(1, quotable(match["reason"] or match["because"] or "").strip())
    return None


def denied(state: NextState, client: str) -> Vote | None:
    """Read what a harness says instead of tools' results: -1 where the person denied a call, 0
    where the person stopped all of them; None: tools answered, which the judge reads.

    A reason in it is nobody's words, since a tool can print the same text.

    Args:
        client: name of the session's harness: another's form is a tool's words.
    """
    votes = [_denial(name, text.strip(), client) for name, text in state.results]
    if -1 in votes:
        return -1
    return 0 if votes and None not in votes else None


def _denial(tool: str, result: str, client: str) -> Vote | None:
    return next(
        (
            denial.vote
            for harness in HARNESSES
            for denial in harness.denials
            if harness.name == client
            and denial.tools.fullmatch(tool)
            and denial.form.fullmatch(result)
        ),
        None,
    )
