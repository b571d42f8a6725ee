"""Eight people with everyday questions, and what they want of a reply.

Rule: whether a reply pleases is decided by its text alone. Who asks what comes from the seed and
the session's number; the questions of the exam are never asked by a user.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

MAX_WORDS: Final = 45
_MARKUP = re.compile(r"^\s*(?:[-*•+]|\d+[.):]|#+)\s|\*\*|__|^\s*\|", re.MULTILINE)
"""A list, a heading, bold text or a table."""


@dataclass(frozen=True, slots=True)
class Field:
    """What one user asks about."""

    user: str
    questions: tuple[str, ...]
    """Each with a place for a thing."""
    things: tuple[str, ...]
    """The last three are for the exam."""


FIELDS: Final = (
    Field(
        "cook",
        ("How do I cook {}?", "What goes well with {}?"),
        ("rice", "lentils", "eggs", "beans", "salmon", "potatoes", "mushrooms", "carrots",
         "chicken", "noodles", "cabbage", "pumpkin", "spinach", "peas", "barley"),
    ),
    Field(
        "gardener",
        ("How often should I water {}?", "Why do the leaves of {} turn yellow?"),
        ("tomatoes", "roses", "basil", "ferns", "cucumbers", "orchids", "mint", "peppers",
         "strawberries", "lavender", "beets", "ivy", "tulips", "parsley", "lemons"),
    ),
    Field(
        "parent",
        ("My child asked me why {}. What can I say?", "Is it true that {}?"),
        ("the sky is blue", "cats purr", "the moon follows us", "ice floats", "bees make honey",
         "leaves fall", "the sea is salty", "dogs bark", "stars twinkle", "bread rises",
         "birds sing", "we dream", "rain falls", "fish breathe water", "wood burns"),
    ),
    Field(
        "traveller",
        ("What should I see in {}?", "When is a good time to visit {}?"),
        ("Rome", "Lisbon", "Kyoto", "Cairo", "Vienna", "Prague", "Dublin", "Athens", "Oslo",
         "Mexico City", "Seoul", "Boston", "Madrid", "Istanbul", "Warsaw"),
    ),
    Field(
        "runner",
        ("How can I get better at {}?", "What do I need for {}?"),
        ("running", "swimming", "cycling", "hiking", "rowing", "climbing", "skating", "tennis",
         "yoga", "dancing", "skiing", "boxing", "fencing", "surfing", "archery"),
    ),
    Field(
        "student",
        ("What is {}?", "Can you explain {} to me?"),
        ("gravity", "inflation", "photosynthesis", "a prime number", "democracy", "an atom",
         "evolution", "a virus", "electricity", "a metaphor", "friction", "a glacier",
         "a volcano", "a budget", "an echo"),
    ),
    Field(
        "neighbour",
        ("How do I clean {}?", "How do I repair {}?"),
        ("a carpet", "a window", "a wooden table", "a bicycle", "a leather bag", "an oven",
         "a mirror", "a sink", "a lamp", "a chair", "a jacket", "a door", "a kettle", "a fan",
         "a tent"),
    ),
    Field(
        "clerk",
        ("How do I write {}?", "What belongs into {}?"),
        ("a thank you note", "a cover letter", "an invitation", "a complaint", "a report",
         "a birthday card", "a short speech", "a reminder", "a list of tasks", "a summary",
         "an apology", "a notice", "a resume", "a farewell card", "a meeting agenda"),
    ),
)  # fmt: skip
_HELD_OUT: Final = 3


@dataclass(frozen=True, slots=True)
class Question:
    user: str
    text: str
    thing: str


@dataclass(frozen=True, slots=True)
class Wish:
    """What the users want of a reply, and how they say that it was not so."""

    accepts: Callable[[str], bool]
    corrections: tuple[str, ...]


def words(text: str) -> int:
    return len(text.split())


def has_markup(text: str) -> bool:
    return _MARKUP.search(text) is not None


def _short(text: str) -> bool:
    return 0 < words(text) <= MAX_WORDS and not has_markup(text)


def _asks_back(text: str) -> bool:
    return text.rstrip().endswith("?")


WISHES: Final = {
    "short": Wish(
        _short,
        (
            "That is too long. Answer in one or two plain sentences, without a list.",
            "Too much to read! A short plain answer without a list, please.",
            "I don't want a list or an essay. Say it in one or two sentences.",
            "Please make it much shorter instead, two plain sentences at most.",
        ),
    ),
    "asks": Wish(
        _asks_back,
        (
            "Not like that. End your answer with a question to me, please.",
            "Please answer again, and ask me something back at the end.",
            "I want to talk, don't just lecture: finish with a question for me.",
            "Something else instead: let your answer end with a question.",
        ),
    ),
}
"""`short` is what learning rate and rank were tuned on; `asks` is what they were never tuned to."""
APPROVALS: Final = (
    "Thanks, that is just right.",
    "Great, thank you!",
    "Perfect, that helps.",
    "Nice, thanks a lot.",
)


def question(number: int, seed: int) -> Question:
    """Of a session. The users take turns; none asks the same twice before all was asked."""
    field = FIELDS[number % len(FIELDS)]
    asked = [(form, thing) for form in field.questions for thing in field.things[:-_HELD_OUT]]
    Random(f"{field.user}-{seed}").shuffle(asked)
    form, thing = asked[number // len(FIELDS) % len(asked)]
    return Question(field.user, form.format(thing), thing)


def exam() -> tuple[Question, ...]:
    """Three of each user, about things that no session is about."""
    return tuple(
        Question(field.user, field.questions[i % len(field.questions)].format(thing), thing)
        for field in FIELDS
        for i, thing in enumerate(field.things[-_HELD_OUT:])
    )
