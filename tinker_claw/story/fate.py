"""What became of a turn, or what it waits for: one sentence for every state that it can be in.
Pure."""

from __future__ import annotations

from tinker_claw.ledger.history import History, SampleHistory
from tinker_claw.ledger.judgements import TRIES
from tinker_claw.methods import METHODS, Evidence
from tinker_claw.story.table import moment
from tinker_claw.types import Kind, Lost, Verdict

LOST = {
    Lost.COMPACTED: "a summary stands for the history, and none of the session's replies behind it",
    Lost.EDITED: "what leads to that reply was changed",
    Lost.UNKNOWN: "that reply is, to the letter, none of the last that were given here",
}
"""Why a request could not be tied to the turn whose reply it answers."""


def fate(turn: History, batch_size: int) -> str:
    """Whether it is trained, and why. `batch_size`: samples of a step, where none was taken yet."""
    if turn.sample is not None:
        return _sampled(turn, turn.sample, turn.batch or batch_size)
    if turn.kind is Kind.SIDE:
        return "It is never trained: it is a side turn."
    if turn.untrained_because is not None:
        return f"It is not trained: {turn.untrained_because}."
    if turn.next_state is None:
        return _unfollowed(turn)
    if turn.verdict is None and turn.in_vain:
        return (
            f"It waits for the judge, and is tried again, at most {TRIES} times; "
            f"{len(turn.in_vain)} came to nothing."
        )
    if turn.verdict is None:
        return (
            "It waits for the judge. `python run.py status` says whether the judge works, waits "
            "for the service, or is paused by the budget."
        )
    if told := _told(turn, turn.verdict):
        return f"It was judged, and waits for the teacher, who scores the reply under the {told}."
    return "It was judged, and waits to be queued as a sample, which takes a moment."


def _unfollowed(turn: History) -> str:
    if turn.session_closed:
        return (
            "It waits for a next state. Its session has been idle for long; whatever the user "
            "still says in it counts."
        )
    if turn.passed_by is not None:
        told = (
            "It waits for a next state, and may wait for ever: its session has gone on with turn "
            f"{turn.passed_by}, "
        )
        if turn.passed_lost is None:
            return f"{told}which does not answer this reply."
        return f"{told}of which it is not known what reply it answers: {LOST[turn.passed_lost]}."
    return "It waits for a next state: the user's next message, or the results of its tools."


def _told(turn: History, verdict: Verdict) -> str | None:
    """What the teacher is told, in a word; None: it is not asked."""
    method = METHODS.get(turn.run.get("method", ""))
    if not turn.has_hint_place or method is None or method.teaching is None:
        return None
    known = Evidence(verdict, turn.hints, turn.next_state)
    return method.teaching.what if method.tells(known) else None


def _sampled(turn: History, sample: SampleHistory, batch: int) -> str:
    failed = _failed(sample)
    if sample.state == "trained" and (step := sample.trained_in) is not None:
        others = len(sample.rewards) - 1
        company = (
            f"with {others} other {'sample' if others == 1 else 'samples'}" if others else "alone"
        )
        behind = " A rollback has left that version behind." if sample.left_behind else ""
        return (
            f"It was trained in step {step.id}, {company}, which made v{step.version}"
            f"{_at(step.finished_at)}.{behind}{failed}"
        )
    if sample.state == "queued":
        return _queued(turn, sample, batch) + failed
    if sample.state == "expired" and turn.left_behind:
        return (
            f"It is not trained: its sample expired, because a rollback has left v{turn.version}, "
            f"which answered, behind.{failed}"
        )
    if sample.state == "expired":
        return (
            "It is not trained: its sample expired, because too many steps had been taken since "
            f"v{turn.version} answered (--max-staleness); by now they are "
            f"{turn.newest_step - turn.version_step}.{failed}"
        )
    if sample.state == "quarantined":
        return f"It is not trained: its sample was set aside, because steps with it failed.{failed}"
    return f"It is not trained: its sample is {sample.state}.{failed}"


def _queued(turn: History, sample: SampleHistory, batch: int) -> str:
    if sample.tries and sample.tries[-1].status == "intent":
        return f"It is being trained right now, in step {sample.tries[-1].id}."
    place = sample.ahead + 1
    if turn.queued < batch:
        missing = batch - turn.queued
        return (
            f"It waits for its step as sample {place} of {turn.queued} in the queue; a step takes "
            f"{batch}, so {missing} {'is' if missing == 1 else 'are'} missing."
        )
    return (
        f"It waits for its step as sample {place} of {turn.queued} in the queue, from which "
        f"steps take {batch} at a time, the oldest first."
    )


def _failed(sample: SampleHistory) -> str:
    void = [step for step in sample.tries if step.status == "void"]
    if not void:
        return ""
    numbers = ", ".join(str(step.id) for step in void)
    return (
        f" Step{'s' if len(void) > 1 else ''} {numbers} with it came to nothing: "
        f"{(void[-1].error or 'no reason is known').rstrip('.')}."
    )


def _at(when: float | None) -> str:
    return "" if when is None else f" at {moment(when)}"
