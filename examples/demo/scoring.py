"""How good is a policy version? First replies to fresh problems, sums and lists.

Rule: the questions and the seeds of the replies are the same for every version, and they are asked
as side turns, so that scoring a version never trains one. A version is asked for by its name, which
works while newer ones serve and learn.

A share of 128 replies has a standard error of at most 0.044.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from examples.demo.client import MODEL, Client, Request
from examples.demo.recipe.grammar import (
    NAMES,
    THINGS,
    Problem,
    first_message,
    new_problem,
    shows_work,
)
from examples.demo.recipe.skills import (
    Shopping,
    Sum,
    list_correct,
    list_question,
    new_shopping,
    new_sum,
    sum_correct,
    sum_question,
)
from examples.demo.user import Rule, User

EXAM_SEED = 77
SKILL_PROMPTS = 60
"""Sums, and lists, of an exam; fewer where the exam has fewer problems."""
_NAMED = re.compile("|".join((*NAMES, *THINGS, r"\d")))
"""What differs from problem to problem."""
IN_FLIGHT = 12
"""Requests at a time: enough to fill a decoding batch beside the sessions."""

_Task = TypeVar("_Task")


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of replies, each 0 to 1, and how long the first ones are."""

    accepted: float
    """First replies that the user is content with."""
    sums: float
    lists: float
    work: float
    """First replies that show the right equation."""
    alike: float
    """First replies of the commonest form, names, things and digits apart."""
    characters: float
    """Of a first reply, in the mean."""


@dataclass(frozen=True, slots=True)
class Exam:
    """The questions that every version is asked."""

    problems: tuple[Problem, ...]
    sums: tuple[Sum, ...]
    lists: tuple[Shopping, ...]

    @classmethod
    def draw(cls, prompts: int, seed: int = EXAM_SEED) -> Exam:
        """Draw `prompts` problems, and up to 60 sums and 60 lists."""
        rng = Random(f"exam-{seed}")
        skills = min(prompts, SKILL_PROMPTS)
        return cls(
            problems=tuple(new_problem(rng) for _ in range(prompts)),
            sums=tuple(new_sum(rng) for _ in range(skills)),
            lists=tuple(new_shopping(rng) for _ in range(skills)),
        )

    def questions(self) -> list[str]:
        """Every question, in the order in which `grade` wants the replies."""
        return [
            *map(first_message, self.problems),
            *map(sum_question, self.sums),
            *map(list_question, self.lists),
        ]

    def grade(self, replies: Sequence[str], rule: Rule) -> Score:
        """Score the replies to `questions()` by what the user wants."""
        first_sum = len(self.problems)
        firsts = replies[:first_sum]
        first_list = first_sum + len(self.sums)
        return Score(
            accepted=_share(rule.accepts, firsts, self.problems),
            sums=_share(sum_correct, replies[first_sum:first_list], self.sums),
            lists=_share(list_correct, replies[first_list:], self.lists),
            work=_share(shows_work, firsts, self.problems),
            alike=max(Counter(_NAMED.sub("_", text) for text in firsts).values()) / len(firsts),
            characters=sum(map(len, firsts)) / len(firsts),
        )


async def score_version(client: Client, version: int, exam: Exam, user: User) -> Score:
    """Ask one version all questions, at most 12 at a time."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def reply(number: int, question: str) -> str:
        async with slots:
            return await client.ask(
                Request(
                    messages=({"role": "user", "content": question},),
                    session=f"exam-v{version}-{number}",
                    kind="side",
                    model=f"{MODEL}@v{version}",
                    last=True,
                    seed=EXAM_SEED + number,
                )
            )

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(reply(i, text)) for i, text in enumerate(exam.questions())]
    return exam.grade([task.result() for task in tasks], user.rule(version))


class Scorer:
    """Scores versions one after another, in the order in which they are added."""

    def __init__(self, client: Client, exam: Exam, user: User, scores: dict[int, Score]) -> None:
        self._client = client
        self._user = user
        self._exam = exam
        self._scores = scores
        self._added: set[int] = set()
        self._queue: asyncio.Queue[int | None] = asyncio.Queue()

    def add(self, version: int) -> None:
        """Have a version scored, once."""
        if version not in self._added:
            self._added.add(version)
            self._queue.put_nowait(version)

    def close(self) -> None:
        """Let `run` return when everything that was added is scored."""
        self._queue.put_nowait(None)

    async def run(self) -> None:
        while (version := await self._queue.get()) is not None:
            self._scores[version] = await score_version(
                self._client, version, self._exam, self._user
            )


def _share(
    right: Callable[[str, _Task], bool], replies: Sequence[str], tasks: Sequence[_Task]
) -> float:
    hits = sum(right(reply, task) for reply, task in zip(replies, tasks, strict=True))
    return hits / len(tasks)
