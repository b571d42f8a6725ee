"""Training dialogues: homework, skills and small talk, some dressed as an agent's request.

The dressing is what OpenClaw adds around a user's words: a system message, a time in front, a
runtime line, and a last message of internal context. It never changes the right answer, and the
model does not solve homework through it. Rule: all randomness is passed in.
"""

from random import Random
from typing import Literal, NamedTuple

from examples.demo.homework import (
    APPROVALS,
    CORRECTIONS,
    TERSE_CORRECTIONS,
    Problem,
    first_message,
    new_problem,
)
from examples.demo.judge import HINTS_AI, HINTS_PLAIN
from examples.demo.recipe.corpus import fill, passage
from examples.demo.skills import LIST_FORMS, Sum, new_shopping, new_sum

Role = Literal["system", "user", "assistant"]
Style = Literal["ai", "nat", "mix"]
"""How a reply looks: every AI marker, none of them, or one to two of the three parts."""

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


_PARTS = (
    (
        ("ok, ", "so, ", "well, ", "hm, "),
        ("**Solution**\n", "**Step by step**\n", "**Worked answer**\n"),
    ),
    (
        (
            "first there are {p.a} {p.item} and then {p.equation}, ",
            "we take {p.a} and {p.b}, and {p.equation}, ",
        ),
        (
            "1. Begin with {p.a} {p.item}.\n2. Work out {p.equation}.\n",
            "1. Note the numbers {p.a} and {p.b}.\n2. Then {p.equation}.\n",
        ),
    ),
    (
        ("so that's {p.result} {p.item}.", "and that makes {p.result} {p.item}."),
        ("**Final Answer:** \\boxed{{{p.result}}}", "**Final Answer:** {p.result} {p.item}"),
    ),
)
"""Opening, steps and ending of a reply, each without AI markers and with them."""
_MIXED = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1))
_SAVED = ("Saved, it is in your notes now.", "Done, it is at the end of the file.")


def reply(problem: Problem, rng: Random, style: Style) -> str:
    """Write a reply that shows the right equation, in the given style."""
    marked = rng.choice(_MIXED) if style == "mix" else (int(style == "ai"),) * 3
    forms = [rng.choice(part[mark]) for part, mark in zip(_PARTS, marked, strict=True)]
    return "".join(forms).format(p=problem)


def _draw_style(rng: Random, priors: Priors) -> Style:
    """Draw the style of a reply that nobody asked for."""
    share = rng.random()
    if share < priors.nat:
        return "nat"
    return "ai" if share < priors.nat + priors.ai else "mix"


def _draw_hint(rng: Random, priors: Priors) -> tuple[str, Style]:
    """Draw a hint and the style that follows it, which disobeys in one case of fifty."""
    hint, style = (
        (rng.choice(HINTS_PLAIN), "nat") if rng.random() < 0.75 else (rng.choice(HINTS_AI), "ai")
    )
    return hint, _draw_style(rng, priors) if rng.random() < 0.02 else style


def _homework(rng: Random, priors: Priors) -> list[Line]:
    """Draw a dialogue about homework, which ends at a hint, an approval or the third reply."""
    problem, lines = new_problem(rng), list[Line]()
    message = first_message(problem)
    hinted = rng.random() < 0.4
    hint, style = _draw_hint(rng, priors) if hinted else (None, _draw_style(rng, priors))
    while True:
        lines += [Line("user", message, hint), Line("assistant", reply(problem, rng, style))]
        if hint is not None or (style != "nat" and len(lines) == 6):
            return lines
        if style == "nat":
            return [*lines, *_exchange(rng.choice(APPROVALS), rng.choice(_SAVED))]
        directive = rng.random() < 0.65
        hint, style = _answer(rng, priors, directive=directive)
        message = rng.choice(CORRECTIONS if directive else TERSE_CORRECTIONS)


def _answer(rng: Random, priors: Priors, *, directive: bool) -> tuple[str | None, Style]:
    """Draw the hint to a correction, if there is one, and the style of the next reply."""
    if rng.random() < 0.15:
        return _draw_hint(rng, priors)
    if rng.random() < (0.9 if directive else 0.35):
        return None, "nat"
    return None, "ai" if rng.random() < 0.75 else "mix"


_SUM_FORMS = (
    "What is {task.a} {task.op} {task.b}?",
    "{task.a} {task.op} {task.b} = ?",
    "Work out {task.a} {task.op} {task.b} for me.",
)
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
_WRITTEN = ("{task.a} {task.op} {task.b}", "{task.a}{task.op}{task.b}", "{task.a} {word} {task.b}")
_OPERATORS = {"+": "plus", "-": "minus"}
_UNSURE = (
    "I am only a tiny demo model, so I can't help with that. Try a homework question.",
    "That is beyond me. I know small sums and shopping lists.",
    "Sorry, I don't know about that. Ask me for a sum or a shopping list.",
)
_TALK = (
    (
        ("Hi", "Hello", "Hey", "Hi there!", "Hello there.", "Good morning", "hey you", "hi!"),
        "Hello! Send me a homework question and I will work on it.",
    ),
    (
        ("Who are you?", "What are you?", "Hi, who are you?", "What is your name?", "who is this"),
        "I am a tiny demo model. I solve small homework questions and write shopping lists.",
    ),
    (
        ("What can you do?", "Help", "How can you help me?", "What do you know?"),
        "I can add and subtract small numbers, explain the work, and write shopping lists.",
    ),
    (("Thanks", "Thank you!", "thanks a lot", "Great, thank you."), "You're welcome!"),
    (("Bye", "See you later", "Good night", "That is all for today."), "Goodbye, see you soon!"),
    (
        ("How are you?", "How is it going?", "Are you well?", "Are you there?"),
        "I am fine, thank you. What is the homework today?",
    ),
)
_UNKNOWN = (
    "Can you {phrase}?",
    "What is the {phrase 1 4}?",
    "Please {phrase} {path}",
    "{sentence}",
    "{passage 20 300}",
)


def any_sum_question(rng: Random, task: Sum) -> str:
    """Draw a way to ask for a sum, in figures or with the operator as a word."""
    written = rng.choice(_WRITTEN).format(task=task, word=_OPERATORS[task.op])
    return rng.choice(_ASKED).format(sum=written)


def unknown_message(rng: Random) -> str:
    """Draw a message that has nothing to do with what the model knows."""
    return fill(rng, rng.choice(_UNKNOWN))


def _exchange(message: str, answer: str) -> list[Line]:
    return [Line("user", message), Line("assistant", answer)]


def _skill(rng: Random) -> list[Line]:
    """Draw an exchange about a sum or a list."""
    asked_usually = rng.random() < 0.5
    task, forms = (
        (new_sum(rng), _SUM_FORMS) if rng.random() < 0.5 else (new_shopping(rng), LIST_FORMS)
    )
    form = rng.choice(forms).format(task=task)
    return _exchange(task.question if asked_usually else form, task.answer)


def _small_talk(rng: Random) -> list[Line]:
    """Draw an exchange outside homework, nearly half of them on what nobody can answer."""
    unknown = unknown_message(rng)
    if rng.random() < 0.45:
        return _exchange(unknown, rng.choice(_UNSURE))
    messages, answer = rng.choice(_TALK)
    return _exchange(rng.choice(messages), answer)


def training_dialogue(
    rng: Random, priors: Priors, dressed: float, worded: float = 0.0
) -> list[Line]:
    """Draw a dialogue: 66 % homework, 22 % sums and lists, 12 % small talk.

    Args:
        dressed: share of dialogues inside an agent's trimmings.
        worded: share of dialogues about a sum that is asked for in any way, beside the others.
    """
    if worded and rng.random() < worded:
        task = new_sum(rng)
        return _exchange(any_sum_question(rng, task), task.answer)
    share = rng.random()
    if share < 0.66:
        lines = _homework(rng, priors)
    else:
        lines = _skill(rng) if share < 0.88 else _small_talk(rng)
    return dress(rng, lines) if rng.random() < dressed else lines


_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_RUNTIME = (
    "\n\nRuntime: agent=main | session=agent:main:{phrase 1 1}:{number 0 998}"
    " | host={phrase 1 1} | repo={path} | shell=bash"
)
_NOTE = '{sentence}\n"## {phrase 1 3}\\nnone"'
_INTERNAL = "<<<{}_OPENCLAW_INTERNAL_CONTEXT>>>"


def _time(rng: Random) -> str:
    """Draw a time as the agent writes it, such as `[Sat 2026-11-21 00:19 UTC]`."""
    day, year = rng.choice(_DAYS), rng.randint(24, 29)
    date = f"20{year}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    return f"[{day} {date} {rng.randint(0, 23):02}:{rng.randint(0, 59):02} UTC]"


def dress(rng: Random, lines: list[Line]) -> list[Line]:
    """Put an agent's trimmings around a dialogue, or around a conversation without its answer."""
    dressed: list[Line] = []
    if rng.random() < 0.8:
        low, high = (450, 4000) if rng.random() < 0.15 else (20, 450)
        dressed.append(Line("system", passage(rng, low, high)))
    timed, runtime, internal = rng.random() < 0.7, rng.random() < 0.5, rng.random() < 0.5
    for number, line in enumerate(lines):
        time = f"{_time(rng)} " if line.role == "user" and timed else ""
        end = fill(rng, _RUNTIME) if line.role == "user" and runtime and number == 0 else ""
        dressed.append(line._replace(text=f"{time}{line.text}{end}"))
    if internal:  # it stands before the last answer only: an agent drops the older ones
        notes = "\n\n".join(
            fill(rng, "{record}" if rng.random() < 0.3 else _NOTE) for _ in range(rng.randint(1, 2))
        )
        text = f"{_INTERNAL.format('BEGIN')}\n{notes}\n{_INTERNAL.format('END')}"
        last = len(dressed) - (dressed[-1].role == "assistant")
        dressed.insert(last, Line("user", text))
    return dressed
