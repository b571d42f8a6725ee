"""The demo's skills besides homework: one-digit sums and shopping lists.

They are its retention test: nobody corrects them, so learning to please the user must not unlearn
them. Rule: as in `homework`, all randomness is passed in.
"""

from dataclasses import dataclass
from random import Random
from typing import Literal

from examples.demo.homework import THINGS


@dataclass(frozen=True)
class Sum:
    """A one-digit sum or difference."""

    a: int
    op: Literal["+", "-"]
    b: int

    @property
    def question(self) -> str:
        """The usual question."""
        return f"How much is {self.a} {self.op} {self.b}?"

    @property
    def answer(self) -> str:
        """The right answer, 1 to 18."""
        return str(self.a + self.b if self.op == "+" else self.a - self.b)

    def is_right(self, reply: str) -> bool:
        """Return whether a reply is the right number and nothing else."""
        return reply.strip() == self.answer


@dataclass(frozen=True)
class Shopping:
    """Two things to buy, with one-digit counts."""

    a: int
    first: str
    b: int
    second: str

    @property
    def question(self) -> str:
        """The usual request."""
        return f"Write a shopping list: {self.a} {self.first} and {self.b} {self.second}."

    @property
    def answer(self) -> str:
        """The numbered list that the user wants."""
        return f"1. {self.a} {self.first}\n2. {self.b} {self.second}"

    def is_right(self, reply: str) -> bool:
        """Return whether a reply is the numbered list and nothing else."""
        return reply.strip() == self.answer


LIST_FORMS = (
    "Give me a shopping list with {task.a} {task.first} and {task.b} {task.second}.",
    "I need {task.a} {task.first} and {task.b} {task.second}. Make it a list.",
)
"""Other ways to ask for a list. The retention test asks in the usual way only."""


def new_sum(rng: Random) -> Sum:
    """Draw a sum; a difference never goes below 1."""
    if rng.random() < 0.4:
        a = rng.randint(2, 9)
        return Sum(a, "-", rng.randint(1, a - 1))
    return Sum(rng.randint(1, 9), "+", rng.randint(1, 9))


def new_shopping(rng: Random) -> Shopping:
    """Draw two different things."""
    first, second = rng.sample(THINGS, 2)
    return Shopping(rng.randint(1, 9), first, rng.randint(1, 9), second)
