"""What the judge answered: votes, their majority, and hints. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from tinker_claw.types import Verdict, Vote

_BOX = re.compile(r"\\boxed\{\s*\+?(-?\d+)\s*\}")
_VOTES: dict[str, Vote] = {"-1": -1, "0": 0, "1": 1}

_OPEN, _CLOSE = "[HINT]", "[/HINT]"

MIN_HINT_CHARS = 11
"""A shorter hint says nothing that could be followed."""
MAX_HINT_CHARS = 2000
"""A longer one is not the one to three sentences that were asked for, and would crowd the prompt of
the teacher."""


def parse_vote(answer: str) -> Vote | None:
    """The last box of an answer; None when there is none or it holds another number."""
    boxes = _BOX.findall(answer)
    return _VOTES.get(boxes[-1]) if boxes else None


def majority(votes: Sequence[Vote | None]) -> Verdict:
    """The commonest valid vote; a tie for the top is 0; no valid vote is no verdict (None)."""
    counts = Counter[Vote](vote for vote in votes if vote is not None).most_common(2)
    value: Vote | None = None
    if counts:
        tied = len(counts) > 1 and counts[0][1] == counts[1][1]
        value = 0 if tied else counts[0][0]
    return Verdict(votes=tuple(votes), value=value)


def parse_hint(answer: str) -> str | None:
    """The last hint of an answer whose last box is 1; None when there is none worth following."""
    if parse_vote(answer) != 1:
        return None
    # By its last marks: a pattern would look through the rest of a long answer for each of many.
    before, closed, _ = answer.rpartition(_CLOSE)
    hint = " ".join(before.rpartition(_OPEN)[2].split()) if closed and _OPEN in before else ""
    return hint if MIN_HINT_CHARS <= len(hint) <= MAX_HINT_CHARS else None


def choose_hints(answers: Iterable[str], most: int) -> tuple[str, ...]:
    """Distinct hints, the shortest first, at most `most` of them."""
    hints = {hint for answer in answers if (hint := parse_hint(answer))}
    return tuple(sorted(hints, key=lambda hint: (len(hint), hint))[:most])
