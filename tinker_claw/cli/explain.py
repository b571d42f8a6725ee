"""`tinker-claw explain TURN`: one turn from its request to the version that it helped to make.

Rule: the user's words are shown here, on their own terminal, unless they say --no-text. The
advantages with which a step trained a sample are told again from what the step recorded, by the
functions that the methods use, so this cannot say anything else than they did. What hangs on the
weights of that time (the correction of a stale sample, the pull towards the base) is not known any
more, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any

from pydantic import Field

from tinker_claw.cli.common import (
    LedgerCommand,
    number,
    wrapped,
    write,
)
from tinker_claw.config.flags import WORD
from tinker_claw.config.settings import Training
from tinker_claw.errors import LedgerError
from tinker_claw.insight import read_run_view, trained_by
from tinker_claw.ledger.database import Rows, reading
from tinker_claw.ledger.figures import RewardView, rewards_of
from tinker_claw.ledger.outcome import LOST, RunView, moment, of_episode, outcome, plural, vote
from tinker_claw.ledger.versions import read_version
from tinker_claw.ledger.views import Contents, TurnView, read_contents, read_turn
from tinker_claw.methods import METHODS
from tinker_claw.methods.advantages import TOOL_SUCCESS, token_advantages
from tinker_claw.methods.base import Method, Signal
from tinker_claw.methods.passes import candidate_advantages, reward_parts
from tinker_claw.types import Completion, HintScores, Vote

LONGEST = 1500
"""Characters of a text that are shown."""
_MEANS = {1: "good", 0: "neutral", -1: "bad"}
_COST = "Serving, judging and teaching it cost ${:.6f}; steps are not in that."


class Explain(LedgerCommand):
    """Tell what came of one turn, and why, also while the gateway runs."""

    turn: Annotated[int, WORD] = Field(description="its id, as `tinker-claw log turns` shows")
    no_text: bool = Field(False, description="without what user, model and tools wrote")

    def run(self) -> int:
        with reading(self.ledger) as ledger, ledger.moment():
            lines = tell(ledger, self.turn, self.settings.training, text=not self.no_text)
        write(lines)
        return 0


def tell(rows: Rows, turn_id: int, training: Training, *, text: bool) -> list[str]:
    """The lines. `training`: settings, for what the ledger does not say.

    Raises:
        LedgerError: there is no such turn.
    """
    turn, known = read_turn(rows, turn_id), read_contents(rows, turn_id)
    if turn is None or known is None:
        raise LedgerError(f"{rows.path} has no turn {turn_id}; `tinker-claw log turns` lists them")
    run = read_run_view(rows, training.batch_size)
    became = wrapped(outcome(turn, run).sentence)
    if turn.blanked == "forgotten":
        gone = f"Turn {turn.id} of session {turn.session_id} was forgotten: its words are gone."
        return [*wrapped(gone), *became]
    return [
        *_request(turn, known, text=text),
        *_answer(turn, known, text=text),
        *_judged(turn, known, run, text=text),
        *(line for told in of_episode(turn) for line in wrapped(told)),
        *became,
        *_trained(rows, turn, known, run, training),
        *([_COST.format(known.usd)] if known.usd else []),
    ]


def _request(turn: TurnView, known: Contents, *, text: bool) -> Iterator[str]:
    purpose = f", for: {turn.call}" if turn.call else ""
    yield from wrapped(
        f"Turn {turn.id}: {turn.kind} turn {turn.index} of session {turn.session_id} "
        f"({turn.session_key}) of user {turn.user}, {moment(turn.created_at)}{purpose}."
    )
    yield from wrapped(f"It was taken for a {turn.kind} turn because: {turn.kind_reason}.")
    yield f"It asked, in a prompt of {turn.prompt_tokens} tokens:"
    yield from _quote(known.request_text, text=text)
    if turn.lost is not None:
        yield from wrapped(
            "No turn got that as its next state, because it is not known what reply it answers: "
            f"{LOST[turn.lost]}."
        )


def _answer(turn: TurnView, known: Contents, *, text: bool) -> Iterator[str]:
    done, length = known.completion, turn.completion_tokens
    yield f"Version v{turn.policy_version} answered with {length} tokens ({done.stop_reason}):"
    yield from _quote(known.reply_text, text=text)
    if length > len(done.tokens):
        yield "Its tokens are not in the ledger: they held what is not kept, or were dropped."
    if turn.fallback is not None:
        yield from wrapped(f"It was not the current version that answered: {turn.fallback}.")
    if turn.misfit is not None:
        yield from wrapped(f"{turn.misfit[0].upper()}{turn.misfit[1:]}.")


def _judged(turn: TurnView, known: Contents, run: RunView, *, text: bool) -> Iterator[str]:
    if known.next_state is None:
        yield "Nothing has followed it so far."
    else:
        yield "The user went on:" if known.next_state.role == "user" else "Its tools returned:"
        yield from _quote(known.next_state.text, text=text)
    yield from _outright(known, text=text)
    in_vain = [answer for answer in known.answers if answer["about"] == "in vain"]
    for at, answer in enumerate(in_vain, 1):
        yield f"Try {at} to judge it came to nothing:"
        yield from _quote(answer["answer"] or "(an empty answer)", text=text)
    if not turn.judged:
        return
    meaning, judge = _verdict(turn.verdict), "fallback judge" if known.by_second else "judge"
    if turn.source == "judge":
        yield f"The {judge}{_votes(turn)}: {meaning}."
    else:
        if turn.votes:
            yield f"The {judge}{_votes(turn)}: by them {_verdict(turn.found)}."
        yield f"What its {turn.source} said of it outranks the judge: {meaning}."
    if known.audit is not None:
        yield f"The auditor's verdict is {vote(known.audit)}."
    method = METHODS.get(run.names.get("method", ""))
    asked = turn.source == "judge"  # of the others it may not have been asked for one
    if asked and not known.hints and (method is None or Signal.HINT in method.needs):
        yield "The judge found no hint in it."
    used = known.teacher.hint if known.teacher else None
    for hint in known.hints:
        yield "Hint, as the user meant it" + (", used:" if hint == used else ":")
        yield from _quote(hint, text=text)
    if used and used not in known.hints:
        yield "The teacher was told:"
        yield from _quote(used, text=text)
    if known.hints and not turn.has_hint_place:
        yield "The prompt has no place for a hint, so it was not used."
    if known.untaught:
        yield from wrapped(f"No teacher was asked or heard: {known.untaught}.")


def _outright(known: Contents, *, text: bool) -> Iterator[str]:
    for said in known.feedback:
        of = "how its session ended" if said["final"] else "it"
        more = [f"{name} {said[name]}" for name in ("task", "group") if said[name]]
        rest = f" ({', '.join(more)})" if more else ""
        end = ":" if said["text"] else "."
        told = f"Its {said['source']} said outright of {of}: {said['score']:+g}{rest}{end}"
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


def _trained(
    rows: Rows, turn: TurnView, known: Contents, run: RunView, training: Training
) -> Iterator[str]:
    if (by := trained_by(rows, turn, run, training)) is None:
        return
    if not by.recorded:
        yield "(By today's settings: the step did not record those of its time.)"
    yield from _by_reward(turn, rewards_of(rows, by.step), by.method, by.cfg)
    yield from _by_teacher(known.teacher, known.completion, by.method, by.cfg)
    began_with = read_version(rows, by.parent)
    age = (began_with.step if began_with else 0) - turn.version_step
    yield from wrapped(_age(age, by.metrics, by.cfg))


def _by_reward(
    turn: TurnView, rewards: Sequence[RewardView], method: Method, cfg: Training
) -> Iterator[str]:
    """`rewards`: of all samples of the step."""
    at = next(n for n, one in enumerate(rewards) if one.turn_id == turn.id)
    own, weight = rewards[at], method.weights(cfg).reward
    if weight and own.reward is not None:
        advantage = weight * reward_parts(rewards, cfg)[at]
        yield from wrapped(_compared(advantage, rewards, own, turn, cfg))
    elif own.reward is None and method.reward:
        yield "It carried no verdict of +1 or -1, so only its hint counted."


def _by_teacher(
    teacher: HintScores | None, done: Completion, method: Method, cfg: Training
) -> Iterator[str]:
    weight = method.weights(cfg).distill
    if not weight or teacher is None or method.teaching is None:
        return
    clip = cfg.opd_clip
    if cfg.opd_mode == "token":
        found, own = (teacher.logprobs,), (done.logprobs,)
        advantages = [token_advantages(teacher.logprobs, done.logprobs, clip)]
    else:  # of as many candidates a token as were scored
        found, own = teacher.targets, done.topk_logprobs
        each = range(len(done.tokens))
        advantages = [candidate_advantages(done, teacher, at, clip) for at in each]
    total = sum(abs(a) for row in advantages for a in row)  # before normalisation
    mean = weight * teacher.weight * total / len(done.tokens)
    told = f"Advantage from its {method.teaching.what}: {mean:.3f} in the mean over its tokens"
    told += ", of either sign"
    if clip:
        cut = [abs(a - b) > clip for a, b in zip(chain(*found), chain(*own), strict=True)]
        share = f"{sum(cut) / len(cut):.0%} of the differences between teacher and reply"
        told += f"; {share} were cut to {clip:g} nat{'s' if clip != 1 else ''}"
    if teacher.weight != 1:
        why = "it was not known whether such texts teach"
        if teacher.weight == 0:
            why = "such texts were found to teach nothing"
        told += f"; the weight {teacher.weight:g} is in it, because {why}"
    yield from wrapped(f"{told}.")


def _compared(
    advantage: float, rewards: Sequence[RewardView], own: RewardView, turn: TurnView, cfg: Training
) -> str:
    """The advantage, and what its reward was measured against."""
    with_it = [one.reward for one in rewards if one.bucket == own.bucket]
    given = [reward for reward in with_it if reward is not None]
    mean = f"the mean {sum(given) / len(given):+.2f}"
    what = "reward" if turn.episode else "verdict"
    if own.bucket is None:
        of = f"the {len(given)} {what}s of the step had {mean}; --baseline {cfg.baseline}"
    else:
        of = f"the {len(given)} rewards of step {own.bucket[1]} in group {turn.group} had {mean}"
    if own.tool and (own.reward or 0) > 0 and own.bucket is None:
        of += f"; a tool's success counts {TOOL_SUCCESS:g}"
    if own.cut:
        of += "; cut by its token limit, it is never reinforced"
    spared = ", times the probability of all others there" if advantage < 0 else ""
    return f"Advantage from its {what}: {advantage:+.3f} on every token{spared} ({of})."


def _age(age: int, metrics: Mapping[str, Any], cfg: Training) -> str:
    told = "It was fresh: the version that answered was the one that was trained on."
    if age:
        told = f"It was {plural(age, 'step')} old by then; how the correction for that changed its "
        told += "advantages is not recorded."
    if (clip_share := metrics.get("clip_share")) is not None:
        told += f" Of all tokens of the step {clip_share:.1%} were beyond the ratio's bounds."
    if cfg.kl_beta:
        told += f" A pull towards the base model (--kl-beta {number(cfg.kl_beta)}) came on top."
    return told


def _quote(words: str, *, text: bool) -> Iterator[str]:
    if not text:
        yield f"    ({len(words)} characters)"
        return
    for line in words[:LONGEST].splitlines() or [""]:
        yield from wrapped(line, "  | ") or ["  |"]
    if len(words) > LONGEST:
        yield f"  | … and {len(words) - LONGEST} more characters"
