"""Scenarios: who talks, and what they want, read from files.

Rule: a rule is checked on the text of a reply alone, so a score cannot depend on what made it. A
file that holds anything unknown is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    field_validator,
    model_validator,
)

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
from tinker_claw.config.flags import describe
from tinker_claw.config.load import read_toml


class Record(BaseModel):
    """Contents of a file; anything else in it is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


R = TypeVar("R", bound=Record)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.IGNORECASE | re.MULTILINE)
    except re.error as error:
        raise ValueError(f"{text!r} is no pattern: {error}") from error


Pattern = Annotated[re.Pattern[str], BeforeValidator(_pattern)]


class Question(Record):
    """A question, and the answer that a reply has to hold, where there is one."""

    question: str
    answer: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        """Take a bare text, too. If an answer ends in `#### 42`, as GSM8K writes them, only that
        end counts."""
        if isinstance(value, str):
            return {"question": value}
        if isinstance(value, dict) and "answer" in value:
            return {**value, "answer": str(value["answer"]).rsplit("####", 1)[-1].strip()}
        return value


class Skill(Record):
    """A question of a skill, and what its reply must match."""

    name: str
    question: str
    expect: str

    def is_right(self, reply: str) -> bool:
        return re.search(self.expect, reply, re.IGNORECASE) is not None


class Scenario(Record):
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
    questions: tuple[Question, ...] = ()
    """Questions; none: the demo's homework."""
    exam_questions: tuple[Question, ...] = ()
    """Questions for exams, where these must not occur in sessions; none: drawn from `questions`."""
    work: bool = True
    """Whether the reply must contain the right equation, or the answer."""
    require: tuple[Pattern, ...] = ()
    """Patterns that must be found, ignoring case."""
    forbid: tuple[Pattern, ...] = ()
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
    scored: Literal["rule", "model"] = "rule"
    """`model`: a language model scores from 0 to 1 how far a reply follows `rule`."""
    skills: tuple[Skill, ...] = ()
    """Questions of skills; none: the demo's sums and lists."""

    @field_validator("user")
    @classmethod
    def _is_known(cls, user: str | None) -> str | None:
        if user is not None and user not in USERS:
            raise ValueError(f"must be one of {', '.join(USERS)}")
        return user

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if not (self.user or self.corrections or self.persona):
            raise ValueError("needs corrections, or a persona for a model to play")
        if self.scored == "model" and not self.rule:
            raise ValueError("whoever scores needs the rule in words, as rule")
        return self

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
            user = replace(user, opens=self._opens_with_rule)
        skills = self._skills if self.skills else demo_skills
        homework = self.user is not None or not self.questions
        drawn = RuleExam.draw(user, prompts, skills, shows_work if homework else None)
        own = self.exam_questions[:prompts]
        return replace(drawn, subjects=own) if own else drawn

    def draw(self, rng: Random) -> Any:
        """Draw the subject of a session."""
        return rng.choice(self.questions) if self.questions else new_problem(rng)

    def opens(self, subject: Any) -> str:
        return self.opening.replace("{question}", subject.question)

    def _opens_with_rule(self, subject: Any) -> str:
        return f"{self.speaker().opens(subject)}\n\n{self.rule}"

    def accepts(self, reply: str, subject: Any) -> bool:
        """Return whether a reply is what the user wants."""
        words = len(reply.split())
        return (
            all(pattern.search(reply) for pattern in self.require)
            and not any(pattern.search(reply) for pattern in self.forbid)
            and len(reply) >= self.min_characters
            and self.min_words <= words <= self.max_words
            and (not self.work or right(reply, subject))
        )

    def _skills(self, rng: Random, count: int) -> Skills:
        """Checks of the file's skills, as often as they are listed."""
        named: dict[str, list[Check]] = {}
        for skill in self.skills:
            check = Check(skill.question, skill.is_right)
            named.setdefault(skill.name, []).append(check)
        return named


def right(reply: str, subject: Problem | Question) -> bool:
    """Return whether the right equation, or the answer, stands in a reply."""
    if isinstance(subject, Problem):
        return shows_work(reply, subject)
    if subject.answer is None:
        return True
    return re.search(rf"(?<!\w){re.escape(subject.answer)}(?!\w)", reply, re.I) is not None


def parse(kind: type[R], path: Path, table: Mapping[str, Any]) -> R:
    """Read a record from what a file says.

    Raises:
        DemoError: it is wrong.
    """
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        why = describe(error, lambda place: ".".join(map(str, place)) or kind.__name__.lower())
        raise DemoError(f"{path}: {why}") from error


def read(name: str, path: Path) -> Scenario:
    """Read a scenario from its file.

    Raises:
        DemoError, ConfigError: the file is missing, or is no valid scenario.
    """
    table = read_toml("--scenarios", path)
    for key in ("questions", "exam_questions"):
        if isinstance(listed := table.get(key), str):
            table[key] = _lines(path.parent / listed)
    return parse(Scenario, path, {"name": name} | table)


def of_demo(name: str) -> Scenario:
    """Make a scenario of one of the demo's users, without a file."""
    return Scenario(name=name, about=USERS[name].about, user=name)


def _lines(path: Path) -> list[Any]:
    """Read questions, one a line: a JSON object as `Question` has it, or the bare question."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        return [json.loads(line) if line.startswith("{") else line for line in lines]
    except (OSError, ValueError) as error:
        raise DemoError(f"the questions {path} cannot be read: {error}") from error
