"""Asks every new version fixed questions before it serves, and refuses one that has lost something.

The questions are canaries, which the user may edit, and the beginnings of the user's own sessions
that no step has trained (`ledger.held_out`). For every question the gate scores how likely the
right replies are and how surely they end, and looks at one fresh reply. Each figure is compared
with that of the serving version, question by question: a loss must be large enough to matter, and
must not be chance, by resampling the questions. Small losses in a row pass that, so the canaries
are also compared with the best of the last sixteen versions; for replies to the user, `guard` does
the same.

A refused version is never published: its step is void, its batch is set aside, and the previous
version goes on serving. The next step starts from that one without the optimizer's moments, which
may have carried the refused one too far, and at a quarter of the rate. After two refused batches in
a row from such a state, learning is held.

Rule: figures go in and findings come out, both pure; `Gate` asks, and the answers are kept in the
ledger, so that a restart forgets nothing. A gate that cannot ask refuses nobody, and reports it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from statistics import fmean
from typing import Any, Final

from tinker_claw.billing.estimate import GATE_REPLY, GATE_TOKENS, GATE_TURNS
from tinker_claw.config.canaries import Canary
from tinker_claw.errors import (
    BackendError,
    ConfigError,
    OutageError,
    RefusedError,
    same_length,
)
from tinker_claw.learner.guard import Finding, Ruling
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.scoring import outcomes, side_by_side
from tinker_claw.ledger.versions import REFUSED
from tinker_claw.policy import Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.telemetry import log
from tinker_claw.types import (
    Completion,
    Message,
    PolicyVersion,
    SamplingParams,
    StopReason,
    Tokens,
    Usage,
)

# What is asked

_CANARY, _OWN = "c", "t"
"""Prefixes of question keys: a canary's, and that of a session's turn."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the right replies to it."""

    key: str
    """Key of the question: equal for the same question, and different for any other."""
    prompt: Tokens
    replies: tuple[Tokens, ...]
    """Right replies with their stop token; () where none is known."""

    @property
    def usage(self) -> Usage:
        """Most tokens billed for asking it once."""
        lengths = [len(self.prompt) + len(reply) for reply in self.replies]
        sampled = len(self.replies) + self.longest
        return Usage(prefill=sum(lengths) + len(self.prompt), sampled=sampled)

    @property
    def longest(self) -> int:
        """Most tokens of a fresh reply: twice the longest right one, so that growth shows."""
        return min(GATE_REPLY, 2 * max(map(len, self.replies), default=GATE_REPLY))


def canary_questions(canaries: Sequence[Canary], renderer: Renderer) -> list[Question]:
    """Build the questions of the canaries.

    Raises:
        ConfigError: they take too many tokens.
    """
    questions = [_canary(canary, renderer) for canary in canaries]
    if (tokens := sum(question.usage.prefill for question in questions)) > GATE_TOKENS:
        raise ConfigError(
            f"--canaries: asking them takes {tokens} tokens of a version, and the gate asks "
            f"{GATE_TOKENS} at most, with beginnings of sessions; leave some out"
        )
    return questions


def _canary(canary: Canary, renderer: Renderer) -> Question:
    said: list[Message] = [
        {"role": "assistant" if n % 2 else "user", "content": text}
        for n, text in enumerate(canary.messages)
    ]
    prompt = tuple(renderer.prompt(said).tokens)
    replies = tuple(
        renderer.hint_tokens(text, "{hint}") + renderer.stop_tokens[:1]
        for text in dict.fromkeys(canary.replies)
    )
    digest = hashlib.sha256(json.dumps([prompt, replies]).encode()).hexdigest()
    return Question(f"{_CANARY}{digest[:12]}", prompt, replies)


# What a version answers


@dataclass(frozen=True, slots=True)
class Answer:
    """A version's answer to one question, in numbers."""

    likely: float | None
    """Log probability of giving one of the right replies; None: none is known."""
    each: float | None
    """The same per token of the right replies."""
    ends: float | None
    """Mean logprob of the stop token after a right reply."""
    tokens: int
    """Tokens of a fresh reply."""
    nats: float
    """Mean -logprob of its tokens: how undecided the version is."""
    cut: bool
    """Whether the fresh reply has no stop token."""

    @property
    def row(self) -> list[float | None]:
        """The answer as a list for JSON."""
        floats = (self.likely, self.each, self.ends, self.nats)
        return [*(None if x is None else round(x, 5) for x in floats), self.tokens, int(self.cut)]

    @classmethod
    def read(cls, row: Sequence[Any]) -> Answer:
        return cls(*row[:3], nats=float(row[3]), tokens=int(row[4]), cut=bool(row[5]))


Answers = Mapping[str, Answer]
"""Answers of a version, by the question's key."""
_IMPOSSIBLE: Final = -50.0
"""Lowest logprob, in nats; replaces lower ones, so that every figure is finite."""


class _LateError(BackendError):
    """Raised when the time for the questions is used up, which is nobody's fault."""


async def ask(
    questions: Sequence[Question], sampler: Sampler, stop_tokens: Tokens, *, until: float, most: int
) -> dict[str, Answer]:
    """Ask these weights the questions; leave out those that cannot be asked.

    All are asked at once, so that a backend can batch them.

    Args:
        until: the event loop's time by which it has to be over.
        most: questions that may fail; if more fail, the questions are not the cause.

    Raises:
        BackendError: more than these failed; an OutageError where the service was away for them.
    """
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(question: Question) -> Answer:
        limit = SamplingParams(question.longest, seed=_SEED, stop_tokens=tuple(stop_tokens))
        try:
            async with asyncio.timeout_at(until):
                replies = [_score(question, reply, sampler) for reply in question.replies]
                scored = await side_by_side(replies)
                async with slots:
                    (fresh,) = await sampler.sample(question.prompt, limit)
        except TimeoutError as error:
            raise _LateError("it took too long") from error
        return _answer(question, scored, fresh)

    found = await outcomes([one(question) for question in questions])
    failed = [error for error in found if isinstance(error, BackendError)]
    away = [error for error in failed if isinstance(error, OutageError)]
    for errors in (away, failed):
        if len(errors) > most:
            raise errors[0]
    if failed:
        log.warning(
            "gate.left_out", questions=len(failed), sampler=sampler.ref, error=str(failed[0])
        )
    # What does not fit the weights (any more) is no failure.
    return {q.key: one for q, one in zip(questions, found, strict=True) if isinstance(one, Answer)}


def _answer(question: Question, scored: Sequence[Sequence[float]], fresh: Completion) -> Answer:
    likely = _any(list(map(sum, scored))) if scored else None
    return Answer(
        likely=likely,
        each=None if likely is None else likely / fmean(map(len, question.replies)),
        ends=fmean(each[-1] for each in scored) if scored else None,
        tokens=len(fresh.tokens),
        nats=-fmean(_bounded(fresh.logprobs)) if fresh.logprobs else 0.0,
        cut=fresh.stop_reason is not StopReason.STOP,
    )


async def _score(question: Question, reply: Tokens, sampler: Sampler) -> list[float]:
    """Return the logprob of each token of a reply."""
    tokens = (*question.prompt, *reply)
    scores = await sampler.logprobs(tokens, start=len(question.prompt))
    same_length("a reply's scores", reply=reply, logprobs=scores.logprobs)
    return _bounded(scores.logprobs)


def _bounded(logprobs: Sequence[float]) -> list[float]:
    """Clamp logprobs to finite values that can be compared and stored; NaN counts as impossible."""
    return [logprob if logprob > _IMPOSSIBLE else _IMPOSSIBLE for logprob in logprobs]


def _any(logs: Sequence[float]) -> float:
    """Return the log of the sum of probabilities, given as logs."""
    most = max(logs)
    return most + math.log(sum(math.exp(one - most) for one in logs))


# What it has lost


@dataclass(frozen=True, slots=True)
class Figure:
    """A measure of what a version can lose, and how much of it matters."""

    name: str
    loss: Callable[[Answer, Answer], float | None]
    """Returns the loss from an earlier answer to a later one, larger is worse; None: it cannot be
    told."""
    of: tuple[str, ...]
    """Kinds of questions that it covers, by the prefix of their keys."""
    step: float
    """Mean loss that matters from one version to the next."""
    window: float
    """Mean loss that matters over the last versions: only a warning, since a wish followed step by
    step looks the same in the canaries that it touches."""
    told: str
    """Sentence about the loss, with {lost}."""


_MOST = 5.0
"""Most nats that one question can lose, so that one that became impossible does not decide for
all."""


def _fall(after: float | None, before: float | None) -> float | None:
    if after is None or before is None:
        return None
    return max(-_MOST, min(_MOST, before - after))


def _less_often(after: float | None, before: float | None) -> float | None:
    """Return the loss in probability: a model's rare events may become rarer by chance, and their
    logprob swings widely."""
    if after is None or before is None:
        return None
    return math.exp(before) - math.exp(after)


def _longer(before: Answer, after: Answer) -> float:
    return math.log((after.tokens + 1) / (before.tokens + 1))


_NEVER = math.inf
FIGURES = (
    Figure(
        "canaries",
        lambda before, after: _fall(after.likely, before.likely),
        (_CANARY,),
        step=0.15,
        window=0.4,
        told="right replies to canaries are {lost:.2f} nats less likely",
    ),
    Figure(
        "accepted",
        lambda before, after: _fall(after.each, before.each),
        (_OWN,),
        step=0.1,
        window=_NEVER,  # whoever changes their mind accepts other replies
        told="replies that were accepted are {lost:.2f} nats a token less likely",
    ),
    Figure(
        "stop",
        lambda before, after: _less_often(after.ends, before.ends),
        (_CANARY, _OWN),
        step=0.1,
        window=_NEVER,
        told="right replies end with {lost:.2f} less probability",
    ),
    Figure(
        "length",
        _longer,
        (_CANARY, _OWN),
        step=math.log(1.5),
        window=_NEVER,
        told="replies are e^{lost:.2f} times as long",
    ),
    Figure(
        "brevity",
        lambda before, after: -_longer(before, after),
        (_CANARY, _OWN),
        step=math.log(1.5),
        window=_NEVER,
        told="replies are e^{lost:.2f} times shorter",
    ),
    Figure(
        "entropy",
        lambda before, after: after.nats - before.nats,
        (_CANARY, _OWN),
        step=0.3,
        window=_NEVER,
        told="the policy is {lost:.2f} nats a token less decided",
    ),
    Figure(
        "cut",
        lambda before, after: float(after.cut) - float(before.cut),
        (_CANARY, _OWN),
        step=0.2,
        window=_NEVER,
        told="{lost:.0%} more of the replies do not end",
    ),
)
FEWEST = 6
"""Fewest questions for a finding."""
LOOK_BACK = 16
"""Number of past versions among which the best is the reference for the canaries."""
_SEED: Final = 1
_RESAMPLED = 1000
_CHANCE = 0.01
"""Probability that chance alone looks like a loss, for each figure and step."""


def lost(after: Answers, before: Answers, *, over: bool = False) -> list[str]:
    """Return the losses of a version, as sentences without their full stops.

    Args:
        over: whether the loss is over several versions rather than from one to the next.
    """
    found = list[str]()
    for figure in FIGURES:
        bound = figure.window if over else figure.step
        losses = _losses(figure, after, before)
        if len(losses) >= FEWEST and fmean(losses) > bound and is_no_chance(losses):
            found.append(figure.told.format(lost=fmean(losses)) + f" ({len(losses)} questions)")
    return found


def mean_losses(after: Answers, before: Answers) -> dict[str, float]:
    """Return the mean loss over the questions by figure, leaving out figures without data."""
    found = {figure.name: _losses(figure, after, before) for figure in FIGURES}
    return {name: round(fmean(each), 5) for name, each in found.items() if each}


def _losses(figure: Figure, after: Answers, before: Answers) -> list[float]:
    known = [key for key in after if key in before and key.startswith(figure.of)]
    each = [figure.loss(before[key], after[key]) for key in sorted(known)]
    return [loss for loss in each if loss is not None]


def is_no_chance(losses: Sequence[float]) -> bool:
    """Return whether redrawing the questions would show a loss, too, in 99 of 100 cases: the
    bootstrap's percentile interval (Efron 1979), one-sided, over paired differences."""
    rng, n = Random(_SEED), len(losses)
    means = sorted(fmean(rng.choices(losses, k=n)) for _ in range(_RESAMPLED))
    return means[int(_CHANCE * _RESAMPLED)] > 0


def best(versions: Sequence[Answers]) -> Answers | None:
    """Return the answers of the version that found the right replies to canaries likeliest."""

    def worth(answers: Answers) -> float:
        found = [
            a.likely for k, a in answers.items() if k.startswith(_CANARY) and a.likely is not None
        ]
        return fmean(found) if found else -math.inf

    return max(versions, key=worth, default=None)


# In a run

REFUSALS = 2
"""Refusals in a row, each over its own batch and without momentum from earlier steps, after which
learning is held."""
_HELD = "the gate refused two versions in a row"
SECONDS = 120.0
"""Seconds that the questions may take."""
_AT_ONCE = 64
"""Fresh replies sampled at once, usually all: a pass takes little longer for many than for some."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Result of asking a candidate."""

    told: tuple[str, ...] = ()
    """Losses of a candidate that serves nevertheless: the gate only reports, or they added up
    slowly."""
    unasked: str | None = None
    """Why nothing could be asked; None: it was asked, or there was nothing to ask."""
    answers: Answers | None = None
    before: Answers | None = None
    """Answers of the serving version, where no step has recorded them."""
    losses: Mapping[str, float] = field(default_factory=dict[str, float])
    """Mean loss against the serving version over the questions, by figure."""

    @property
    def figures(self) -> dict[str, Any]:
        """The result as fields of a step's event."""
        if self.unasked:
            return {"gate": {"unasked": self.unasked}}
        if self.answers is None:
            return {}
        lost = {"lost": list(self.told), "losses": dict(self.losses)}
        return {"gate": {"asked": len(self.answers), **lost}}

    @property
    def kept(self) -> dict[str, Any]:
        """The answers for the ledger's metrics of a step, with which later versions are
        compared."""
        kept = {"after": self.answers, "before": self.before}
        return {
            "answers": {
                name: {key: answer.row for key, answer in answers.items()}
                for name, answers in kept.items()
                if answers
            }
        }


class Gate:
    """Asks the candidates of one run. Only the learner waits for it."""

    def __init__(
        self,
        parts: LoopParts,
        canaries: Sequence[Question],
        stop_tokens: Tokens,
        *,
        seconds: float = SECONDS,
    ) -> None:
        """Set up the gate of a run.

        Args:
            stop_tokens: tokens that end a reply of this model.
        """
        self._parts = parts
        self._canaries = tuple(canaries)
        self._stop_tokens = tuple(stop_tokens)
        self._seconds = seconds
        self._answered: tuple[int, dict[str, Answer]] = (-1, {})
        """Serving version, and its answers to questions that no step had recorded."""

    async def ask(self, candidate: Sampler) -> Asked:
        """Ask the candidate, and the serving version where its answers are missing.

        Raises:
            RefusedError: the candidate has lost too much to serve.
            OutageError: the service is away for more than a few of the questions, which is no
                reason to let a version in.
        """
        questions = self.questions()
        if len(questions) < FEWEST:  # nothing could be said of it
            return Asked()
        serving = self._parts.policy.newest
        stored, known = self._stored(), self._known()
        heard = partial(
            ask,
            stop_tokens=self._stop_tokens,
            until=asyncio.get_running_loop().time() + self._seconds,
            most=len(questions) // 2,
        )
        answers: Answers = {}
        told = list[str]()
        try:
            for again in (False, True):
                try:
                    answers = await heard(questions, candidate)
                    break
                except (OutageError, _LateError):
                    raise
                except BackendError as error:
                    # Where the one that serves can be asked, it is the weights, unless it passes: a
                    # server has only just loaded them.
                    if again:
                        told.append(f"it does not answer: {error}")
                    else:
                        known = await heard(questions, serving.sampler) | known
            unknown = [q for q in questions if q.key not in known and q.key in answers]
            known |= await heard(unknown, serving.sampler)
        except OutageError:
            raise
        except BackendError as error:
            log.warning("gate.unasked", error=str(error))
            return Asked(unasked=str(error))
        self._answered = serving.version.id, known
        told += lost(answers, known)
        if told and self._parts.training.gate == "on":
            raise RefusedError(f"{REFUSED}: {'; '.join(told)}")
        if told:
            log.warning("gate.would_refuse", told=told)
        if past := best([known, *self._past()]):
            over = lost(answers, past, over=True)
            told += [f"in all over the last {LOOK_BACK} versions {one}" for one in over]
        before = {key: answer for key, answer in known.items() if key not in stored}
        return Asked(tuple(told), None, answers, before, mean_losses(answers, known))

    def findings(self) -> list[Finding]:
        """Return the gate's findings about the last versions, from the ledger."""
        steps, newest = self._parts.ledger.steps, self._parts.policy.newest.version.id
        if errors := steps.void_lately(REFUSED):
            last = errors[-1].removeprefix(f"{REFUSED}: ")
            carried = self._parts.policy.newest.version.step > 0  # moments, to the first of them
            if len(errors) - carried >= REFUSALS:
                told = f"{_HELD}, over two batches, the last because {last}"
                return [Finding("gate", Ruling.ROLL_BACK, told)]
            told = f"{REFUSED} after v{newest} because {last}; its batch is set aside"
            return [Finding("gate", Ruling.WARN, told)]
        found = next((one for one in steps.gated(newest, 1) if one.version == newest), None)
        if found is None or (told := found.warning) is None:
            return []
        return [Finding("gate", Ruling.WARN, told)]

    def rules(self, reason: str) -> bool:
        """Return whether learning is held for the gate's reason."""
        return reason.startswith(_HELD)

    def sound(self) -> list[PolicyVersion]:
        """Return versions to go back to, newest first: those that have lost at most half of what
        matters over the last versions. The serving one is among them, unless losses have added
        up."""
        steps = self._parts.ledger.steps
        past = steps.gated(self._parts.policy.newest.version.id, LOOK_BACK)
        most = best(self._past()) or {}
        (figure,) = (figure for figure in FIGURES if figure.window < _NEVER)
        well = list[PolicyVersion]()
        for one in past:
            losses = _losses(figure, _read(one.after), most)
            version = steps.version(one.version)
            if version and (not losses or fmean(losses) <= figure.window / 2):
                well.append(version)
        return well

    def questions(self) -> list[Question]:
        """Return the canaries and the newest beginnings of sessions, within the token limit."""
        found = list(self._canaries)
        left = GATE_TOKENS - sum(question.usage.prefill for question in found)
        for one in self._parts.ledger.held_out.newest(GATE_TURNS):
            replies = () if one.accepted is None else (one.accepted,)
            key = f"{_OWN}{one.turn_id}"
            if one.accepted_id is not None:  # what is accepted later is another question
                key += f".{one.accepted_id}"
            question = Question(key, one.prompt, replies)
            if question.usage.prefill <= left:  # a long one keeps no other out
                left -= question.usage.prefill
                found.append(question)
        return found

    def _stored(self) -> dict[str, Answer]:
        """Return the serving version's answers as its step recorded them."""
        newest = self._parts.policy.newest.version.id
        gated = self._parts.ledger.steps.gated(newest, 1)
        return next((_read(one.after) for one in gated if one.version == newest), {})

    def _known(self) -> dict[str, Answer]:
        """Return the serving version's recorded answers with those it has given since."""
        version, answers = self._answered
        since = answers if version == self._parts.policy.newest.version.id else {}
        return self._stored() | since

    def _past(self) -> Sequence[Answers]:
        gated = self._parts.ledger.steps.gated(self._parts.policy.newest.version.id, LOOK_BACK)
        return [_read(one.after) for one in gated] + [_read(one.before) for one in gated]


def _read(rows: Mapping[str, Any]) -> dict[str, Answer]:
    return {key: Answer.read(row) for key, row in rows.items()}
