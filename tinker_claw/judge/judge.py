"""The judge: reads what happened after a turn, gives a verdict and, where there is one, a hint.

Rule: one endpoint answers both questions about a turn.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinker_claw.config.settings import JudgeSettings
from tinker_claw.judge.endpoints import Endpoint
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
from tinker_claw.types import Images, NextState, Verdict, Vote, Wish, Writer


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


class Judge:
    """Judge with m votes on the verdict and, where the method wants hints and the reply was not
    accepted, m votes on those."""

    def __init__(
        self,
        endpoint: Endpoint,
        settings: JudgeSettings,
        *,
        most_hints: int,
        prompts: Prompts = INCLUDED,
    ) -> None:
        """
        Args:
            most_hints: hints kept per turn; 0 asks for none.
        """
        self._endpoint = endpoint
        self._m = settings.prm_m
        self._most_hints = most_hints
        self._prompts, self._asked = prompts, prompts.version
        self._sees = settings.judge_images

    @property
    def answers(self) -> int:
        """Number of answers requested for one turn."""
        return self._m * (2 if self._most_hints else 1)

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
            JudgeError: the endpoint could not be asked; nothing is concluded from that.
            OutageError: the service is away; nothing is concluded from that either.
        """
        case, shown = (request, reply, state, self._prompts, asked_by), images if self._sees else ()
        verdict_prompt = verdict_messages(*case, images=shown)
        hears = state.role == "user" and self._most_hints > 0
        verdict_answers, hint_answers = await self._endpoint.answers(verdict_prompt, self._m), []
        verdict = majority([parse_vote(answer) for answer in verdict_answers])
        if hears and verdict.value != 1:
            hint_prompt = hint_messages(*case, images=shown)
            hint_answers = await self._endpoint.answers(hint_prompt, self._m)
        found = [parse_hint(answer, state.text) for answer in hint_answers]
        read = sum(parse_hint_vote(answer) is not None for answer in hint_answers)
        return Judgement(
            verdict=verdict,
            verdict_answers=tuple(verdict_answers),
            hint_answers=tuple(hint_answers),
            hints=choose_hints(found, read, self._most_hints),
            wish=choose_wish([parse_wish(answer, state.text) for answer in hint_answers], read),
            prompt=self._asked,
        )
