"""The judge: reads what happened after a turn, gives a verdict and, where there is one, a hint."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tinker_claw.config.settings import JudgeSettings
from tinker_claw.errors import first_cause
from tinker_claw.judge.endpoints import Endpoint
from tinker_claw.judge.prompts import (
    choose_hints,
    hint_messages,
    majority,
    parse_hint,
    parse_vote,
    verdict_messages,
)
from tinker_claw.types import Message, NextState, Verdict


@dataclass(frozen=True, slots=True)
class Judgement:
    """Everything that the judge said of one turn."""

    verdict: Verdict
    verdict_answers: tuple[str, ...]
    hint_answers: tuple[str, ...]
    hints: tuple[str, ...]
    """Chosen from the hint answers, best first."""

    @property
    def heard(self) -> tuple[bool, ...]:
        """Of every answer whether it could be read."""
        answers = (*self.verdict_answers, *self.hint_answers)
        return tuple(parse_vote(answer) is not None for answer in answers)

    @property
    def unread(self) -> str | None:
        """An answer to a question of which none could be read; None: of each, one could."""
        for answers in (self.verdict_answers, self.hint_answers):
            if answers and all(parse_vote(answer) is None for answer in answers):
                return answers[0]
        return None


class Judge:
    """m votes on the verdict and, where the method wants hints, m votes on those, side by side."""

    def __init__(
        self, endpoint: Endpoint, settings: JudgeSettings, *, hint_candidates: int
    ) -> None:
        """`hint_candidates`: hints kept per turn; 0 asks for none."""
        self._endpoint = endpoint
        self._m = settings.prm_m
        self._hint_candidates = hint_candidates
        self._hints_from = settings.hints_from

    @property
    def answers(self) -> int:
        """So many are asked for, of one turn."""
        return self._m * (2 if self._hint_candidates else 1)

    async def judge(self, request: str, reply: str, state: NextState) -> Judgement:
        """Ask about one turn. What was accepted needs no hint, and what tools return gives none
        unless the settings say so: whoever can write a web page could write one.

        Raises:
            JudgeError: the endpoint failed for good; nothing is concluded from that.
            OutageError: the service is away; nothing is concluded from that either.
        """
        verdict_prompt = verdict_messages(request, reply, state)
        hears = self._hint_candidates and (state.role == "user" or self._hints_from == "any")
        hint_prompt = hint_messages(request, reply, state) if hears else None
        try:
            async with asyncio.TaskGroup() as group:
                verdicts = group.create_task(self._ask(verdict_prompt))
                hints = group.create_task(self._ask(hint_prompt))
        except ExceptionGroup as failed:
            raise first_cause(failed) from failed
        verdict_answers, hint_answers = verdicts.result(), hints.result()
        verdict = majority([parse_vote(answer) for answer in verdict_answers])
        read = sum(parse_vote(answer) is not None for answer in hint_answers)
        found = [parse_hint(answer) for answer in hint_answers] if verdict.value != 1 else []
        return Judgement(
            verdict=verdict,
            verdict_answers=tuple(verdict_answers),
            hint_answers=tuple(hint_answers),
            hints=choose_hints(found, read, self._hint_candidates),
        )

    async def _ask(self, prompt: Sequence[Message] | None) -> list[str]:
        return await self._endpoint.answers(prompt, self._m) if prompt else []
