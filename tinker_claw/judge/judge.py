"""The judge: reads what happened after a turn, gives a verdict and, where there is one, a hint.

Rule: one question asks for both. What the owner says for later is asked apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinker_claw.config.settings import JudgeSettings
from tinker_claw.judge.endpoints import Endpoint
from tinker_claw.judge.lessons import (
    AGAIN,
    ENDED,
    Asked,
    becomes,
    choose_outcome,
    choose_wish,
    standing,
)
from tinker_claw.judge.prompts import (
    INCLUDED,
    Prompts,
    Question,
    choose_hints,
    majority,
    read_answer,
)
from tinker_claw.types import Images, NextState, Verdict, Wish, Writer


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict and hints for one turn, with the answers they come from."""

    verdict: Verdict
    answers: tuple[str, ...]
    hints: tuple[str, ...]
    """Hints chosen from the answers, best first."""
    wish: Wish | None
    """What the owner wants of later replies, too; None: nothing."""
    repeats: int
    contradicts: int
    """Number of the lesson that the user says again, and of the one that the wish contradicts; 0:
    none."""
    prompt: str
    """Version of the judge prompts."""


class Judge:
    """Judge with m votes on the verdict and, where the method wants hints, on those."""

    def __init__(
        self,
        endpoint: Endpoint,
        settings: JudgeSettings,
        *,
        most_hints: int,
        wishes: bool = False,
        prompts: Prompts = INCLUDED,
    ) -> None:
        """
        Args:
            most_hints: hints kept per turn; 0 asks for none.
            wishes: whether to ask which wishes last.
        """
        self._endpoint = endpoint
        self.votes = settings.prm_m
        self._most_hints, self._wishes = most_hints, wishes
        self._prompts, self._asked = prompts, prompts.version
        self._sees = settings.judge_images

    async def judge(
        self,
        request: str,
        reply: str,
        state: NextState,
        *,
        asked_by: Writer = Writer.OWNER,
        images: Images = (),
        lessons: Sequence[str] = (),
    ) -> Judgement:
        """Ask about one turn. An accepted reply needs no hint, and only the owner's own words give
        one: anyone who can write a web page could write a hint.

        Args:
            asked_by: who wrote the request.
            images: those in the prompt, shown if `judge_images` is set.
            lessons: texts of the owner's lessons, which a wish may repeat or contradict.

        Raises:
            JudgeError: the endpoint could not be asked; nothing is concluded from that.
            OutageError: the service is away; nothing is concluded from that either.
        """
        hears = state.role == "user" and self._most_hints > 0
        question = Question(self._prompts, hint=hears)
        shown = images if self._sees else ()
        asked = question.about(request, reply, state, asked_by=asked_by, images=shown)
        answers = await self._answers((asked, question.schema))
        found = [read_answer(answer, state.text if hears else None) for answer in answers]
        verdict = majority([one.rating for one in found])
        read, teaches = sum(one.rating is not None for one in found), verdict.value != 1
        hints = choose_hints([one.hint for one in found], read, self._most_hints)
        wish, repeats, contradicts = None, 0, 0
        if self._wishes and state.role == "user":
            wish, repeats, contradicts = await self.hear(state.text, lessons)
        return Judgement(
            verdict=verdict,
            answers=tuple(answers),
            hints=hints if teaches else (),
            wish=wish,
            repeats=repeats,
            contradicts=contradicts,
            prompt=self._asked,
        )

    async def hear(self, said: str, lessons: Sequence[str]) -> tuple[Wish | None, int, int]:
        """Return the lasting wish in an owner's words, and the numbers of the lessons that it
        repeats and contradicts; 0: none."""
        wish, again = choose_wish(await self._answers(standing(said)), said), list[int]()
        for number, lesson in enumerate(lessons if wish else (), 1):
            outcome = choose_outcome(await self._answers(becomes(lesson, said)), lesson, said)
            if outcome == ENDED:
                return wish, 0, number
            if outcome == AGAIN:
                again.append(number)
        # Whoever takes a wish for two earlier ones has understood none of them.
        return wish, again[0] if len(again) == 1 else 0, 0

    async def _answers(self, asked: Asked) -> list[str]:
        return await self._endpoint.answers(asked[0], self.votes, asked[1])
