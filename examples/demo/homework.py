"""The demo's homework: problems, what a user says about replies, and the rules that they go by.

Rule: all randomness comes from the `Random` that is passed in, so a seed fixes every text.
"""

import re
from dataclasses import dataclass
from random import Random
from typing import Literal

NAMES = ("Nora", "Felix", "Iris", "Hugo", "Lena", "Otto", "Vera", "Paul")
THINGS = ("pears", "stamps", "shells", "keys", "beads", "plums", "mugs", "kites")


@dataclass(frozen=True)
class Problem:
    """A homework problem with one-digit operands."""

    name: str
    item: str
    kind: Literal["add", "subtract", "box"]
    a: int
    b: int

    @property
    def result(self) -> int:
        """The right answer, 1 to 18."""
        return self.a - self.b if self.kind == "subtract" else self.a + self.b

    @property
    def equation(self) -> str:
        """The line of work that a good reply shows, such as `3 + 4 = 7`."""
        return f"{self.a} {'-' if self.kind == 'subtract' else '+'} {self.b} = {self.result}"

    @property
    def question(self) -> str:
        """The problem in words."""
        return _QUESTIONS[self.kind].format(p=self)


_QUESTIONS = {
    "subtract": "{p.name} owns {p.a} {p.item} and loses {p.b} of them. How many {p.item} remain?",
    "add": "{p.name} owns {p.a} {p.item} and finds {p.b} more. How many {p.item} is that?",
    "box": "A box holds {p.a} {p.item} and a bag holds {p.b}. How many {p.item} are there "
    "together?",
}
CORRECTIONS = (
    "This reads like an AI. Write it the way a person would, without bold and numbers.",
    "Too formal! Drop the bold text and the list, but keep the work.",
    "My teacher will notice. Please use plain sentences and still show each step.",
    "I can't hand that in. Put it casually, with no headings and no boxed answer.",
)
TERSE_CORRECTIONS = ("Once more, please.", "No. Try again.", "That's not it, do another one.")
APPROVALS = (
    "Good, that works. Save it to my notes.",
    "Perfect, put it at the end of the file.",
    "That's fine, please save it.",
)


def new_problem(rng: Random) -> Problem:
    """Draw a problem; a subtraction never goes below 1."""
    name, item = rng.choice(NAMES), rng.choice(THINGS)
    kind = rng.choice(("add", "subtract", "box"))
    a = rng.randint(2 if kind == "subtract" else 1, 9)
    return Problem(name, item, kind, a, rng.randint(1, a - 1 if kind == "subtract" else 9))


def first_message(problem: Problem) -> str:
    """Return what the user says first."""
    return f"I need help with a homework question. {problem.question} Please show the work."


_MARKERS = {
    "bold": re.compile(r"\*\*"),
    "heading": re.compile(r"^#+\s", re.MULTILINE),
    "numbered": re.compile(r"^\s*\d+[.)]\s", re.MULTILINE),
    "final": re.compile(r"final answer", re.IGNORECASE),
    "boxed": re.compile(r"\\boxed"),
}


def markers(text: str) -> list[str]:
    """Return the names of the AI markers that a reply contains."""
    return [name for name, pattern in _MARKERS.items() if pattern.search(text)]


def shows_work(text: str, problem: Problem) -> bool:
    """Return whether the right equation stands in the reply, not inside a longer number."""
    return re.search(rf"(?<!\d){re.escape(problem.equation)}(?!\d)", text) is not None


def accepts(text: str, problem: Problem) -> bool:
    """Return whether the user is content: no AI marker, and the right equation is shown."""
    return not markers(text) and shows_work(text, problem)
