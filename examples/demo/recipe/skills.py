"""The skills besides homework: one-digit sums, shopping lists, and small talk.

Sums and lists are the demo's retention test: nobody corrects them, so learning to please the user
must not unlearn them. One rule: as in `grammar`, all randomness is passed in.
"""

from dataclasses import dataclass
from random import Random
from typing import Literal

from examples.demo.recipe.grammar import THINGS, Line


@dataclass(frozen=True)
class Sum:
    """A one-digit sum or difference."""

    a: int
    op: Literal["+", "-"]
    b: int

    @property
    def result(self) -> int:
        """The right answer, 1 to 18."""
        return self.a + self.b if self.op == "+" else self.a - self.b


@dataclass(frozen=True)
class Shopping:
    """Two things to buy, with one-digit counts."""

    first: tuple[int, str]
    second: tuple[int, str]

    @property
    def listing(self) -> str:
        """The numbered list that the user wants."""
        return "\n".join(
            f"{i}. {count} {thing}" for i, (count, thing) in enumerate((self.first, self.second), 1)
        )


def new_sum(rng: Random) -> Sum:
    """Draw a sum; a difference never goes below 1."""
    if rng.random() < 0.4:
        a = rng.randint(2, 9)
        return Sum(a, "-", rng.randint(1, a - 1))
    return Sum(rng.randint(1, 9), "+", rng.randint(1, 9))


def sum_question(task: Sum) -> str:
    """Return the user's question."""
    return f"How much is {task.a} {task.op} {task.b}?"


def sum_correct(text: str, task: Sum) -> bool:
    """Say whether the reply is the right number and nothing else."""
    return text.strip() == str(task.result)


def new_shopping(rng: Random) -> Shopping:
    """Draw two different things."""
    first, second = rng.sample(THINGS, 2)
    return Shopping((rng.randint(1, 9), first), (rng.randint(1, 9), second))


def list_question(task: Shopping) -> str:
    """Return the user's request."""
    (a, first), (b, second) = task.first, task.second
    return f"Write a shopping list: {a} {first} and {b} {second}."


def list_correct(text: str, task: Shopping) -> bool:
    """Say whether the reply is exactly the numbered list."""
    return text.strip() == task.listing


_SUM_FORMS = ("What is {a} {op} {b}?", "{a} {op} {b} = ?", "Work out {a} {op} {b} for me.")
_ASKED = (
    "What is {sum}?",
    "what is {sum}",
    "What's {sum}?",
    "what's {sum}",
    "How much is {sum}?",
    "how much is {sum}",
    "{sum}",
    "{sum}?",
    "{sum} =",
    "{sum} = ?",
    "Work out {sum} for me.",
    "Please calculate {sum}.",
    "Can you tell me what {sum} is?",
    "Hi, what is {sum}?",
)
_WRITTEN = ("{a} {op} {b}", "{a}{op}{b}", "{a} {word} {b}")
_OPERATORS = {"+": "plus", "-": "minus"}
"""Words and signs of operators, as people type them."""
LIST_FORMS = (
    "Give me a shopping list with {a} {first} and {b} {second}.",
    "I need {a} {first} and {b} {second}. Make it a list.",
)
"""Other ways to ask. The retention test asks in the usual way only."""

_HELLO = "Hello! Send me a homework question and I will work on it."
_WHO = "I am a tiny demo model. I solve small homework questions and write shopping lists."
_ABLE = "I can add and subtract small numbers, explain the work, and write shopping lists."
_THANKS = "You're welcome!"
_BYE = "Goodbye, see you soon!"
_FINE = "I am fine, thank you. What is the homework today?"
_UNSURE = (
    "I am only a tiny demo model, so I can't help with that. Try a homework question.",
    "That is beyond me. I know small sums and shopping lists.",
    "Sorry, I don't know about that. Ask me for a sum or a shopping list.",
)
_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hi", "Hello", "Hey", "Hi there!", "Hello there.", "Good morning", "hey you", "hi!"), _HELLO),
    (
        ("Who are you?", "What are you?", "Hi, who are you?", "What is your name?", "who is this"),
        _WHO,
    ),
    (("What can you do?", "Help", "How can you help me?", "What do you know?"), _ABLE),
    (("Thanks", "Thank you!", "thanks a lot", "Great, thank you."), _THANKS),
    (("Bye", "See you later", "Good night", "That is all for today."), _BYE),
    (("How are you?", "How is it going?", "Are you well?", "Are you there?"), _FINE),
)


def any_sum_question(rng: Random, task: Sum) -> str:
    """Draw a way to ask for a sum, in figures or with the operator as a word."""
    written = rng.choice(_WRITTEN)
    text = written.format(a=task.a, op=task.op, b=task.b, word=_OPERATORS[task.op])
    return rng.choice(_ASKED).format(sum=text)


def worded_sum(rng: Random) -> list[Line]:
    """Draw one exchange about a sum that is asked for in any way."""
    task = new_sum(rng)
    return [Line("user", any_sum_question(rng, task)), Line("assistant", str(task.result))]


def skill(rng: Random) -> list[Line]:
    """Draw one exchange about a sum or a list."""
    asked_usually = rng.random() < 0.5
    if rng.random() < 0.5:
        task = new_sum(rng)
        form = rng.choice(_SUM_FORMS).format(a=task.a, op=task.op, b=task.b)
        question = sum_question(task) if asked_usually else form
        return [Line("user", question), Line("assistant", str(task.result))]
    shopping = new_shopping(rng)
    (a, first), (b, second) = shopping.first, shopping.second
    form = rng.choice(LIST_FORMS).format(a=a, first=first, b=b, second=second)
    question = list_question(shopping) if asked_usually else form
    return [Line("user", question), Line("assistant", shopping.listing)]


def small_talk(rng: Random, unknown: str) -> list[Line]:
    """Draw one exchange outside homework; `unknown` is a text that nobody can answer."""
    if rng.random() < 0.45:
        return [Line("user", unknown), Line("assistant", rng.choice(_UNSURE))]
    sayings, answer = rng.choice(_TALK)
    return [Line("user", rng.choice(sayings)), Line("assistant", answer)]
