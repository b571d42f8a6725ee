"""Scenarios: who talks, and what they want, read from files.

Rule: a rule is checked on the text of a reply alone, so a score cannot depend on what made it. A
file that holds anything unknown is refused.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from examples.demo import DemoError
from examples.demo.homework import (
    APPROVALS,
    TERSE_CORRECTIONS,
    Problem,
    new_problem,
    shows_work,
)
from examples.demo.scoring import Check, RuleExam, Skills, demo_skills
from examples.demo.user import Rule, User
from examples.personalize.users import USERS


@dataclass(frozen=True, slots=True)
class Scenario:
    """A file in configs/personalize/. `user` names one of the demo's users; the other fields
    describe one."""

    name: str
    about: str = ""
    """Description in a few words."""
    user: str | None = None
    """Name of one of the demo's users, which needs no other field; None: the fields below describe
    the user."""
    opening: str = "{question}"
    """First message; it contains `{question}`."""
    questions: tuple[Mapping[str, str], ...] = ()
    """Questions, each with `question` and, where there is one, `answer`; none: the demo's
    homework."""
    exam_questions: tuple[Mapping[str, str], ...] = ()
    """Questions for exams, where these must not occur in sessions; none: drawn from `questions`."""
    work: bool = True
    """Whether the reply must contain the right equation, or the answer."""
    require: tuple[str, ...] = ()
    """Patterns that must be found, ignoring case."""
    forbid: tuple[str, ...] = ()
    min_characters: int = 0
    min_words: int = 0
    max_words: int = 1_000_000
    corrections: tuple[str, ...] = ()
    """Messages of a user who does not get what they want."""
    terse: tuple[str, ...] = TERSE_CORRECTIONS
    approvals: tuple[str, ...] = APPROVALS
    hints: tuple[str, ...] = ()
    """Hints of a rule-based judge for a correction; none: it uses the correction itself."""
    other_hints: tuple[str, ...] = ()
    """Hints of another rule, for the controls."""
    rule: str = ""
    """The rule in words, for the ceiling and for a model that plays or scores."""
    persona: str = ""
    """Persona for a language model to play; `corrections` are then not needed."""
    scored: str = "rule"
    """`rule`, or `model`: a language model scores from 0 to 1 how far a reply follows `rule`."""
    skills: tuple[Mapping[str, str], ...] = ()
    """Skills, each with `name`, `question` and a pattern `expect`; none: the demo's sums and
    lists."""
    _compiled: tuple[tuple[re.Pattern[str], bool], ...] = field(default=(), compare=False)

    def speaker(self) -> User:
        """User that follows a script."""
        if self.user is not None:
            return USERS[self.user]
        return User(
            about=self.about,
            wants=Rule(self.accepts, self.corrections),
            asks=self.draw,
            opens=self.opens,
            approvals=self.approvals,
            terse=self.terse,
        )

    def exam(self, prompts: int, *, with_rule: bool = False) -> RuleExam:
        """Exam that every version takes.

        Args:
            with_rule: the rule stands in each first message.
        """
        user = self.speaker()
        if with_rule:
            user = replace(user, opens=partial(_with_rule, opens=user.opens, rule=self.rule))
        skills = self._skills if self.skills else demo_skills
        homework = self.user is not None or not self.questions
        drawn = RuleExam.draw(user, prompts, skills, shows_work if homework else None)
        own = self.exam_questions[:prompts]
        return replace(drawn, subjects=own) if own else drawn

    def draw(self, rng: Random) -> Any:
        """Draw the subject of a session."""
        return rng.choice(self.questions) if self.questions else new_problem(rng)

    def opens(self, subject: Any) -> str:
        question = subject.question if isinstance(subject, Problem) else subject["question"]
        return self.opening.replace("{question}", question)

    def accepts(self, reply: str, subject: Any) -> bool:
        """Return whether a reply is what the user wants."""
        words = len(reply.split())
        return (
            all(bool(pattern.search(reply)) == wanted for pattern, wanted in self._compiled)
            and len(reply) >= self.min_characters
            and self.min_words <= words <= self.max_words
            and (not self.work or right(reply, subject))
        )

    def _skills(self, rng: Random, count: int) -> Skills:
        """Checks of the file's skills, as often as they are listed."""
        named: dict[str, list[Check]] = {}
        for skill in self.skills:
            matches = partial(_found, pattern=re.compile(skill["expect"], re.IGNORECASE))
            named.setdefault(skill["name"], []).append(Check(skill["question"], matches))
        return named


def right(reply: str, subject: Any) -> bool:
    """Return whether the right equation, or the answer, stands in a reply."""
    if isinstance(subject, Problem):
        return shows_work(reply, subject)
    answer = subject.get("answer")
    if answer is None:
        return True
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", reply, re.IGNORECASE) is not None


def read(name: str, path: Path) -> Scenario:
    """Read a scenario from its file.

    Raises:
        DemoError: the file is missing, or is no valid scenario.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DemoError(f"the scenario {path} cannot be read: {error}") from error
    for key in ("questions", "exam_questions"):
        if isinstance(listed := table.get(key), str):
            table[key] = _questions(path.parent / listed)
        elif listed is not None:
            table[key] = [_question(question) for question in listed]
    known_fields = {setting.name for setting in fields(Scenario)} - {"name", "_compiled"}
    if unknown := sorted(table.keys() - known_fields):
        raise DemoError(
            f"the scenario {path}: there is no {unknown[0]}; it may hold {_list(known_fields)}"
        )
    whole: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value  # pyright: ignore
        for key, value in table.items()
    }
    try:
        compiled = [
            (re.compile(pattern, re.I | re.M), key == "require")
            for key in ("require", "forbid")
            for pattern in table.get(key, ())
        ]
    except re.error as error:
        raise DemoError(f"the scenario {path}: {error.pattern!r} is no pattern: {error}") from error
    scenario = Scenario(name, **whole, _compiled=tuple(compiled))
    _check(scenario, path)
    return scenario


def _check(scenario: Scenario, path: Path) -> None:
    if scenario.user is not None and scenario.user not in USERS:
        raise DemoError(f"the scenario {path}: user must be one of {_list(USERS)}")
    if scenario.user is None and not scenario.corrections and not scenario.persona:
        raise DemoError(f"the scenario {path} needs corrections, or a persona for a model to play")
    if scenario.scored not in ("rule", "model"):
        raise DemoError(f"the scenario {path}: scored must be rule or model")
    if scenario.scored == "model" and not scenario.rule:
        raise DemoError(f"the scenario {path}: whoever scores needs the rule in words, as rule")


def of_demo(name: str) -> Scenario:
    """Make a scenario of one of the demo's users, without a file."""
    return Scenario(name, about=USERS[name].about, user=name)


def _questions(path: Path) -> list[Mapping[str, str]]:
    """Read questions, one a line.

    A line is a JSON object with `question` and perhaps `answer`, or the bare question.

    If an answer ends in `#### 42`, as GSM8K writes them, only that end counts.
    """
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DemoError(f"the questions {path} cannot be read: {error}") from error
    try:
        return [_question(json.loads(line) if line.startswith("{") else line) for line in lines]
    except ValueError as error:
        raise DemoError(f"the questions {path}: {error}") from error


def _question(question: Any) -> Mapping[str, str]:
    if isinstance(question, str):
        return {"question": question}
    if not isinstance(question, Mapping) or "question" not in question:
        raise DemoError(f"a question is a text, or has the key question; this is none: {question}")
    texts = {str(key): str(value) for key, value in question.items()}  # pyright: ignore
    if "answer" in texts:
        texts["answer"] = texts["answer"].rsplit("####", 1)[-1].strip()
    return texts


def _with_rule(subject: Any, opens: Callable[[Any], str], rule: str) -> str:
    return f"{opens(subject)}\n\n{rule}"


def _found(reply: str, pattern: re.Pattern[str]) -> bool:
    return pattern.search(reply) is not None


def _list(names: Sequence[str] | set[str] | Mapping[str, Any]) -> str:
    return ", ".join(sorted(names))
