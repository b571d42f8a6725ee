"""Sentences on the outcome of a turn or what it waits for, on patterns among turns, and on
episodes.

Rule: these sentences are written only here, and each contains its short words (`why.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.groups import LIMIT_S
from tinker_claw.ledger.judgements import TRIES
from tinker_claw.ledger.views import SampleView, TurnView
from tinker_claw.types import Kind, Lost
from tinker_claw.why import Why

LOST: Mapping[str, str] = {
    Lost.COMPACTED: "a summary replaces the history, and no reply of the session comes after it",
    Lost.EDITED: "the messages before that reply were changed",
    Lost.UNKNOWN: "the reply before it in the history is not one given here lately, word for word",
}
"""Why a request could not be tied to the turn whose reply it answers."""
_STEPS = {"committed": "taken", "intent": "under way"}
_PLAIN = {
    Why.SIDE: "It is never trained: it is a {}.",
    Why.IDLE: "It {}: whatever the user still says in it counts.",
    Why.NEXT: "It {}: the user's next message, or the results of its tools.",
}
"""Complete sentences with the words for the outcome."""


@dataclass(frozen=True, slots=True)
class RunView:
    """State of the run on which a turn's outcome depends."""

    step: int
    """Optimizer steps of the newest version since the base."""
    queued: int
    """Number of samples in the queue."""
    batch: int
    """Samples of a step."""


def read_run(rows: Rows, batch_size: int, *, sure: bool = False) -> RunView:
    """Read the state of the run.

    Args:
        batch_size: samples of a step, where none was taken yet, or `sure` to be the next's.
    """
    taken = rows.one(
        "SELECT COALESCE(json_extract(metrics, '$.rule.batch_size'), "
        "json_extract(metrics, '$.samples')) FROM steps WHERE status = 'committed' "
        "ORDER BY id DESC LIMIT 1"
    )
    return RunView(
        step=rows.one("SELECT step FROM versions ORDER BY id DESC LIMIT 1") or 0,
        queued=rows.one("SELECT COUNT(*) FROM samples WHERE state = 'queued'"),
        batch=batch_size if sure or not taken else taken,
    )


def step_word(status: str) -> str:
    """Return the word for a step's status."""
    return _STEPS.get(status, status)


def outcome(turn: TurnView, run: RunView) -> str:
    """Describe the outcome of a turn, or what it waits for, in sentences that contain its word."""
    became = _became(turn) if turn.sample is None else _sampled(turn, turn.sample, run)
    if turn.unused is None:
        return became
    rating = f"Its {turn.said_by}'s rating is recorded and trains nothing"
    return f"{became} {rating}: {turn.unused.rstrip('.')}."


def _became(turn: TurnView) -> str:
    word = turn.outcome
    if turn.why is not None and turn.why in _PLAIN:
        return _PLAIN[turn.why].format(word)
    if turn.untrained_because is not None:
        return f"It is not trained: {turn.untrained_because.rstrip('.')}."
    if turn.why is Why.PASSED:
        return _passed(turn)
    if turn.why is Why.JUDGE and turn.tries:
        again = f"and is tried again, at most {TRIES} times; {turn.tries} came to nothing"
        return f"It {word}, {again}."
    if turn.why is Why.JUDGE:
        return (
            f"It {word}. `tinker-claw status` says whether the judge works, waits for the "
            "service, or is paused by the budget."
        )
    if turn.judged:
        longer = "which takes a moment, or longer where a teacher scores it first"
        return f"It was judged, and {word}, {longer}."
    return _running(turn)


def _passed(turn: TurnView) -> str:
    if turn.passed_by is None:
        return f"It {turn.outcome}: its session is private now, and nothing of it is kept."
    which = "which does not answer this reply"
    if turn.passed_lost is not None:
        which = f"of which it is not known what reply it answers: {LOST[turn.passed_lost]}"
    return f"It {turn.outcome}: its session has gone on with turn {turn.passed_by}, {which}."


def _running(turn: TurnView) -> str:
    """Describe an episode that waits for its outcome, or for its group's."""
    limit = f"{LIMIT_S / 3600:g} hour after the last that is heard of"
    if turn.why is Why.ENDING:
        expires = f"without one it expires {limit} its {'group' if turn.group else 'episode'}"
        return f"It {turn.outcome}: final feedback says how its episode ended; {expires}."
    if turn.why is Why.QUEUE:
        return f"Its episode has ended, and it {turn.outcome}, which takes a moment."
    return (
        f"It {turn.outcome}: of {turn.group_size} episodes of {turn.group} {turn.group_done} have "
        f"their outcome. Those that have one are queued without the others {limit} any of them."
    )


def _sampled(turn: TurnView, sample: SampleView, run: RunView) -> str:
    if sample.state == "trained":
        told = _trained(turn, sample)
    elif sample.state == "held":
        told = _running(turn)
    elif sample.state == "queued":
        told = _queued(turn, sample, run)
    elif turn.why is not Why.EXPIRED:  # set aside, or expired for a reason of its own
        told = f"It is not trained: {turn.outcome}."
    else:
        told = (
            f"It is not trained: {turn.outcome}, because too many steps had been taken since "
            f"v{turn.policy_version} answered (--max-staleness); by now they are "
            f"{run.step - turn.version_step}."
        )
    return told + _failed(sample)


def _trained(turn: TurnView, sample: SampleView) -> str:
    others = sample.together - 1
    company = f"with {others} other {'sample' if others == 1 else 'samples'}" if others else "alone"
    at = "" if sample.finished_at is None else f" at {moment(sample.finished_at)}"
    behind = " A rollback has left that version behind." if sample.left_behind else ""
    return f"It was {turn.outcome}, {company}, which made v{sample.version}{at}.{behind}"


def _queued(turn: TurnView, sample: SampleView, run: RunView) -> str:
    if turn.why is Why.TRAINING:
        return f"It is {turn.outcome}, in step {sample.begun}."
    missing = run.batch - run.queued
    rest = (
        f"A step takes {run.batch} at a time or whole groups, the newest first, and not too many "
        "of one session, user or tool."
    )
    if missing > 0:
        are = "is" if missing == 1 else "are"
        rest = f"A step takes {run.batch}, so {missing} {are} missing."
    queued = f"{plural(run.queued, 'sample')} {'is' if run.queued == 1 else 'are'} queued"
    return f"It {turn.outcome}; {queued}. {rest}"


def _failed(sample: SampleView) -> str:
    if not sample.void:
        return ""
    whys = filter(None, [*sample.void.values()][::-1])
    why = next(whys, "no reason is known").rstrip(".")
    steps = f"Step{'s' if len(sample.void) > 1 else ''} {', '.join(sample.void)}"
    return f" {steps} with it came to nothing: {why}."


def moment(at: float, now: float | None = None) -> str:
    """Return local time, with the date where it is not today."""
    then = datetime.fromtimestamp(at)
    today = then.date() == (datetime.now() if now is None else datetime.fromtimestamp(now)).date()
    return then.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S")


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 3 samples, 1 sample."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def vote(value: float | None) -> str:
    """Return +1, 0 or -1, or a reward between; `none` where no vote was valid."""
    return "none" if value is None else f"{value:+z.3g}" if value else "0"


# Episodes


def of_episode(turn: TurnView) -> Iterator[str]:
    """Yield sentences on the turn's episode; none where its session is not an episode."""
    task = f" at task {turn.task}" if turn.task else ""
    group = f", one of {turn.group_size} of group {turn.group}" if turn.group else ""
    if not turn.episode:
        if task:
            yield f"Its session is an attempt{task}."
        return
    ended = "has no outcome"
    if turn.session_outcome is not None:
        ended = f"has the outcome {vote(turn.session_outcome)}"
    yield f"Its session is an episode{task}{group}, and {ended}."
    sample = turn.sample
    if sample is not None and sample.state != "held" and sample.reward is not None:
        of = "outcome and votes" if turn.judged else "its outcome alone"
        yield f"Reward of this reply, {of}: {vote(sample.reward)}."


# Patterns among turns

_MOST = 0.75
_FEWEST = 3
"""Fewest turns that make a pattern."""


def advice(turns: Sequence[TurnView]) -> Iterator[str]:
    """Yield advice on these turns, oldest first; none where learning works."""
    main = [turn for turn in turns if turn.kind is Kind.MAIN]
    followed = [turn for turn in main if turn.next_role is not None]
    side = [turn for turn in turns if turn.kind is Kind.SIDE]
    if _most(side, turns):
        reason, times = Counter(turn.kind_reason for turn in side).most_common(1)[0]
        yield (
            f"{len(side)} of {len(turns)} requests are side turns, which are never trained; the "
            f"reason of {times}: {reason}. Recaps, titles, compaction, heartbeat and cron are "
            "meant to be side turns. If these were your own messages, the client sends something "
            "that marks them: look for a header X-Turn-Type, for a model name with @v, and for "
            "another proxy in between; `tinker-claw explain` shows the reason of each."
        )
    if len(main) >= _FEWEST and not followed:
        why = (
            "although sessions go on. The replies do not come back in the client's history as they "
            "were sent: something between rewrites or drops them."
        )
        if len({turn.session_id for turn in main}) == len(main):
            why = (
                "so there is nothing to judge: every one stands alone in its session. Go on in the "
                "same conversation; if you did, the client sends neither its earlier messages back "
                "nor a name for the session (X-Session-Id)."
            )
        yield f"None of the {len(main)} main turns has a next state, {why}"
    unfit = [turn for turn in main if turn.refused is Why.SAMPLED_AT]
    if _most(unfit, main):
        yield (
            f"{len(unfit)} of {len(main)} main turns cannot be trained: "
            f"{unfit[-1].untrained_because}. The client sets it; take temperature, top_p and top_k "
            "out of its settings for this model."
        )


def _most(part: Sequence[TurnView], whole: Sequence[TurnView]) -> bool:
    return len(whole) >= _FEWEST and len(part) >= _MOST * len(whole)


def run_of(rows: Rows) -> dict[str, str]:
    """Return model, method and backend of the run."""
    return rows.pairs("SELECT * FROM meta WHERE key IN ('model', 'method', 'backend')")
