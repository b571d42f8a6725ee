"""`run.py explain TURN`: one turn from its request to the version that it helped to make.

Rule: the user's words are shown here, on his own terminal, unless he says --no-text.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence

from tinker_claw import config
from tinker_claw.config import Training
from tinker_claw.errors import LedgerError
from tinker_claw.ledger.history import History, read_history
from tinker_claw.ledger.reading import reading
from tinker_claw.methods import METHODS, Signal
from tinker_claw.story.advantages import advantages
from tinker_claw.story.command import FLAGS_FROM_RUN, ledger_file, parse, until_left, write
from tinker_claw.story.fate import LOST, fate
from tinker_claw.story.table import moment, number, printable, vote

WIDTH = 100
LONGEST = 1500
"""Characters of a text that are shown."""
_MEANS = {1: "good", 0: "neutral", -1: "bad"}


def main(arguments: Sequence[str]) -> int:
    """Tell a turn in words.

    Raises:
        ConfigError: a setting is wrong.
        LedgerError: there is no ledger, or no such turn.
    """
    given, settings = parse(parser(), arguments)
    file = ledger_file(settings)
    with until_left(), reading(file) as ledger:
        with ledger.moment():
            turn = read_history(ledger, given.turn)
        if turn is None:
            raise LedgerError(
                f"{file} has no turn {given.turn}; `python run.py log turns` lists them"
            )
        write(tell(turn, settings.training, text=not given.no_text))
    return 0


def tell(turn: History, training: Training, *, text: bool) -> list[str]:
    """The lines. `training`: settings, for what the ledger does not say."""
    if turn.forgotten:
        return [
            *_wrap(
                f"Turn {turn.id} of session {turn.session_id} was forgotten: its words are gone."
            ),
            *_wrap(fate(turn, training.batch_size)),
        ]
    return [
        *_request(turn, text=text),
        *_answer(turn, text=text),
        *_judged(turn, text=text),
        *_wrap(fate(turn, training.batch_size)),
        *_trained(turn, training),
        *_cost(turn),
    ]


def _request(turn: History, *, text: bool) -> Iterator[str]:
    purpose = f", for: {turn.call}" if turn.call else ""
    yield from _wrap(
        f"Turn {turn.id}: {turn.kind} turn {turn.index} of session {turn.session_id} "
        f"({turn.session_key}) of user {turn.user}, {moment(turn.created_at)}{purpose}."
    )
    yield from _wrap(f"It was taken for a {turn.kind} turn because: {turn.kind_reason}.")
    yield f"It asked, in a prompt of {turn.prompt_tokens} tokens:"
    yield from _quote(turn.request_text, text=text)
    if turn.lost is not None:
        yield from _wrap(
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
        yield from _wrap(f"It was not the current version that answered: {turn.fallback}.")
    if turn.misfit is not None:
        yield from _wrap(f"{turn.misfit[0].upper()}{turn.misfit[1:]}.")


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
        yield from _wrap(
            f"Advantage from its verdict: {found.reward:+.3f} on every token ({of}; "
            f"--baseline {cfg.baseline})."
        )
    elif sample.reward is None and method.reward:
        yield "It carried no verdict of +1 or -1, so only its hint counted."
    if method.teaching and found.distill is not None and found.bounded is not None:
        cut = f"{found.bounded:.0%} of the differences between teacher and reply were cut to "
        cut += f"{cfg.opd_clip:g} nat{'s' if cfg.opd_clip != 1 else ''}"
        yield from _wrap(
            f"Advantage from its {method.teaching.what}: {found.distill:.3f} in the mean over its "
            f"tokens, of either sign{f'; {cut}' if cfg.opd_clip else ''}."
        )
    yield from _wrap(_age(turn, sample.parent_step, step.metrics.get("clip_share"), cfg))


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
        yield from textwrap.wrap(
            printable(line), WIDTH, initial_indent="  | ", subsequent_indent="  | "
        ) or ["  |"]
    if len(words) > LONGEST:
        yield f"  | … and {len(words) - LONGEST} more characters"


def _wrap(sentence: str) -> list[str]:
    return textwrap.wrap(printable(sentence), WIDTH)


def parser() -> argparse.ArgumentParser:
    """The command's own flags."""
    top = config.Flags(
        prog="run.py explain",
        description="Tell what came of one turn, and why, also while the gateway runs.",
        epilog=FLAGS_FROM_RUN,
        allow_abbrev=False,
    )
    top.add_argument("turn", type=int, metavar="TURN", help="its id, as `run.py log turns` shows")
    top.add_argument(
        "--no-text", action="store_true", help="without what user, model and tools wrote"
    )
    return top
