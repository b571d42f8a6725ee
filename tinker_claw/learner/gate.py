"""Ask every new version some canaries before it serves, and refuse one that got worse.

A canary is a question with its right replies, which the user may edit. The gate scores how likely
the right replies are and compares that with the serving version's, question by question: a loss
must be large enough to matter, and not chance.

A refused version is never published: its step is void, its batch is set aside, and the previous
version goes on serving. The next step starts from that one without the optimizer's moments, which
may have carried the refused one too far, and at a quarter of the rate. After two refused batches in
a row from such a state, learning is paused for an hour, and the next batch is tried.

Rule: the functions from answers to a loss are pure. A gate that cannot ask refuses no version, and
reports it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev
from typing import Any

from tinker_claw.billing.estimate import GATE_TOKENS
from tinker_claw.config.canaries import Canary
from tinker_claw.errors import BackendError, ConfigError, OutageError, RefusedError, same_length
from tinker_claw.learner.parts import LoopParts
from tinker_claw.learner.scoring import outcomes, side_by_side
from tinker_claw.policy import Sampler
from tinker_claw.render.begun import common
from tinker_claw.render.renderer import Renderer
from tinker_claw.render.switches import Decides, Switches
from tinker_claw.telemetry import log
from tinker_claw.types import Message, Tokens, Usage

REFUSED = "the gate refused the version"

# Questions


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the right replies to it."""

    key: str
    """Key of the question: equal for the same question, and different for any other."""
    prompt: Tokens
    replies: tuple[Tokens, ...]
    """Right replies with their stop token, or the beginning of the right call; at least one."""

    @property
    def usage(self) -> Usage:
        """Most tokens billed for asking it once."""
        tokens = sum(len(self.prompt) + len(reply) for reply in self.replies)
        return Usage(prefill=tokens, sampled=len(self.replies))


_TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}
"""Parameters of a canary's tools."""


def canary_questions(
    canaries: Sequence[Canary], renderer: Renderer, thinking: Decides = "auto"
) -> list[Question]:
    """Build the questions of the canaries, without calls where the chat format has none.

    They are asked as clients ask that leave thinking open. A reply stands where the model's text
    begins: what it has thought is no part of the question.

    Args:
        thinking: as `--thinking` says.

    Raises:
        ConfigError: they take too many tokens.
    """
    switches = renderer.thinking.switches({}, decides=thinking)
    built = (_canary(canary, renderer, switches) for canary in canaries)
    questions = [question for question in built if question.replies]
    if (tokens := sum(question.usage.prefill for question in questions)) > GATE_TOKENS:
        raise ConfigError(
            f"--canaries: asking them takes {tokens} tokens of a version, and the gate asks "
            f"{GATE_TOKENS} at most; leave some out"
        )
    return questions


def _canary(canary: Canary, renderer: Renderer, switches: Switches) -> Question:
    said: list[Message] = [
        {"role": "assistant" if n % 2 else "user", "content": text}
        for n, text in enumerate(canary.messages)
    ]
    tools = [
        {"type": "function", "function": {"name": name, "description": told, "parameters": _TEXT}}
        for name, told in canary.tools.items()
    ]
    prompt = tuple(renderer.prompt(said, tools or None, switches=switches).tokens)
    replies = tuple(
        renderer.hint_tokens(text, "{hint}") + renderer.stop_tokens[:1]
        for text in dict.fromkeys(canary.replies)
    )
    unthought = renderer.begin_text(switches)
    if canary.call and (begun := renderer.begin_call([canary.call], switches)):
        unthought = common([unthought, begun])
        replies = (begun[len(unthought) :],)
    prompt += unthought
    digest = hashlib.sha256(json.dumps([prompt, replies]).encode()).hexdigest()
    return Question(digest[:12], prompt, replies)


# Answers

Answers = Mapping[str, float]
"""Log probability with which a version gives one of the right replies, by the question's key."""
_IMPOSSIBLE = -50.0
"""Lowest logprob, in nats; replaces lower ones, so that every figure is finite."""


async def ask(
    questions: Sequence[Question], sampler: Sampler, *, until: float, most: int
) -> dict[str, float]:
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

    async def one(question: Question) -> float:
        try:
            async with asyncio.timeout_at(until):
                scores = [_score(question, reply, sampler) for reply in question.replies]
                return _any_of(await side_by_side(scores))
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
    return {q.key: one for q, one in zip(questions, found, strict=True) if isinstance(one, float)}


def _any_of(replies: Sequence[float]) -> float:
    """Return the logprob of giving one of these replies."""
    most = max(replies)
    return most + math.log(sum(math.exp(one - most) for one in replies))


async def _score(question: Question, reply: Tokens, sampler: Sampler) -> float:
    """Return the logprob of a reply; a token whose logprob is NaN counts as impossible."""
    prompt = question.prompt
    scores = await sampler.logprobs((*prompt, *reply), start=len(prompt))
    same_length("a reply's scores", reply=reply, logprobs=scores.logprobs)
    return sum(one if one > _IMPOSSIBLE else _IMPOSSIBLE for one in scores.logprobs)


# What is a loss

BOUND = 0.15
"""Nats by which right replies may become less likely from one version to the next, in the mean."""
_MOST = 5.0
"""Most nats that one question can lose, so that one that became impossible does not decide for
all."""
FEWEST = 6
"""Fewest questions for a comparison."""
_ERRORS = 3.0
"""Standard errors by which a mean loss must exceed 0: by chance, once in some 700 times."""


def losses(after: Answers, before: Answers) -> list[float]:
    """Return the nats that each question asked of both versions has lost; below 0 it has gained."""
    return [
        max(-_MOST, min(_MOST, before[key] - after[key])) for key in after.keys() & before.keys()
    ]


def lost(after: Answers, before: Answers) -> str | None:
    """Return the loss of a version as a sentence without its full stop; None: it has lost nothing
    that matters."""
    each = losses(after, before)
    if len(each) < FEWEST:
        return None
    chance = _ERRORS * stdev(each) / math.sqrt(len(each))  # of paired differences
    if fmean(each) <= max(BOUND, chance):
        return None
    return (
        f"right replies to canaries are {fmean(each):.2f} nats less likely ({len(each)} questions)"
    )


# In a run

REFUSALS = 2
"""Refusals in a row, each over its own batch and without momentum from earlier steps, after which
learning is paused."""
AGAIN_S = 3600.0
"""Seconds after which a batch is tried again, where earlier ones were refused."""
LATER = "The next batch is tried an hour later; after `tinker-claw rollback vN` at once"
"""How the hold after refusals ends."""
SECONDS = 600.0
"""Seconds that the questions may take. Only the learner waits; a busy CPU takes more than two
minutes for a model of 1.5 billion parameters."""
AFTER_REFUSAL = 0.25
"""Share of the rate for a step whose optimizer starts anew: Adam's first step is its largest."""


@dataclass(frozen=True, slots=True)
class Held:
    """Why learning is paused."""

    because: str
    """Sentences without the last full stop."""
    until: float | None = None
    """When it ends by itself, in seconds since 1970; None: not before new replies end it."""


class Gate:
    """Gate of one run; only the learner waits for it."""

    def __init__(
        self, parts: LoopParts, canaries: Sequence[Question], *, seconds: float = SECONDS
    ) -> None:
        self._parts = parts
        self._canaries = tuple(canaries)
        self._seconds = seconds
        self._known: Mapping[str, Answers] = {}
        """Answers of the newest two versions, by their samplers."""

    async def ask(self, candidate: Sampler) -> dict[str, Any]:
        """Ask the candidate, and the serving version where its answers are not known; return the
        result for the metrics of the step.

        Raises:
            RefusedError: the candidate has lost too much to serve.
            OutageError: the service is away for more than a few of the questions; the version is
                not admitted then.
        """
        if len(self._canaries) < FEWEST:
            return {}
        try:
            answers, before = await self._both(candidate, self._parts.policy.newest.sampler)
        except OutageError:
            raise
        except BackendError as error:
            log.warning("gate.unasked", error=str(error))
            return {"gate": {"unasked": str(error)}}
        if told := lost(answers, before) if answers else "it does not answer":
            raise RefusedError(f"{REFUSED}: {told}")
        each = losses(answers, before)
        found = {"asked": len(answers), "loss": round(fmean(each), 5) if each else None}
        if each:  # how far the step moved the policy, whatever the direction
            found["moved"] = fmean(map(abs, each))
        return {"gate": found}

    async def _both(self, candidate: Sampler, serving: Sampler) -> tuple[Answers, Answers]:
        """Return the candidate's answers and the serving version's; the former are empty if it
        fails twice although the serving version can be asked.

        Raises:
            BackendError: they cannot be asked.
        """
        until = asyncio.get_running_loop().time() + self._seconds
        asked = partial(ask, until=until, most=len(self._canaries) // 2)
        known, answers = self._known.get(serving.ref, {}), dict[str, float]()
        for again in (False, True):  # a server may have only just loaded the weights
            try:
                answers = await asked(self._canaries, candidate)
                break
            except OutageError:
                raise
            except BackendError as error:
                log.warning("gate.no_answer", error=str(error))
                known = {} if again else await asked(self._canaries, serving)
        unknown = [q for q in self._canaries if q.key in answers.keys() - known.keys()]
        before = {**known, **await asked(unknown, serving)}
        self._known = {serving.ref: before, candidate.ref: answers}
        return answers, before

    def held(self) -> Held | None:
        """Return why no further step is taken, from the ledger; None: one may be."""
        newest = self._parts.policy.newest.version
        refused = self._parts.ledger.steps.refused_lately()
        clean = len(refused) - (newest.step > 0)  # the first began with earlier moments
        if clean < REFUSALS or time.time() - refused[-1][1] >= AGAIN_S:
            return None
        because, at = refused[-1]
        told = f"The gate refused {len(refused)} versions after v{newest.id}, the last one because "
        told += because.removeprefix(f"{REFUSED}: ")
        return Held(f"{told}. Their batches are set aside. {LATER}", at + AGAIN_S)
