"""The judge: reads what happened after a turn, gives a verdict and, where there is one, a hint.

Rule: one endpoint answers both questions about a turn; the fallback does where the first does not
answer. An auditor only adds a second verdict: it decides nothing, and its failure is only logged.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tinker_claw.config.settings import JudgeSettings
from tinker_claw.errors import JudgeError, OutageError, first_cause
from tinker_claw.judge.endpoints import Endpoint, SilentJudgeError
from tinker_claw.judge.prompts import (
    INCLUDED,
    Prompts,
    choose_hints,
    choose_wish,
    hint_messages,
    majority,
    parse_hint,
    parse_hint_vote,
    parse_vote,
    parse_wish,
    verdict_messages,
)
from tinker_claw.telemetry import log
from tinker_claw.types import Images, Message, NextState, Verdict, Vote, Wish, Writer

REST_S: Final = 60.0
"""Seconds without asking a judge that did not answer, where there is a fallback: each attempt may
last as long as all its retries."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict and hints for one turn, with the answers they come from."""

    verdict: Verdict
    verdict_answers: tuple[str, ...]
    hint_answers: tuple[str, ...]
    hints: tuple[str, ...]
    """Hints chosen from the hint answers, best first."""
    wish: Wish | None
    """The lasting wish among the hints; None: there is none."""
    prompt: str
    """Version of the judge prompts."""
    by_second: bool
    """Whether the fallback gave this judgement."""
    audit: Verdict
    """The auditor's verdict; without votes when it was not asked or did not answer."""
    audit_answers: tuple[str, ...]

    @property
    def hint_votes(self) -> tuple[Vote | None, ...]:
        """Votes read from the hint answers."""
        return tuple(parse_hint_vote(answer) for answer in self.hint_answers)

    @property
    def heard(self) -> tuple[bool, ...]:
        """For each answer of the judge, whether it could be read."""
        return tuple(vote is not None for vote in (*self.verdict.votes, *self.hint_votes))

    @property
    def unread(self) -> str | None:
        """An answer to a question where no answer could be read; None when each question has a
        readable one."""
        asked = (
            (self.verdict_answers, self.verdict.votes),
            (self.hint_answers, self.hint_votes),
        )
        return next((answers[0] for answers, votes in asked if set(votes) == {None}), None)


@dataclass(frozen=True, slots=True)
class Second:
    """A second endpoint and its role."""

    endpoint: Endpoint
    role: Literal["fallback", "auditor"]
    share: float
    """Share of judgements that an auditor checks, from 0 to 1."""


class Judge:
    """Judge with m votes on the verdict and, where the method wants hints and the reply was not
    accepted, m votes on those."""

    def __init__(
        self,
        endpoint: Endpoint,
        settings: JudgeSettings,
        *,
        hint_candidates: int,
        prompts: Prompts = INCLUDED,
        second: Second | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """
        Args:
            hint_candidates: hints kept per turn; 0 asks for none.
            draw: returns a random number below 1; the auditor is asked if it is below its share.
        """
        self._endpoint = endpoint
        self._m = settings.prm_m
        self._hint_candidates = hint_candidates
        self._prompts, self._asked = prompts, prompts.version
        self._fallback = second.endpoint if second and second.role == "fallback" else None
        self._auditor = second if second and second.role == "auditor" else None
        self._draw = draw
        self._sees = settings.judge_images
        self._rests_until = 0.0

    @property
    def answers(self) -> int:
        """Number of answers requested for one turn."""
        return self._m * (2 if self._hint_candidates else 1)

    async def judge(
        self,
        request: str,
        reply: str,
        state: NextState,
        *,
        asked_by: Writer = Writer.OWNER,
        images: Images = (),
    ) -> Judgement:
        """Ask about one turn. An accepted reply needs no hint, and only the owner's own words give
        one: anyone who can write a web page could write a hint.

        Args:
            asked_by: who wrote the request.
            images: those in the prompt, shown if `judge_images` is set.

        Raises:
            JudgeError: no endpoint could be asked; nothing is concluded from that.
            OutageError: the service is away; nothing is concluded from that either.
        """
        case, shown = (request, reply, state, self._prompts, asked_by), images if self._sees else ()
        verdict_prompt = verdict_messages(*case, images=shown)
        hears = state.role == "user" and self._hint_candidates > 0
        hint_prompt = hint_messages(*case, images=shown) if hears else None
        try:
            async with asyncio.TaskGroup() as group:
                judging = group.create_task(self._ask_either(verdict_prompt, hint_prompt))
                auditing = group.create_task(self._audit(verdict_prompt))
        except ExceptionGroup as failed:
            raise first_cause(failed) from failed
        (verdict_answers, hint_answers, by_second), audited = judging.result(), auditing.result()
        found = [parse_hint(answer, state.text) for answer in hint_answers]
        read = sum(parse_hint_vote(answer) is not None for answer in hint_answers)
        return Judgement(
            verdict=_verdict(verdict_answers),
            verdict_answers=tuple(verdict_answers),
            hint_answers=tuple(hint_answers),
            hints=choose_hints(found, read, self._hint_candidates),
            wish=choose_wish([parse_wish(answer, state.text) for answer in hint_answers], read),
            prompt=self._asked,
            by_second=by_second,
            audit=_verdict(audited),
            audit_answers=tuple(audited),
        )

    async def _ask_either(
        self, verdict: Sequence[Message], hint: Sequence[Message] | None
    ) -> tuple[list[str], list[str], bool]:
        """Return answers to both questions, and whether the fallback gave them."""
        now = asyncio.get_running_loop().time
        if self._fallback is None or now() >= self._rests_until:
            try:
                return *await self._ask_both(self._endpoint, verdict, hint), False
            except (JudgeError, OutageError) as error:
                if self._fallback is None:
                    raise
                if isinstance(error, SilentJudgeError | OutageError):
                    self._rests_until = now() + REST_S
                    log.warning("judge.second", why=str(error))
        return *await self._ask_both(self._fallback, verdict, hint), True

    async def _ask_both(
        self, endpoint: Endpoint, verdict: Sequence[Message], hint: Sequence[Message] | None
    ) -> tuple[list[str], list[str]]:
        """Ask for verdicts, then for hints unless the reply was accepted."""
        verdicts = await endpoint.answers(verdict, self._m)
        if hint is None or _verdict(verdicts).value == 1:
            return verdicts, []
        return verdicts, await endpoint.answers(hint, self._m)

    async def _audit(self, verdict: Sequence[Message]) -> list[str]:
        if self._auditor is None or self._draw() >= self._auditor.share:
            return []
        try:
            return await self._auditor.endpoint.answers(verdict, self._m)
        except (JudgeError, OutageError) as error:
            log.warning("judge.unaudited", why=str(error))
            return []


def _verdict(answers: Sequence[str]) -> Verdict:
    return majority([parse_vote(answer) for answer in answers])
