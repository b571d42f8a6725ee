"""The script of a day, drawn from a seed: messages of a person, and replies of the model.

Rule: one seed gives the same day to the person, the model and the judge, so nothing is passed
between them: each finds a message by its text.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Stance = Literal["asks", "corrects", "praises", "moves on"]
"""What a message says of the reply before it; `asks` opens a session, so there is none."""

CALLS: Final = 2, 12
"""Fewest and most tool calls of a message that asks for something."""
FAILS: Final = 0.15
"""Share of the calls that fail."""
THINKS: Final = 40, 260
"""Fewest and most words of thinking before a call or a reply."""
SAYS: Final = 25, 140
"""Fewest and most words of a reply to the person."""
_STANCES: Final[Sequence[Stance]] = ("corrects", "praises", "moves on")
_CHANCES: Final = 0.35, 0.25, 0.4
_NEW: Final = 0.1
"""Chance that the person starts a new session, and leaves the last reply without a word."""
_ASKS: Final = (
    "Look through the invoice of the bakery (number {n}) and tell me what stands out.",
    "I need the schedule for the ferry by noon, it is number {n}. What do we have on it?",
    "Compare the hangar's meter {n} with last month and summarise it for me.",
    "Find out who signed the receipt {n} of the kiosk, and when.",
)
_CORRECTS: Final = (
    ("No, shorter please: one sentence about {n}.", "Answer in one short sentence."),
    ("That is wrong for {n}. Read the file again before you answer.", "Read the file first."),
    ("Not like that. Give me {n} as a table with two columns.", "Give a table with two columns."),
    ("Too formal. Say {n} again in plain words.", "Use plain everyday words."),
)
_PRAISES: Final = (
    "Thanks, that is exactly what I needed for {n}.",
    "Perfect, {n} is settled then. Great work.",
    "Good, thank you. {n} is done.",
)
_FILLER: Final = re.findall(
    r"\w+",
    "the user wants this so first check the file then compare what it says with the list because "
    "the earlier result was short and the date may matter here wait maybe the second column holds "
    "the total let me look at it once more and keep the answer simple and correct",
)
FILES: Final[Mapping[str, str]] = {
    "notes.md": "# Notes\n" + "- the ferry leaves at nine, the bakery pays on Fridays\n" * 12,
    "todo.md": "# To do\n" + "- [ ] call the garden centre about the meter\n" * 9,
    "budget.csv": "month,place,euro\n" + "2026-10,dock,120\n2026-11,inn,340\n" * 20,
    "log.txt": "2026-11-27 08:15 pump 3 started, pressure 2.4 bar, no alarm\n" * 130,
    "broken.py": "print(undefined_name)\n",
}
"""Files of the person's workspace."""
PICTURE: Final = "photo.png"
_SHOWN: Final = Path(__file__).parents[2] / "docs" / "images" / "demo.png"
_WORKS: Final = (
    ("read", {"path": "notes.md"}),
    ("read", {"path": "todo.md"}),
    ("read", {"path": "budget.csv"}),
    ("exec", {"command": "ls -la"}),
    ("exec", {"command": "wc -l *.md *.csv"}),
    ("exec", {"command": "grep -n garden todo.md | head -5"}),
    ("exec", {"command": "head -40 log.txt"}),
    ("write", {"path": "draft.md", "content": "A first draft.\n"}),
)
FAILING: Final = (
    ("read", {"path": "missing.md"}),
    ("exec", {"command": "cat nowhere.txt"}),
    ("exec", {"command": "python3 broken.py"}),
)
LONG: Final = ("read", {"path": "log.txt"})
"""A call whose result fills the context, so that a day has a compaction."""
LOOK: Final = ("read", {"path": PICTURE})
Call = tuple[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class Step:
    """One reply of the model: it thinks, and calls a tool or says something."""

    thinks: str
    call: Call | None
    says: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the person, with the model's replies until the person reads something."""

    text: str
    stance: Stance
    hint: str | None
    """What a careful judge would make of a correction."""
    new: bool
    """Whether a new session begins with it."""
    steps: tuple[Step, ...]

    @property
    def rating(self) -> int:
        """Rating that a careful judge gives the reply before it."""
        return {"corrects": -1, "praises": 1}.get(self.stance, 0)


def day(seed: int, messages: int) -> tuple[Message, ...]:
    """Draw a day."""
    rng = random.Random(seed)
    drawn = list[Message]()
    for n in range(messages):
        new = n == 0 or n == messages // 2 or rng.random() < _NEW
        looks = n == messages // 3
        (usual,) = rng.choices(_STANCES, _CHANCES)
        stance = "asks" if new else "moves on" if looks else usual
        drawn.append(_message(rng, 100 * (seed + 1) + n, stance, new, looks=looks))
    return tuple(drawn)


def _message(rng: random.Random, n: int, stance: Stance, new: bool, *, looks: bool) -> Message:
    if stance == "corrects":
        template, hint = rng.choice(_CORRECTS)
    else:
        template, hint = rng.choice(_PRAISES if stance == "praises" else _ASKS), None
    calls = list[Call]()
    if stance != "praises":
        count = rng.randint(*CALLS)
        calls = [rng.choice(FAILING if rng.random() < FAILS else _WORKS) for _ in range(count)]
        calls[0] = LOOK if looks else LONG if rng.random() < 0.5 else calls[0]
    steps = [Step(_words(rng, THINKS), call) for call in calls]
    steps.append(Step(_words(rng, THINKS), None, f"About {n}: {_words(rng, SAYS)}."))
    return Message(template.format(n=n), stance, hint, new, tuple(steps))


def _words(rng: random.Random, bounds: tuple[int, int]) -> str:
    return " ".join(rng.choices(_FILLER, k=rng.randint(*bounds)))


def spoken_in(text: str, messages: Sequence[Message]) -> tuple[Message, int] | None:
    """Return the message that stands last in a text, and where it ends; None: there is none."""
    latest = max(messages, key=lambda message: text.rfind(message.text))
    at = text.rfind(latest.text)
    return None if at < 0 else (latest, at + len(latest.text))


def furnish(workspace: Path) -> None:
    """Write the files of the workspace."""
    for name, text in FILES.items():
        (workspace / name).write_text(text)
    shutil.copy(_SHOWN, workspace / PICTURE)
