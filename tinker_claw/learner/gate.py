"""Test every new version on fixed questions before it serves, and refuse one that got worse.

The questions are canaries, which the user may edit, and the beginnings of the user's own sessions
that no step has trained (`ledger.held_out`). For every question the gate scores how likely the
right replies are and how surely they end, and compares that with the serving version, question by
question: a loss must be large enough to matter, and not chance. Small losses in a row would pass,
so canaries are also compared with the best of the last sixteen versions.

A refused version is never published: its step is void, its batch is set aside, and the previous
version goes on serving. The next step starts from that one without the optimizer's moments, which
may have carried the refused one too far, and at a quarter of the rate. After two refused batches in
a row from such a state, learning is held for an hour, and the next batch is tried.

Rule: the functions from answers to losses are pure; `Gate` asks, and the answers are kept in the
ledger, so that they survive a restart. A gate that cannot ask refuses no version, and reports it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

from tinker_claw.billing.estimate import GATE_TOKENS, GATE_TURNS
from tinker_claw.config.canaries import Canary
from tinker_claw.errors import BackendError, ConfigError, OutageError, RefusedError, same_length
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.scoring import outcomes, side_by_side
from tinker_claw.ledger.versions import REFUSED, Answer, Answers
from tinker_claw.policy import Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.telemetry import log
from tinker_claw.types import Images, Message, Tokens, Usage

# Questions

_CANARY, _OWN = "c", "t"
"""Prefixes of question keys: a canary's, and that of a session's turn."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the right replies to it."""

    key: str
    """Key of the question: equal for the same question, and different for any other."""
    prompt: Tokens
    replies: tuple[Tokens, ...]
    """Right replies with their stop token, or the beginning of the right call; at least one."""
    images: Images = ()
    """Images in the prompt."""

    @property
    def usage(self) -> Usage:
        """Most tokens billed for asking it once."""
        tokens = sum(len(self.prompt) + len(reply) for reply in self.replies)
        return Usage(prefill=tokens, sampled=len(self.replies))


_TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}
"""Parameters of a canary's tools."""


def canary_questions(canaries: Sequence[Canary], renderer: Renderer) -> list[Question]:
    """Build the questions of the canaries, without calls where the chat format has none.

    Raises:
        ConfigError: they take too many tokens.
    """
    questions = [one for canary in canaries if (one := _canary(canary, renderer)).replies]
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
    tools = [
        {"type": "function", "function": {"name": name, "description": told, "parameters": _TEXT}}
        for name, told in canary.tools.items()
    ]
    prompt = tuple(renderer.prompt(said, tools or None).tokens)
    replies = tuple(
        renderer.hint_tokens(text, "{hint}") + renderer.stop_tokens[:1]
        for text in dict.fromkeys(canary.replies)
    )
    if canary.call and (begun := renderer.begin_call([canary.call])):
        replies = (begun,)
    digest = hashlib.sha256(json.dumps([prompt, replies]).encode()).hexdigest()
    return Question(f"{_CANARY}{digest[:12]}", prompt, replies)


# Answers


_IMPOSSIBLE = -50.0
"""Lowest logprob, in nats; replaces lower ones, so that every figure is finite."""


async def ask(
    questions: Sequence[Question], sampler: Sampler, *, until: float, most: int
) -> dict[str, Answer]:
    """Ask these weights the questions; leave out those that cannot be asked.

    All are asked at once, so that a backend can batch them.

    Args:
        until: the event loop's time by which it has to be over.
        most: questions that may fail; if more fail, the questions are not the cause.

    Raises:
        BackendError: more than these failed; an OutageError where the service was away for them.
    """
    if asyncio.get_running_loop().time() > until:
        raise BackendError("it took too long")

    async def one(question: Question) -> Answer:
        try:
            async with asyncio.timeout_at(until):
                scores = [_score(question, reply, sampler) for reply in question.replies]
                return _answer(await side_by_side(scores))
        except TimeoutError as error:
            raise BackendError("it took too long") from error

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
    # A question that does not fit the weights (any more) is no failure.
    return {q.key: one for q, one in zip(questions, found, strict=True) if isinstance(one, Answer)}


def _answer(replies: Sequence[Sequence[float]]) -> Answer:
    """Return the answer by the logprobs of the right replies, each of at least one token."""
    logs = [round(sum(reply), 5) for reply in replies]
    likely = max(logs) + math.log(sum(math.exp(one - max(logs)) for one in logs))
    return Answer(likely, likely / fmean(map(len, replies)), fmean(reply[-1] for reply in replies))


async def _score(question: Question, reply: Tokens, sampler: Sampler) -> list[float]:
    """Return the logprob of each token of a reply; NaN counts as impossible."""
    prompt, images = question.prompt, question.images
    scores = await sampler.logprobs((*prompt, *reply), start=len(prompt), images=images)
    same_length("a reply's scores", reply=reply, logprobs=scores.logprobs)
    return [one if one > _IMPOSSIBLE else _IMPOSSIBLE for one in scores.logprobs]


# Losses


@dataclass(frozen=True, slots=True)
class Figure:
    """A measure of what a version can lose, and how much of it matters."""

    loss: Callable[[Answer, Answer], float]
    """Returns the loss from an earlier answer to a later one, larger is worse."""
    of: tuple[str, ...]
    """Kinds of questions that it covers, by the prefix of their keys."""
    bound: float
    """Mean loss that matters from one version to the next."""
    told: str
    """Part of a sentence about the loss, with {lost}."""


_MOST = 5.0
"""Most nats that one question can lose, so that one that became impossible does not decide for
all."""


def _fall(before: float, after: float) -> float:
    return max(-_MOST, min(_MOST, before - after))


CANARIES = Figure(
    lambda before, after: _fall(before.likely, after.likely),
    (_CANARY,),
    0.15,
    "right replies to canaries are {lost:z.2f} nats less likely",
)
FIGURES: Mapping[str, Figure] = {
    "canaries": CANARIES,
    "accepted": Figure(
        lambda before, after: _fall(before.each, after.each),
        (_OWN,),
        0.1,
        "good replies of held-out sessions are {lost:z.2f} nats a token less likely",
    ),
    "stop": Figure(  # as probabilities: the logprob of a rare event swings widely
        lambda before, after: math.exp(before.ends) - math.exp(after.ends),
        (_CANARY, _OWN),
        0.1,
        "right replies end with {lost:z.2f} less probability",
    ),
}
FADED = replace(CANARIES, bound=0.4)
"""Loss over several versions: only reported, since a wish learned step by step looks the same in
the canaries that it affects."""
FEWEST = 6
"""Fewest questions for a finding."""
LOOK_BACK = 16
"""Number of past versions with which canaries are compared."""
_ERRORS = 3.0
"""Standard errors by which a mean loss must exceed 0: by chance, once in some 700 times."""


def lost(after: Answers, before: Answers, figure: Figure) -> str | None:
    """Return the loss of a version as a sentence without its full stop; None: it has lost nothing
    that matters."""
    losses = _losses(figure, after, before)
    if len(losses) < FEWEST:
        return None
    chance = _ERRORS * stdev(losses) / math.sqrt(len(losses))  # of paired differences
    if fmean(losses) <= max(figure.bound, chance):
        return None
    return figure.told.format(lost=fmean(losses)) + f" ({len(losses)} questions)"


def _losses(figure: Figure, after: Answers, before: Answers) -> list[float]:
    known = sorted(key for key in after if key in before and key.startswith(figure.of))
    return [figure.loss(before[key], after[key]) for key in known]


# In a run

REFUSALS = 2
"""Refusals in a row, each over its own batch and without momentum from earlier steps, after which
learning is held."""
AGAIN_S = 3600.0
"""Seconds after which a batch is tried again, where earlier ones were refused."""
LATER = "The next batch is tried an hour later; after `tinker-claw rollback vN` at once"
"""How the hold after refusals ends."""
SECONDS = 120.0
"""Seconds that the questions may take."""
AFTER_REFUSAL = 0.25
"""Share of the rate for a step whose optimizer starts anew: Adam's first step is its largest."""


@dataclass(frozen=True, slots=True)
class Held:
    """Why learning is held."""

    because: str
    """Sentences without the last full stop."""
    until: float | None = None
    """When it ends by itself, in seconds since 1970; None: not before new replies end it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Result of asking a candidate."""

    told: Sequence[str] = ()
    """Losses of a candidate that serves nevertheless: the gate only reports, or they added up
    slowly."""
    unasked: str | None = None
    """Why nothing could be asked; None: it was asked, or there was nothing to ask."""
    answers: Answers = field(default_factory=dict[str, Answer])
    losses: Mapping[str, float] = field(default_factory=dict[str, float])
    """Mean loss against the serving version over the questions, by figure."""

    @property
    def figures(self) -> dict[str, Any]:
        """The result as fields of a step's event."""
        if self.unasked:
            return {"gate": {"unasked": self.unasked}}
        lost = {"lost": list(self.told), "losses": dict(self.losses)}
        return {"gate": {"asked": len(self.answers), **lost}} if self.answers else {}


class Gate:
    """Gate of one run; only the learner waits for it."""

    def __init__(
        self, parts: LoopParts, canaries: Sequence[Question], *, seconds: float = SECONDS
    ) -> None:
        self._parts = parts
        self._canaries = tuple(canaries)
        self._seconds = seconds

    async def ask(self, candidate: Sampler) -> Asked:
        """Ask the candidate, and the serving version where its answers are missing.

        Raises:
            RefusedError: the candidate has lost too much to serve.
            OutageError: the service is away for more than a few of the questions; the version is
                not admitted then.
        """
        questions = self.questions()
        if len(questions) < FEWEST:  # too few for a finding
            return Asked()
        newest = self._parts.policy.newest.version.id
        past = self._parts.ledger.steps.gated(newest, LOOK_BACK)
        known = past[0].answers if past and past[0].version == newest else {}
        try:
            answers, before = await self._both(candidate, questions, known)
        except OutageError:
            raise
        except BackendError as error:
            log.warning("gate.unasked", error=str(error))
            return Asked(unasked=str(error))
        told = ["it does not answer"] if not answers else []
        told += filter(None, (lost(answers, before, figure) for figure in FIGURES.values()))
        if told and self._parts.training.gate == "on":
            raise RefusedError(f"{REFUSED}: {'; '.join(told)}")
        if told:
            log.warning("gate.would_refuse", told=told)
        best = max((before, *(one.answers for one in past)), key=_worth)
        if faded := lost(answers, best, FADED):
            told.append(f"in all over the last {LOOK_BACK} versions {faded}")
        losses = {name: _losses(figure, answers, before) for name, figure in FIGURES.items()}
        means = {name: round(fmean(each), 5) for name, each in losses.items() if each}
        return Asked(told, None, answers, means)

    async def _both(
        self, candidate: Sampler, questions: Sequence[Question], known: Answers
    ) -> tuple[Answers, Answers]:
        """Return the candidate's answers and the serving version's; the former are empty if it
        fails twice although the serving version can be asked.

        Raises:
            BackendError: they cannot be asked.
        """
        until = asyncio.get_running_loop().time() + self._seconds
        asked = partial(ask, until=until, most=len(questions) // 2)
        serving, answers = self._parts.policy.newest.sampler, dict[str, Answer]()
        for again in (False, True):  # a server may have only just loaded the weights
            try:
                answers = await asked(questions, candidate)
                break
            except OutageError:
                raise
            except BackendError as error:
                log.warning("gate.no_answer", error=str(error))
                known = {} if again else await asked(questions, serving)
        unknown = [q for q in questions if q.key in answers.keys() - known.keys()]
        return answers, {**known, **await asked(unknown, serving)}

    def held(self) -> Held | None:
        """Return why no further step is taken, from the ledger; None: one may be."""
        newest = self._parts.policy.newest.version
        refused = self._parts.ledger.steps.void_lately(REFUSED)
        clean = len(refused) - (newest.step > 0)  # the first began with earlier moments
        if clean < REFUSALS or time.time() - refused[-1][1] >= AGAIN_S:
            return None
        because, at = refused[-1]
        told = f"The gate refused {len(refused)} versions after v{newest.id}, the last one because "
        told += because.removeprefix(f"{REFUSED}: ")
        return Held(f"{told}. Their batches are set aside. {LATER}", at + AGAIN_S)

    def questions(self) -> list[Question]:
        """Return the canaries and the newest beginnings of sessions, within the token limit."""
        found = list(self._canaries)
        left = GATE_TOKENS - sum(question.usage.prefill for question in found)
        for one in self._parts.ledger.held_out.newest(GATE_TURNS):
            key = f"{_OWN}{one.turn_id}.{one.accepted_id}"
            question = Question(key, one.prompt, (one.accepted,), one.images)
            if question.usage.prefill <= left:  # a long one does not exclude others
                left -= question.usage.prefill
                found.append(question)
        return found


def _worth(answers: Answers) -> float:
    found = [answer.likely for key, answer in answers.items() if key.startswith(_CANARY)]
    return fmean(found) if found else -math.inf
