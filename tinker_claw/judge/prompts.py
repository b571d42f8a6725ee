"""What the judge is asked, in our words, and what its answers say. Pure.

Rule: the judge sees the user's request, the reply and what came next; the next state is the
evidence, not the judge's own taste. The answer's form is fixed and read here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from tinker_claw.types import Message, NextState, Verdict, Vote

MAX_CHARS = 6000
"""Of each part. The judge does not see the middle of a longer one; the gap is marked."""

_BOX = re.compile(r"\\boxed\{\s*\+?(-?\d+)\s*\}")
_VOTES: dict[str, Vote] = {"-1": -1, "0": 0, "1": 1}

_OPEN, _CLOSE = "[HINT]", "[/HINT]"

MIN_HINT_CHARS = 11
"""A shorter hint says nothing that could be followed."""
MAX_HINT_CHARS = 2000
"""A longer one is not the one to three sentences that were asked for, and would crowd the prompt of
the teacher."""

_VERDICT_SYSTEM = """\
You rate one reply of an AI assistant by looking at what happened right after it.

You get the request, the reply, and the next state: either the user's next message or the
results of the tools that the reply called. The next state is your evidence. Do not rate the
reply by how you would have written it.

Rate +1 if the next state shows that the reply did its job: the user accepts it, thanks, or
moves on to a new matter; the tools worked and brought the task forward. Rate -1 if the next
state shows that it did not: the user asks for it again, corrects it, complains, or wants it
done another way (asking for a change means that the reply was not what was wanted); a tool call
failed because of how it was made. Rate 0 if the next state does not tell.

Think in a few sentences. End with the rating in a box: \\boxed{1}, \\boxed{0} or \\boxed{-1}."""

_HINT_SYSTEM = """\
You look for hindsight: whether what came after a reply tells how the reply should have been
written.

You get the request, an AI assistant's reply, and the next state: the user's next message or
tool results. A user who corrects the reply often says what he wanted. If that could have been
followed from the start, write it as a hint for the assistant: one to three sentences, concrete,
about this kind of request, saying what to do rather than what went wrong. What only a tool
could reveal is no hindsight: the assistant could not have known it. A user who is content,
moves on, or only says "again" gives no hint.

Think in a few sentences. If there is a hint, end with \\boxed{1} and then the hint between the
marks [HINT] and [/HINT]. If there is none, end with \\boxed{-1}."""

_CASE = """\
<request>
{request}
</request>

<reply>
{reply}
</reply>

<next_state from="{role}">
{next_state}
</next_state>"""


def verdict_messages(request: str, reply: str, state: NextState) -> list[Message]:
    """The prompt for one verdict vote."""
    return _messages(_VERDICT_SYSTEM, request, reply, state)


def hint_messages(request: str, reply: str, state: NextState) -> list[Message]:
    """The prompt for one hint vote."""
    return _messages(_HINT_SYSTEM, request, reply, state)


def _messages(system: str, request: str, reply: str, state: NextState) -> list[Message]:
    case = _CASE.format(
        request=_shorten(request),
        reply=_shorten(reply),
        role=state.role,
        next_state=_shorten(state.text),
    )
    return [{"role": "system", "content": system}, {"role": "user", "content": case}]


def _shorten(text: str) -> str:
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


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


def choose_hints(found: Sequence[str | None], read: int, most: int) -> tuple[str, ...]:
    """Distinct hints, at most `most`, where a majority of the answers that could be read gave one.

    What most of them said comes first, and of those the shortest: how well a hint teaches is not
    known before a teacher is asked (methods/teachability.py).

    Args:
        found: of each answer its hint, or None.
        read: answers that could be read.
    """
    hints = Counter(hint for hint in found if hint is not None)
    if 2 * hints.total() <= read:
        return ()
    return tuple(sorted(hints, key=lambda hint: (-hints[hint], len(hint), hint))[:most])
