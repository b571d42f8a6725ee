"""What the last requests mean together, where they mean that little or nothing is learned.

Rule: pure. Each sentence says what was seen, what that means, and what to do about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tinker_claw.ledger.judgements import SET_ASIDE
from tinker_claw.ledger.recent import RecentTurn
from tinker_claw.story.table import printable
from tinker_claw.types import Kind

_MOST = 0.75
_FEWEST = 3
"""Fewer turns are no pattern."""


def advice(turns: Sequence[RecentTurn]) -> list[str]:
    """Sentences on these turns, oldest first; none where learning goes its way."""
    main = [turn for turn in turns if turn.kind is Kind.MAIN]
    return [
        *_sides(turns, main),
        *_followed(main),
        *_judging(main),
        *_unfit(main),
        *_stood_in(turns),
    ]


def _sides(turns: Sequence[RecentTurn], main: Sequence[RecentTurn]) -> Iterator[str]:
    side = [turn for turn in turns if turn.kind is Kind.SIDE]
    if not _most(side, turns):
        return
    reason, times = Counter(turn.kind_reason for turn in side).most_common(1)[0]
    told = f"{len(side)} of {len(turns)} requests are side turns, which are never trained"
    yield (
        f"{told}; the reason of {times}: {printable(reason)}. Recaps, titles, compaction, "
        "heartbeat and cron are meant to be side turns. If these were your own messages, the "
        "client sends something that marks them: look for a header X-Turn-Type, for a model name "
        "with @v, and for another proxy in between; --reasons shows the reason of each."
    )
    if not main:
        yield "There is no main turn among them: nothing can be learned from these requests."


def _followed(main: Sequence[RecentTurn]) -> Iterator[str]:
    if len(main) < _FEWEST or any(turn.next_role is not None for turn in main):
        return
    sessions = len({turn.session_id for turn in main})
    none = f"None of the {len(main)} main turns has a next state, so there is nothing to judge"
    if sessions == len(main):
        yield (
            f"{none}: every one stands alone in its session. Go on in the same conversation; if "
            "you did, the client sends neither its earlier messages back nor a name for the "
            "session (X-Session-Id)."
        )
    else:
        yield (
            f"{none}, although sessions go on. The replies do not come back in the client's "
            "history as they were sent: something between rewrites or drops them."
        )


def _judging(main: Sequence[RecentTurn]) -> Iterator[str]:
    aside = [turn for turn in main if turn.untrained_because == SET_ASIDE]
    if aside:
        yield (
            f"{len(aside)} of {len(main)} main turns were set aside: three times the judge gave "
            f"nothing that could be read. `run.py explain {aside[-1].id}` shows what it said; "
            "once that is mended, by --prm-max-tokens or another --judge-url, `run.py rejudge` "
            "takes them up again."
        )
    waiting = [
        turn
        for turn in main
        if turn.next_role is not None and not turn.judged and turn.untrained_because is None
    ]
    if _most(waiting, [turn for turn in main if turn.next_role is not None]):
        yield (
            f"{len(waiting)} turns wait for the judge: `run.py status` says whether the judge "
            "fails, waits for the service, or is paused by the budget."
        )


def _unfit(main: Sequence[RecentTurn]) -> Iterator[str]:
    unfit = [turn for turn in main if (turn.untrained_because or "").startswith("sampled at ")]
    if _most(unfit, main):
        yield (
            f"{len(unfit)} of {len(main)} main turns cannot be trained: "
            f"{unfit[-1].untrained_because}. "
            "The client sets it; take temperature, top_p and top_k out of its settings for this "
            "model."
        )


def _stood_in(turns: Sequence[RecentTurn]) -> Iterator[str]:
    if count := sum(turn.fallback is not None for turn in turns):
        yield (
            f"{count} of {len(turns)} replies (marked *) came from another version than the "
            "current one, because that one failed; --reasons says why."
        )


def _most(part: Sequence[RecentTurn], whole: Sequence[RecentTurn]) -> bool:
    return len(whole) >= _FEWEST and len(part) >= _MOST * len(whole)
