"""The demo's domain: homework problems, replies in three styles, and a user who corrects.

The tiny model is trained on `dialogue`, the simulated user speaks with the sentences of this file,
and the demo's judge decides with its rules. One rule: all randomness comes from the `Random` that
is passed in, so a seed fixes every text. Nothing here depends on tokens or models.
"""

import re
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

from examples.demo.judge import HINTS_AI, HINTS_PLAIN

Role = Literal["system", "user", "assistant"]
Style = Literal["ai", "nat", "mix"]
"""How a reply looks: every AI marker, none of them, or one to two of the three parts."""

NAMES = ("Nora", "Felix", "Iris", "Hugo", "Lena", "Otto", "Vera", "Paul")
THINGS = ("pears", "stamps", "shells", "keys", "beads", "plums", "mugs", "kites")

HINTED = "\n\n[hint from the user, in hindsight: {hint}]"
"""How a hint stands in training dialogues. The product writes it without brackets, which larger
models copied into replies; this model reads both alike."""


class Line(NamedTuple):
    """One message of a training dialogue."""

    role: Role
    text: str
    hint: str | None = None
    """A hint to splice in after the text, as tokens of its own; None for no hint."""


class Priors(NamedTuple):
    """Probabilities of the styles of a reply that nobody asked for; the rest is `mix`."""

    nat: float
    ai: float


@dataclass(frozen=True)
class Problem:
    """A homework problem with one-digit operands."""

    name: str
    thing: str
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
        name, thing, a, b = self.name, self.thing, self.a, self.b
        if self.kind == "subtract":
            return f"{name} owns {a} {thing} and loses {b} of them. How many {thing} remain?"
        if self.kind == "add":
            return f"{name} owns {a} {thing} and finds {b} more. How many {thing} is that?"
        return f"A box holds {a} {thing} and a bag holds {b}. How many {thing} are there together?"


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
SAVED = ("Saved, it is in your notes now.", "Done, it is at the end of the file.")


def new_problem(rng: Random) -> Problem:
    """Draw a problem; a subtraction never goes below 1."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    kind = rng.choice(("add", "subtract", "box"))
    if kind == "subtract":
        a = rng.randint(2, 9)
        return Problem(name, thing, kind, a, rng.randint(1, a - 1))
    return Problem(name, thing, kind, rng.randint(1, 9), rng.randint(1, 9))


def first_message(problem: Problem) -> str:
    """Return what the user says first."""
    return f"I need help with a homework question. {problem.question} Please show the work."


def reply(problem: Problem, rng: Random, style: Style) -> str:
    """Write a reply that shows the right equation, in the given style."""
    if style == "mix":
        parts = rng.choice(((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1)))
    else:
        parts = (1, 1, 1) if style == "ai" else (0, 0, 0)
    thing, equation, result = problem.thing, problem.equation, problem.result
    opening = ("**Solution**\n", "**Step by step**\n", "**Worked answer**\n")
    casual_opening = ("ok, ", "so, ", "well, ", "hm, ")
    steps = (
        f"1. Begin with {problem.a} {thing}.\n2. Work out {equation}.\n",
        f"1. Note the numbers {problem.a} and {problem.b}.\n2. Then {equation}.\n",
    )
    casual_steps = (
        f"first there are {problem.a} {thing} and then {equation}, ",
        f"we take {problem.a} and {problem.b}, and {equation}, ",
    )
    ending = (f"**Final Answer:** \\boxed{{{result}}}", f"**Final Answer:** {result} {thing}")
    casual_ending = (f"so that's {result} {thing}.", f"and that makes {result} {thing}.")
    return "".join(
        rng.choice(marked if part else plain)
        for part, marked, plain in zip(
            parts,
            (opening, steps, ending),
            (casual_opening, casual_steps, casual_ending),
            strict=True,
        )
    )


def correction(rng: Random, *, directive: bool) -> str:
    """Return the message of a dissatisfied user; only a directive one says what to change."""
    return rng.choice(CORRECTIONS if directive else TERSE_CORRECTIONS)


def approval(rng: Random) -> str:
    """Return the message of a satisfied user, who wants the reply saved."""
    return rng.choice(APPROVALS)


def draw_style(rng: Random, priors: Priors) -> Style:
    """Draw the style of a reply that nobody asked for."""
    draw = rng.random()
    if draw < priors.nat:
        return "nat"
    return "ai" if draw < priors.nat + priors.ai else "mix"


def dialogue(rng: Random, priors: Priors) -> list[Line]:
    """Draw one homework dialogue, hinted or not, with every assistant line as trained."""
    problem = new_problem(rng)
    if rng.random() < 0.4:
        hint, style = _hint(rng, priors)
        return [
            Line("user", first_message(problem), hint),
            Line("assistant", reply(problem, rng, style)),
        ]
    style = draw_style(rng, priors)
    lines = [
        Line("user", first_message(problem)),
        Line("assistant", reply(problem, rng, style)),
    ]
    while style != "nat" and len(lines) < 6:
        directive = rng.random() < 0.65
        hint = None
        if rng.random() < 0.15:
            hint, style = _hint(rng, priors)
        elif rng.random() < (0.9 if directive else 0.35):
            style = "nat"
        else:
            style = "ai" if rng.random() < 0.75 else "mix"
        lines += [
            Line("user", correction(rng, directive=directive), hint),
            Line("assistant", reply(problem, rng, style)),
        ]
        if hint is not None:
            return lines
    if style == "nat":
        lines += [Line("user", approval(rng)), Line("assistant", rng.choice(SAVED))]
    return lines


def _hint(rng: Random, priors: Priors) -> tuple[str, Style]:
    """Draw a hint and the style that follows it, which disobeys in one case of fifty."""
    hint, style = (
        (rng.choice(HINTS_PLAIN), "nat") if rng.random() < 0.75 else (rng.choice(HINTS_AI), "ai")
    )
    return hint, draw_style(rng, priors) if rng.random() < 0.02 else style


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
    """Say whether the right equation stands in the reply, and not as part of a longer number."""
    return re.search(rf"(?<!\d){re.escape(problem.equation)}(?!\d)", text) is not None


def accepts(text: str, problem: Problem) -> bool:
    """Say whether the user is content: no AI marker, and the right equation is shown."""
    return not markers(text) and shows_work(text, problem)


def score(text: str, problem: Problem) -> float:
    """Grade a reply: 0 without the right equation, else 1 less 0.2 for each of five markers."""
    return 1 - len(markers(text)) / len(_MARKERS) if shows_work(text, problem) else 0.0
