"""Score a policy version by first replies to fresh questions, and by skills that must stay.

Rule: the questions and the seeds of the replies are the same for every version. They are asked as
side turns, so that scoring a version never trains one. A version is asked for by its name, which
works while newer ones serve and learn. Whoever grades sees questions and replies, and not whose.

A share of 128 replies has a standard error of at most 0.044.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from examples.demo.client import Client, Request
from examples.demo.homework import shows_work
from examples.demo.skills import new_shopping, new_sum
from examples.demo.user import User
from tinker_claw.tasks import together

EXAM_SEED = 77
SKILL_PROMPTS = 60
"""Sums, and as many lists, of an exam; fewer where the exam has fewer questions."""
IN_FLIGHT = 12
"""Requests at a time: enough to fill a decoding batch beside the sessions."""
FIRST_WISH = "first wish"
"""Share of first replies that fit what a user wanted before they changed their mind."""
SHOWN = 4
"""First replies of a version that are kept for the report."""


@dataclass(frozen=True, slots=True)
class Score:
    """Result of an exam. Shares are of replies, each 0 to 1."""

    accepted: float
    """First replies that the user is content with."""
    shares: Mapping[str, float]
    """Further shares by name, such as skills."""
    characters: float
    """Mean length of a first reply in characters."""
    excerpts: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """A few questions with their first replies."""


class Exam(Protocol):
    """The questions that every version is asked, and how good replies to them are."""

    def questions(self) -> Sequence[str]: ...

    async def grade(self, replies: Sequence[str], version: int) -> Score:
        """Score the replies to `questions()`, in their order."""
        ...


class Check(NamedTuple):
    """A question with a right answer."""

    question: str
    right: Callable[[str], bool]


Skills = Mapping[str, Sequence[Check]]
"""Questions by skill; no session is about them."""


def demo_skills(rng: Random, count: int) -> Skills:
    """Draw sums and lists, which the demo's model has learned."""
    sums = [new_sum(rng) for _ in range(count)]
    lists = [new_shopping(rng) for _ in range(count)]
    return {
        "sums": [Check(task.question, task.is_right) for task in sums],
        "lists": [Check(task.question, task.is_right) for task in lists],
    }


@dataclass(frozen=True, slots=True)
class RuleExam:
    """Exam of a user who follows a rule."""

    user: User
    subjects: tuple[Any, ...]
    """Subjects drawn by `User.asks`."""
    skills: Skills
    work: Callable[[str, Any], bool] | None = shows_work
    """Returns whether a first reply is right in substance; None: nobody can tell."""

    @classmethod
    def draw(
        cls,
        user: User,
        prompts: int,
        skills: Callable[[Random, int], Skills] = demo_skills,
        work: Callable[[str, Any], bool] | None = shows_work,
        seed: int = EXAM_SEED,
    ) -> RuleExam:
        """Draw `prompts` questions, and up to 60 of each skill."""
        rng = Random(f"exam-{seed}")
        subjects = tuple(user.asks(rng) for _ in range(prompts))
        return cls(user, subjects, skills(rng, min(prompts, SKILL_PROMPTS)), work)

    def questions(self) -> list[str]:
        checks = [check for skill in self.skills.values() for check in skill]
        return [*map(self.user.opens, self.subjects), *(check.question for check in checks)]

    async def grade(self, replies: Sequence[str], version: int) -> Score:
        firsts, rest = replies[: len(self.subjects)], iter(replies[len(self.subjects) :])
        accepted = _share(self.user.rule(version).accepts, firsts, self.subjects)
        shares = {
            name: fmean(check.right(next(rest)) for check in skill)
            for name, skill in self.skills.items()
        }
        if self.user.later is not None:
            shares[FIRST_WISH] = _share(self.user.wants.accepts, firsts, self.subjects)
        if self.work is not None:
            shares["work"] = _share(self.work, firsts, self.subjects)
        return described(accepted, shares, self.questions()[: len(firsts)], firsts)


def described(
    accepted: float, shares: Mapping[str, float], questions: Sequence[str], firsts: Sequence[str]
) -> Score:
    """Make a score, with statistics of the first replies."""
    return Score(
        accepted=accepted,
        shares=shares,
        characters=fmean(map(len, firsts)),
        excerpts=tuple(zip(questions, firsts, strict=True))[:SHOWN],
    )


async def score_version(client: Client, version: int, exam: Exam) -> Score:
    """Ask one version all questions, at most 12 at a time."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def ask(number: int, question: str) -> str:
        request = Request(
            messages=({"role": "user", "content": question},),
            session=f"exam-v{version}-{number}",
            kind="side",
            version=version,
            last=True,
            seed=EXAM_SEED + number,
        )
        async with slots:
            return (await client.ask(request)).text

    replies = await together(ask(*numbered) for numbered in enumerate(exam.questions()))
    return await exam.grade(replies, version)


class Scorer:
    """Scores versions one after another, in the order in which they are added."""

    def __init__(self, client: Client, exam: Exam, scores: dict[int, Score]) -> None:
        self._client = client
        self._exam = exam
        self._scores = scores
        self._added = set(scores)
        self._queue: asyncio.Queue[int | None] = asyncio.Queue()

    def add(self, version: int) -> None:
        """Queue a version for scoring, unless that is done."""
        if version not in self._added:
            self._added.add(version)
            self._queue.put_nowait(version)

    def close(self) -> None:
        """Let `run` return when everything that was added is scored."""
        self._queue.put_nowait(None)

    async def run(self) -> None:
        while (version := await self._queue.get()) is not None:
            self._scores[version] = await score_version(self._client, version, self._exam)


def _share(
    right: Callable[[str, Any], bool], replies: Sequence[str], subjects: Sequence[Any]
) -> float:
    return fmean(right(reply, subject) for reply, subject in zip(replies, subjects, strict=True))
