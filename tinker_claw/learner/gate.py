"""Ask every new version some canaries before it serves, and refuse one that got worse.

A canary is a question with its right replies, which the user may edit. The gate scores how likely
the right replies are and compares that, question by question, with the serving version and with a
reference: the base, or the version that the owner accepted last. A loss must be large enough to
matter, and not chance.

A version that has lost too much in one step never serves: its step is void, its batch is set
aside, and the previous version goes on serving. The next step starts from that one without the
optimizer's moments, which may have carried the refused one too far, and at a quarter of the rate.
After two refused batches in a row from such a state, learning is paused for an hour, and the next
batch is tried. A version that has lost too much since the reference serves, and learning is paused
until its owner rolls back or accepts it.

Rule: the functions from answers to a loss are pure. A gate that cannot ask refuses no version, and
reports it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev
from typing import Any

from tinker_claw.billing.estimate import GATE_TOKENS
from tinker_claw.config.canaries import Canary
from tinker_claw.errors import BackendError, ClawError, ConfigError, OutageError, same_length
from tinker_claw.learner.parts import LoopParts
from tinker_claw.ledger.reference import read_fallen
from tinker_claw.ledger.steps import Void, VoidStepError
from tinker_claw.policy import Sampler
from tinker_claw.render.begun import common
from tinker_claw.render.renderer import Renderer
from tinker_claw.render.switches import Decides, Switches
from tinker_claw.tasks import together
from tinker_claw.telemetry import log
from tinker_claw.types import Charge, Message, Tokens, uncharged

REFUSED = "the gate refused the version"

# Questions


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the right replies to it."""

    key: str
    """Key of the question: equal for the same question, and different for any other."""
    text: str
    """What the user says last, shortened."""
    prompt: Tokens
    replies: tuple[Tokens, ...]
    """Right replies with their stop token, or the beginning of the right call; at least one."""

    @property
    def tokens(self) -> int:
        """Most prompt tokens billed for asking it once."""
        return sum(len(self.prompt) + len(reply) for reply in self.replies)


_SHOWN = 60
"""Characters of a question that are shown."""
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
    switches, _ = renderer.thinking.switches({}, decides=thinking)
    built = (_canary(canary, renderer, switches) for canary in canaries)
    questions = [question for question in built if question.replies]
    if (tokens := sum(question.tokens for question in questions)) > GATE_TOKENS:
        raise ConfigError(
            f"--canaries: asking them takes {tokens} tokens of a version, and the gate asks "
            f"{GATE_TOKENS} at most; leave some out"
        )
    return questions


def _canary(canary: Canary, renderer: Renderer, switches: Switches) -> Question:
    messages: list[Message] = [
        {"role": "assistant" if n % 2 else "user", "content": text}
        for n, text in enumerate(canary.messages)
    ]
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": _TEXT},
        }
        for name, description in canary.tools.items()
    ]
    prompt = tuple(renderer.prompt(messages, tools or None, switches=switches).tokens)
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
    last_words = textwrap.shorten(canary.messages[-1], _SHOWN, placeholder="…")
    return Question(digest[:12], last_words, prompt, replies)


# Answers

Answers = Mapping[str, float]
"""Log probability with which a version gives one of the right replies, by the question's key."""
_IMPOSSIBLE = -50.0
"""Lowest logprob, in nats; replaces lower ones, so that every figure is finite."""


async def ask(
    questions: Sequence[Question],
    sampler: Sampler,
    charge: Charge = uncharged,
    *,
    until: float,
    most: int,
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

    async def answer_of(question: Question) -> float | ClawError:
        try:
            async with asyncio.timeout_at(until):
                scores = [_score(question, reply, sampler, charge) for reply in question.replies]
                return _any_of(await together(scores))
        except TimeoutError:
            return BackendError("it took too long")
        except ClawError as error:
            return error

    results = await together(map(answer_of, questions))
    failed = [error for error in results if isinstance(error, BackendError)]
    away = [error for error in failed if isinstance(error, OutageError)]
    for errors in (away, failed):
        if len(errors) > most:
            raise errors[0]
    if failed:
        log.warning(
            "gate.left_out", questions=len(failed), sampler=sampler.ref, error=str(failed[0])
        )
    # A question that does not fit the weights (any more) is no failure.
    return {
        q.key: answer
        for q, answer in zip(questions, results, strict=True)
        if isinstance(answer, float)
    }


def _any_of(replies: Sequence[float]) -> float:
    """Return the logprob of giving one of these replies."""
    most = max(replies)
    return most + math.log(sum(math.exp(logprob - most) for logprob in replies))


async def _score(question: Question, reply: Tokens, sampler: Sampler, charge: Charge) -> float:
    """Return the logprob of a reply; a token whose logprob is NaN counts as impossible."""
    prompt = question.prompt
    scores = await sampler.logprobs((*prompt, *reply), start=len(prompt), charge=charge)
    same_length("a reply's scores", reply=reply, logprobs=scores.logprobs)
    return sum(logprob if logprob > _IMPOSSIBLE else _IMPOSSIBLE for logprob in scores.logprobs)


# What is a loss

BOUND = 0.15
"""Nats by which right replies may become less likely from one version to the next, in the mean."""
WHOLE_BOUND = 0.15
"""Nats that they may lose since the reference: the base, or the version that the owner accepted
last. A base of 1.5 billion parameters that is told to answer in Spanish loses 0.105."""
CERTAIN = math.log(0.8)
"""Least logprob of a right reply before, of a question that counts: others change by chance."""
MOST, WHOLE_MOST = 5.0, 1.0
"""Most nats that one question can lose from version to version and since the reference, so that one
that became impossible does not decide for all."""
FEWEST = 6
"""Fewest questions for a comparison."""
_ERRORS = 3.0
"""Standard errors by which a mean loss must exceed 0: by chance, once in some 700 times."""
_NAMED = 3
"""Questions that are named where too much was lost."""


@dataclass(frozen=True, slots=True)
class CanaryLoss:
    """Nats that right replies have lost from one version to another."""

    each: Mapping[str, float]
    """By the question's key, of each question asked of both; below 0: gained."""

    @property
    def mean(self) -> float:
        return fmean(self.each.values())

    def is_too_large(self) -> bool:
        """Return whether one step has lost too much, and not by chance."""
        n = len(self.each)
        if n < FEWEST:
            return False
        return self.mean > max(BOUND, _ERRORS * stdev(self.each.values()) / math.sqrt(n))

    def is_too_far(self) -> bool:
        """Return whether too much was lost since the reference. Slow harm begins with a few
        questions, so it need not be more than chance among them; none decides alone."""
        return len(self.each) >= FEWEST and self.mean > WHOLE_BOUND


def loss(after: Answers, before: Answers, most: float = MOST) -> CanaryLoss:
    """Compare the answers of two versions to the questions that the first was certain of."""
    return CanaryLoss(
        {
            key: max(-most, min(most, before[key] - after[key]))
            for key in after
            if before.get(key, -math.inf) >= CERTAIN
        }
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
class Pause:
    """A pause of learning."""

    because: str
    """Its reason: sentences without the last full stop."""
    until: float | None = None
    """When it ends by itself, in seconds since 1970; None: not before new replies end it."""


class Gate:
    """Gate of one run; only the learner waits for it."""

    def __init__(
        self, parts: LoopParts, canaries: Sequence[Question], *, seconds: float = SECONDS
    ) -> None:
        self._parts = parts
        self._canaries = {question.key: question for question in canaries}
        self._seconds = seconds

    async def ask(self, candidate: Sampler, charge: Charge = uncharged) -> dict[str, Any]:
        """Ask the candidate, and the serving version and the reference where their answers are not
        stored; return the result for the metrics of the step.

        Raises:
            VoidStepError: the candidate has lost too much to serve.
            OutageError: the service is away for more than a few of the questions; the version is
                not admitted then.
        """
        if len(self._canaries) < FEWEST:
            return {}
        try:
            answers, before, reference = await self._answers(candidate, charge)
        except OutageError:
            raise
        except BackendError as error:
            log.warning("gate.skipped", error=str(error))
            return {"gate": {"unasked": str(error)}}
        step, whole = loss(answers, before), loss(answers, reference, WHOLE_MOST)
        if not answers:
            raise VoidStepError(Void.REFUSED, f"{REFUSED}: it does not answer")
        if step.is_too_large():
            raise VoidStepError(
                Void.REFUSED,
                f"{REFUSED}: right replies to canaries are {step.mean:.2f} nats less likely "
                f"({len(step.each)} questions)",
            )
        if len(whole.each) < FEWEST:
            log.info("gate.idle", canaries=len(whole.each), fewest=FEWEST)
        figures: dict[str, Any] = {"asked": len(step.each)}
        if step.each:  # `moved`: how far the step moved the policy, whatever the direction
            moved = fmean(map(abs, step.each.values()))
            figures |= {"loss": round(step.mean, 5), "moved": moved}
        if whole.each:
            figures["whole"] = round(whole.mean, 5)
        if whole.is_too_far():
            worst = sorted(whole.each, key=lambda key: -whole.each[key])[:_NAMED]
            figures["fell"] = [
                f"“{self._canaries[key].text}” ({whole.each[key]:.2f})" for key in worst
            ]
        return {"gate": figures}

    async def _answers(
        self, candidate: Sampler, charge: Charge
    ) -> tuple[Answers, Answers, Answers]:
        """Return the answers of the candidate, the serving version and the reference; the first are
        empty if it fails twice although the serving version can be asked.

        Raises:
            BackendError: they cannot be asked.
        """
        until = asyncio.get_running_loop().time() + self._seconds
        ask_all = partial(ask, charge=charge, until=until, most=len(self._canaries) // 2)
        questions, table = [*self._canaries.values()], self._parts.ledger.reference
        serving, accepted = self._parts.policy.newest.sampler, table.version
        assert accepted is not None  # there is a first version
        stored_answers, answers = table.answers, dict[str, float]()

        async def completed(name: str, sampler: Sampler) -> dict[str, float]:
            stored = stored_answers.get(name, {})
            missing = [q for q in questions if q.key in answers.keys() - stored.keys()]
            return stored | await ask_all(missing, sampler)

        for again in (False, True):  # a server may have only just loaded the weights
            try:
                answers = await ask_all(questions, candidate)
                break
            except OutageError:
                raise
            except BackendError as error:
                log.warning("gate.unanswered", error=str(error))
                if not again:
                    await ask_all(questions, serving)
        before = reference = await completed(serving.ref, serving)
        if accepted.sampler_ref != serving.ref:  # its weights may be gone, and the base's are not
            reference = await completed(accepted.sampler_ref, self._parts.base)
        table.store_answers(
            {candidate.ref: answers, serving.ref: before, accepted.sampler_ref: reference}
        )
        return answers, before, reference

    def pause(self) -> Pause | None:
        """Return why no further step is taken, from the ledger; None: one may be."""
        ledger, newest = self._parts.ledger, self._parts.policy.newest.version
        if fallen := read_fallen(ledger.rows):
            return Pause(fallen)
        refused = ledger.steps.refused_lately()
        clean = len(refused) - (newest.step > 0)  # the first began with earlier moments
        if clean < REFUSALS or time.time() - refused[-1][1] >= AGAIN_S:
            return None
        because, at = refused[-1]
        return Pause(
            f"The gate refused {len(refused)} versions after v{newest.id}, the last one because "
            f"{because.removeprefix(f'{REFUSED}: ')}. Their batches are set aside. {LATER}",
            at + AGAIN_S,
        )
