"""`tinker-claw explain TURN`: one turn from its request to the version that it helped to make.

Rule: the user's words are shown here, on their own terminal, unless they say --no-text. Advantages
are those that the step has stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from statistics import fmean
from typing import Annotated

from pydantic import Field

from tinker_claw.app import orders
from tinker_claw.cli.common import LedgerCommand, wrapped, write
from tinker_claw.config.flags import WORD
from tinker_claw.config.settings import Training
from tinker_claw.errors import ClawError, LedgerError
from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.outcome import (
    LOST,
    moment,
    of_episode,
    outcome,
    plural,
    read_run,
    vote,
)
from tinker_claw.ledger.versions import read_version
from tinker_claw.ledger.views import Contents, TurnView, read_contents, read_turn
from tinker_claw.types import StopReason, Vote, Writer

LONGEST = 1500
"""Characters of a text that are shown."""
_FOLLOWED = {
    "user": "The owner went on:",
    "tool": "Its tools returned:",
    "other": "Others went on, who are not the owner:",
}
_BESIDE = {
    Writer.QUOTATION: "quoted from earlier messages",
    Writer.MEMBER: "another person's",
    Writer.EXTERNAL: "a mail's, a hook's or a page's",
}
_ENDED = {
    StopReason.STOP: ", the last of which ends the reply",
    StopReason.LENGTH: ", cut there by the limit on replies",
    StopReason.ABORT: ", until it broke off",
}
_MEANS = {1: "good", 0: "neutral", -1: "bad"}
_COST = "Serving, judging and teaching it cost ${:.6f}; steps are not in that."


class Explain(LedgerCommand):
    """Explain what became of one turn, and why. The gateway may be running."""

    turn: Annotated[int, WORD] = Field(description="its id, as `tinker-claw log turns` shows")
    no_text: bool = Field(False, description="leave out the texts of user, model and tools")

    def run(self) -> int:
        training = self.settings.training
        with suppress(ClawError):  # the ledger is there all the same
            if running := orders.health(self.ledger.parent):
                training = training.model_copy(update={"batch_size": running["batch_size"]})
        with self.rows() as ledger:
            lines = tell(ledger, self.turn, training, text=not self.no_text)
        write(lines)
        return 0


def tell(rows: Rows, turn_id: int, training: Training, *, text: bool) -> list[str]:
    """The lines. What `training` leaves to its default is as in the last step.

    Raises:
        LedgerError: there is no such turn.
    """
    turn, known = read_turn(rows, turn_id), read_contents(rows, turn_id)
    if turn is None or known is None:
        raise LedgerError(f"{rows.path} has no turn {turn_id}; `tinker-claw log turns` lists them")
    run = read_run(rows, training.batch_size, sure="batch_size" in training.model_fields_set)
    became = wrapped(outcome(turn, run))
    if turn.blanked == "forgotten":
        gone = f"Turn {turn.id} of session {turn.session_id} was forgotten: its words are gone."
        return [*wrapped(gone), *became]
    return [
        *_request(turn, known, text=text),
        *_answer(turn, known, text=text),
        *_judged(turn, known, text=text),
        *(line for told in of_episode(turn) for line in wrapped(told)),
        *became,
        *_trained(rows, turn, known),
        *([_COST.format(known.usd)] if known.usd else []),
    ]


def _request(turn: TurnView, known: Contents, *, text: bool) -> Iterator[str]:
    purpose = f", for: {turn.call}" if turn.call else ""
    yield from wrapped(
        f"Turn {turn.id}: {turn.kind} turn {turn.index} of session {turn.session_id} "
        f"({known.session_key}) of user {turn.user}, {moment(turn.created_at)}{purpose}."
    )
    yield from wrapped(f"It was taken for a {turn.kind} turn because: {turn.kind_reason}.")
    yield f"It asked, in a prompt of {turn.prompt_tokens} tokens:"
    yield from _quote(known.request_text, text=text)
    for lesson in known.lessons:
        yield f"It was told lesson {lesson['id']} (see `tinker-claw lessons`):"
        yield from _quote(lesson["text"], text=text)
    if known.voices:
        yield from wrapped(f"Who wrote what was new in it: {_voices(known)}.")
    if turn.lost is not None:
        yield from wrapped(
            "No turn got that as its next state, because it is not known what reply it answers: "
            f"{LOST[turn.lost]}."
        )


def _voices(known: Contents) -> str:
    """The writer of each new piece, in order, and how long it is."""
    told = (
        f"{who}{f' ({what})' * bool(what)}, {plural(n, 'character')}"
        for who, what, n in known.voices
    )
    return "; ".join(told)


def _answer(turn: TurnView, known: Contents, *, text: bool) -> Iterator[str]:
    done, length = known.completion, turn.completion_tokens
    ended = _ENDED.get(done.stop_reason, done.stop_reason)
    yield f"Version v{turn.policy_version} answered with {plural(length, 'token')}{ended}:"
    yield from _quote(known.reply_text, text=text)
    if length > len(done.tokens):
        yield "Its tokens are not in the ledger: they held what is not kept, or were dropped."
    if turn.fallback is not None:
        yield from wrapped(f"It was not the current version that answered: {turn.fallback}.")


def _judged(turn: TurnView, known: Contents, *, text: bool) -> Iterator[str]:
    if known.next_state is None:
        yield "Nothing has followed it so far."
    else:
        yield _FOLLOWED[known.next_state.role]
        yield from _quote(known.next_state.text, text=text)
        if known.next_state.role == "user":
            for writer, words in known.next_state.beside:
                yield f"Beside it stood what is {_BESIDE.get(writer, writer)}:"
                yield from _quote(words, text=text)
    yield from _outright(known, text=text)
    in_vain = [answer for answer in known.answers if answer["about"] == "in vain"]
    for at, answer in enumerate(in_vain, 1):
        yield f"Try {at} to judge it came to nothing:"
        yield from _quote(answer["answer"] or "(an empty answer)", text=text)
    if not turn.judged:
        return
    meaning = _verdict(turn.verdict)
    if turn.source == "judge":
        yield f"The judge{_votes(turn)}: {meaning}."
    else:
        if turn.votes:
            yield f"The judge{_votes(turn)}: by them {_verdict(turn.found)}."
        yield f"Its {turn.source}'s rating outranks the judge: {meaning}."
    if not known.hints and any(answer["about"] == "hint" for answer in known.answers):
        yield "The judge found no hint in what followed."
    used = known.hint
    for hint in known.hints:
        yield "Hint, as the user meant it" + (", used:" if hint == used else ":")
        yield from _quote(hint, text=text)
    if used and used not in known.hints:
        yield "The teacher was told:"
        yield from _quote(used, text=text)
    if known.hints and not turn.has_hint_place:
        yield "The prompt has no place for a hint, so it was not used."
    if known.untaught:
        yield from wrapped(f"No teacher scored it: {known.untaught}.")


def _outright(known: Contents, *, text: bool) -> Iterator[str]:
    for said in known.feedback:
        of = "the end of its session" if said["final"] else "it"
        more = [f"{name} {said[name]}" for name in ("task", "group") if said[name]]
        rest = f" ({', '.join(more)})" if more else ""
        end = ":" if said["text"] else "."
        told = f"Its {said['source']} rated {of} outright: {vote(said['score'])}{rest}{end}"
        yield from wrapped(told)
        if said["text"]:
            yield from _quote(said["text"], text=text)


def _votes(turn: TurnView) -> str:
    votes = ", ".join("unreadable" if v is None else vote(v) for v in turn.votes)
    return f" voted {votes}" if votes else ""


def _verdict(value: Vote | None) -> str:
    if value is None:
        return "no vote could be read, so there is no verdict"
    return f"the verdict is {vote(value)} ({_MEANS[value]})"


def _trained(rows: Rows, turn: TurnView, known: Contents) -> Iterator[str]:
    sample, each = turn.sample, known.advantages
    if turn.trained_in_step is None or sample is None or sample.advantage is None:
        return
    yield f"Advantage by its reward: {sample.advantage:+z.3f} (above 0: more of this)."
    if each:
        told = f"{min(each):+z.3f} to {max(each):+z.3f}, {fmean(each):+z.3f} in the mean"
        yield from wrapped(f"On its tokens {told}: with all that the method adds or takes away.")
    made = read_version(rows, sample.version) if sample.version is not None else None
    if made is not None and (age := made.step - 1 - turn.version_step):
        yield f"It was {plural(age, 'step')} old by then; its advantages are corrected for that."


def _quote(words: str, *, text: bool) -> Iterator[str]:
    if not text:
        yield f"    ({len(words)} characters)"
        return
    for line in words[:LONGEST].splitlines() or [""]:
        yield from wrapped(line, "  | ") or ["  |"]
    if len(words) > LONGEST:
        yield f"  | … and {len(words) - LONGEST} more characters"
