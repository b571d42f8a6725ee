"""What became of a turn, or what it waits for: one sentence for every state that it can be in.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from tinker_claw.cli.common import (
    LedgerFlags,
    moment,
    number,
    until_left,
    vote,
    wrapped,
    write,
)
from tinker_claw.config.flags import WORD
from tinker_claw.config.settings import Training
from tinker_claw.errors import LedgerError
from tinker_claw.ledger.database import reading
from tinker_claw.ledger.turns import TRIES
from tinker_claw.ledger.views import History, SampleHistory, read_history
from tinker_claw.methods import METHODS
from tinker_claw.methods.advantages import reward_advantages, token_advantages, topk_advantages
from tinker_claw.methods.base import Evidence, Method, Signal
from tinker_claw.types import Completion, HintScores, Kind, Lost, Verdict

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


# The advantages with which a step trained a sample, told again from what the step recorded.
#
# Rule: computed by the functions that the methods use, so this cannot say anything else than they
# did. What hangs on the weights of that time (the correction of a stale sample, the pull towards
# the
# base) is not known any more, and is left out. Pure.


@dataclass(frozen=True, slots=True)
class Advantages:
    """Of one sample, before normalisation by its length; weights of the method included."""

    reward: float | None
    """Of every token; None: the sample has no reward, or the method takes none."""
    distill: float | None
    """Mean over tokens of |A|, summed over candidates; None: no teacher was asked."""
    bounded: float | None
    """Share of the differences between teacher and student that --opd-clip cut to its bound."""


def advantages(
    sample: SampleHistory, done: Completion, method: Method, cfg: Training
) -> Advantages:
    """Those of a sample that a step has trained.

    Args:
        sample: with the rewards of its step.
        cfg: the rule that the step recorded.
    """
    weights = method.weights(cfg)
    reward = distill = bounded = None
    if weights.reward and sample.reward is not None:
        # Samples of one batch with equal rewards have equal advantages.
        at = sample.rewards.index(sample.reward)
        reward = weights.reward * reward_advantages(sample.rewards, cfg.baseline)[at]
    if weights.distill and sample.teacher is not None:
        rows = _rows(sample.teacher, done, cfg, cfg.opd_clip)
        free = _rows(sample.teacher, done, cfg, 0.0)
        distill = weights.distill * sum(abs(a) for row in rows for a in row) / len(rows)
        cut = [a != b for x, y in zip(rows, free, strict=True) for a, b in zip(x, y, strict=True)]
        bounded = sum(cut) / len(cut)
    return Advantages(reward, distill, bounded)


def _rows(
    teacher: HintScores, done: Completion, cfg: Training, clip: float
) -> list[Sequence[float]]:
    """One row of advantages per sampled token. `clip`: 0 for none."""
    if cfg.opd_mode == "token":
        return [[a] for a in token_advantages(teacher.logprobs, done.logprobs, clip)]
    return [
        topk_advantages(scored, own, clip)
        for scored, own in zip(teacher.targets, done.topk_logprobs, strict=True)
    ]


# `run.py explain TURN`: one turn from its request to the version that it helped to make.
#
# Rule: the user's words are shown here, on his own terminal, unless he says --no-text.


LONGEST = 1500
"""Characters of a text that are shown."""
_MEANS = {1: "good", 0: "neutral", -1: "bad"}


class ExplainFlags(LedgerFlags):
    """Tell what came of one turn, and why, also while the gateway runs."""

    turn: Annotated[int, WORD] = Field(description="its id, as `run.py log turns` shows")
    no_text: bool = Field(False, description="without what user, model and tools wrote")


def explain(given: ExplainFlags) -> int:
    """Tell a turn in words.

    Raises:
        ConfigError: a setting is wrong.
        LedgerError: there is no ledger, or no such turn.
    """
    file = given.ledger
    with until_left(), reading(file) as ledger:
        with ledger.moment():
            turn = read_history(ledger, given.turn)
        if turn is None:
            raise LedgerError(
                f"{file} has no turn {given.turn}; `python run.py log turns` lists them"
            )
        write(tell(turn, given.settings.training, text=not given.no_text))
    return 0


def tell(turn: History, training: Training, *, text: bool) -> list[str]:
    """The lines. `training`: settings, for what the ledger does not say."""
    if turn.forgotten:
        return [
            *wrapped(
                f"Turn {turn.id} of session {turn.session_id} was forgotten: its words are gone."
            ),
            *wrapped(fate(turn, training.batch_size)),
        ]
    return [
        *_request(turn, text=text),
        *_answer(turn, text=text),
        *_judged(turn, text=text),
        *wrapped(fate(turn, training.batch_size)),
        *_trained(turn, training),
        *_cost(turn),
    ]


def _request(turn: History, *, text: bool) -> Iterator[str]:
    purpose = f", for: {turn.call}" if turn.call else ""
    yield from wrapped(
        f"Turn {turn.id}: {turn.kind} turn {turn.index} of session {turn.session_id} "
        f"({turn.session_key}) of user {turn.user}, {moment(turn.created_at)}{purpose}."
    )
    yield from wrapped(f"It was taken for a {turn.kind} turn because: {turn.kind_reason}.")
    yield f"It asked, in a prompt of {turn.prompt_tokens} tokens:"
    yield from _quote(turn.request_text, text=text)
    if turn.lost is not None:
        yield from wrapped(
            "No turn got that as its next state, because it is not known what reply it answers: "
            f"{LOST[turn.lost]}."
        )


def _answer(turn: History, *, text: bool) -> Iterator[str]:
    done = turn.completion
    length = turn.completion_tokens
    yield f"Version v{turn.version} answered with {length} tokens ({done.stop_reason}):"
    yield from _quote(turn.reply_text, text=text)
    if length > len(done.tokens):
        yield "Its tokens are not in the ledger: they held what is not kept, or were dropped."
    if turn.fallback is not None:
        yield from wrapped(f"It was not the current version that answered: {turn.fallback}.")
    if turn.misfit is not None:
        yield from wrapped(f"{turn.misfit[0].upper()}{turn.misfit[1:]}.")


def _judged(turn: History, *, text: bool) -> Iterator[str]:
    if turn.next_state is None:
        yield "Nothing has followed it so far."
        return
    who = "The user went on:" if turn.next_state.role == "user" else "Its tools returned:"
    yield who
    yield from _quote(turn.next_state.text, text=text)
    for at, answer in enumerate(turn.in_vain, 1):
        yield f"Try {at} to judge it came to nothing:"
        yield from _quote(answer or "(an empty answer)", text=text)
    verdict = turn.verdict
    if verdict is None:
        return
    cast_votes = ", ".join("unreadable" if v is None else vote(v) for v in verdict.votes)
    meaning = (
        "no vote could be read, so there is no verdict"
        if verdict.value is None
        else f"the verdict is {vote(verdict.value)} ({_MEANS[verdict.value]})"
    )
    yield f"The judge voted {cast_votes}: {meaning}." if cast_votes else f"The judge: {meaning}."
    method = METHODS.get(turn.run.get("method", ""))
    if not turn.hints and (method is None or Signal.HINT in method.needs):
        yield "The judge found no hint in it."
    used = turn.sample.teacher.hint if turn.sample and turn.sample.teacher else None
    for hint in turn.hints:
        yield "Hint, as the user meant it" + (", used:" if hint == used else ":")
        yield from _quote(hint, text=text)
    if used and used not in turn.hints:
        yield "The teacher was told:"
        yield from _quote(used, text=text)
    if turn.hints and not turn.has_hint_place:
        yield "The prompt has no place for a hint, so it was not used."


def _trained(turn: History, training: Training) -> Iterator[str]:
    sample = turn.sample
    if sample is None or sample.state != "trained" or sample.trained_in is None:
        return
    step = sample.trained_in
    rule = dict(step.metrics.get("rule") or {})
    method = METHODS.get(rule.pop("method", turn.run.get("method")))
    if method is None:
        return
    cfg = Training(**rule) if rule else training
    found = advantages(sample, turn.completion, method, cfg)
    if not rule:
        yield "(By today's settings: the step did not record those of its time.)"
    if found.reward is not None:
        given = [reward for reward in sample.rewards if reward is not None]
        of = f"the {len(given)} verdicts of the step had the mean {sum(given) / len(given):+.2f}"
        yield from wrapped(
            f"Advantage from its verdict: {found.reward:+.3f} on every token ({of}; "
            f"--baseline {cfg.baseline})."
        )
    elif sample.reward is None and method.reward:
        yield "It carried no verdict of +1 or -1, so only its hint counted."
    if method.teaching and found.distill is not None and found.bounded is not None:
        cut = f"{found.bounded:.0%} of the differences between teacher and reply were cut to "
        cut += f"{cfg.opd_clip:g} nat{'s' if cfg.opd_clip != 1 else ''}"
        yield from wrapped(
            f"Advantage from its {method.teaching.what}: {found.distill:.3f} in the mean over its "
            f"tokens, of either sign{f'; {cut}' if cfg.opd_clip else ''}."
        )
    yield from wrapped(_age(turn, sample.parent_step, step.metrics.get("clip_share"), cfg))


def _age(turn: History, parent_step: int | None, clip_share: float | None, cfg: Training) -> str:
    age = (parent_step or 0) - turn.version_step
    told = "It was fresh: the version that answered was the one that was trained on."
    if age:
        told = (
            f"It was {age} {'step' if age == 1 else 'steps'} old by then; how the correction for "
            "that changed its advantages is not recorded."
        )
    if clip_share is not None:
        told += f" Of all tokens of the step {clip_share:.1%} were beyond the ratio's bounds."
    if cfg.kl_beta:
        told += f" A pull towards the base model (--kl-beta {number(cfg.kl_beta)}) came on top."
    return told


def _cost(turn: History) -> Iterator[str]:
    if turn.usd:
        yield f"Serving, judging and teaching it cost ${turn.usd:.6f}; steps are not in that."


def _quote(words: str, *, text: bool) -> Iterator[str]:
    if not text:
        yield f"    ({len(words)} characters)"
        return
    for line in words[:LONGEST].splitlines() or [""]:
        yield from wrapped(line, "  | ") or ["  |"]
    if len(words) > LONGEST:
        yield f"  | … and {len(words) - LONGEST} more characters"
