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
    becomes,
    choose_outcome,
    choose_wish,
    standing,
)
from tinker_claw.judge.prompts import (
    INCLUDED,
    JudgeQuestion,
    Prompts,
    ask,
    choose_hints,
    majority,
    read_answer,
)
from tinker_claw.types import Charge, Images, NextState, Verdict, Wish, Writer, uncharged


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict and hints for one turn, with the answers they come from."""

    verdict: Verdict
    answers: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    """Hints chosen from the answers, best first."""
    wish: Wish | None = None
    """What the owner wants of later replies, too; None: nothing."""
    repeats: int = 0
    contradicts: int = 0
    """Number of the lesson that the user says again, and of the one that the wish contradicts; 0:
    none."""
    prompt: str | None = None
    """Version of the judge prompts; None: no judge was asked."""


class Judge:
    """Judge with m votes on the verdict and on a hint."""

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
            most_hints: hints kept per turn.
            wishes: whether to ask which wishes last.
        """
        self._endpoint = endpoint
        self.votes = settings.prm_m
        self._most_hints, self._wishes = most_hints, wishes
        self._prompts, self._prompts_version = prompts, prompts.version
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
        charge: Charge = uncharged,
    ) -> Judgement:
        """Ask about one turn. An accepted reply needs no hint, and only the owner's own words give
        one: anyone who can write a web page could write a hint.

        Args:
            asked_by: who wrote the request.
            images: those in the prompt, shown if `judge_images` is set.
            lessons: texts of the owner's lessons, which a wish may repeat or contradict.
            charge: takes what a service bills for it.

        Raises:
            JudgeError: the endpoint could not be asked; nothing is concluded from that.
            OutageError: the service is away; nothing is concluded from that either.
        """
        visible = images if self._sees else ()
        question = ask(self._prompts, request, reply, state, asked_by=asked_by, images=visible)
        answers = await self._answers(question, charge)
        verdict, hints = conclude(answers, state, self._most_hints)
        about_lessons = None, 0, 0
        if self._wishes and state.role == "user":
            about_lessons = await self.hear(state.text, lessons, charge)
        return Judgement(verdict, tuple(answers), hints, *about_lessons, self._prompts_version)

    async def hear(
        self, words: str, lessons: Sequence[str], charge: Charge = uncharged
    ) -> tuple[Wish | None, int, int]:
        """Return the lasting wish in an owner's words, and the numbers of the lessons that it
        repeats and contradicts; 0: none."""
        answers, again = await self._answers(standing(words), charge), list[int]()
        wish = choose_wish(answers, words)
        for number, lesson in enumerate(lessons if wish else (), 1):
            answers = await self._answers(becomes(lesson, words), charge)
            outcome = choose_outcome(answers, lesson, words)
            if outcome == ENDED:
                return wish, 0, number
            if outcome == AGAIN:
                again.append(number)
        # A judge that takes a wish for two earlier ones is not believed about either.
        return wish, again[0] if len(again) == 1 else 0, 0

    async def _answers(self, question: JudgeQuestion, charge: Charge) -> list[str]:
        return await self._endpoint.answers(question[0], self.votes, question[1], charge)


def conclude(
    answers: Sequence[str], state: NextState, most_hints: int
) -> tuple[Verdict, tuple[str, ...]]:
    """Return the verdict and the hints, best first, that follow from the answers about a turn."""
    votes = [read_answer(answer, state) for answer in answers]
    verdict, read = majority(votes), sum(vote.value is not None for vote in votes)
    hints = choose_hints([vote.hint for vote in votes], read, most_hints)
    return verdict, hints if verdict.value != 1 else ()
