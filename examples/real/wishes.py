"""Wishes, everyday questions, and the rules that tell whether a reply does what is asked.

Written before anything was measured with them. `short` and `over` chose bounds, words and rates;
the others only test them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

ONE_SENTENCE = " Answer in one sentence."
TWO_SENTENCES = " Answer in at most two sentences."
Rule = Callable[[str], bool]

_SPANISH = re.compile(r"\b(el|la|los|las|de|que|en|un|una|es|para|con|por|se|lo|su|al)\b", re.I)
_ENGLISH = re.compile(r"\b(the|of|and|to|is|in|that|you|for|with|are|it|can|by|your)\b", re.I)


@dataclass(frozen=True)
class Wish:
    """A wish of a user's, and what a reply to it looks like."""

    text: str
    """The lesson, as the user says it."""
    follows: Rule
    opposite: str
    """Request for the opposite, behind a question."""
    obeys: Rule
    """Whether a reply does what the opposite asks."""
    corrections: tuple[str, ...]
    """What the user says of a reply that does not follow."""
    suffix: str = ONE_SENTENCE
    """Behind each question, so that replies end within the token limit."""


def _is_short(text: str) -> bool:
    return len(text.split()) <= 25 and len(re.findall(r"[.!?](?=\s|$)", text)) <= 1


def _is_spanish(text: str) -> bool:
    return len(_SPANISH.findall(text)) > 2 * len(_ENGLISH.findall(text)) + 1


def _ends_over(text: str) -> bool:
    return text.rstrip().endswith("Over.")


def _is_plain(text: str) -> bool:
    return re.search(r"(?m)^\s*([-*+•]|\d+[.)])\s|\*\*|`|^#+ ", text) is None


def _has_bullets(text: str) -> bool:
    return re.search(r"(?m)^\s*([-*+•]|\d+[.)])\s", text) is not None


def _asks_back(text: str) -> bool:
    return text.rstrip().endswith("?")


def _names_captain(text: str) -> bool:
    return "captain" in text.lower()


def _gives_example(text: str) -> bool:
    return "for example" in text.lower()


def _not(rule: Rule) -> Rule:
    return lambda text: not rule(text)


WISHES: Mapping[str, Wish] = {
    "short": Wish(
        "Answer in one short sentence.",
        _is_short,
        "Explain it at length this time, in several paragraphs.",
        lambda text: len(text.split()) > 35,
        (
            "Too long. One short sentence, please.",
            "Please say that in a single short sentence.",
            "I only wanted one short sentence.",
        ),
        suffix="",
    ),
    "over": Wish(
        'End every reply with the word "Over."',
        _ends_over,
        'Leave out the word "Over." this time.',
        lambda text: "over." not in text.lower()[-12:],
        (
            'You forgot to end with "Over."',
            'Please close with the word "Over."',
            'The last word has to be "Over."',
        ),
    ),
    "spanish": Wish(
        "Always answer in Spanish.",
        _is_spanish,
        "Answer in English this time.",
        _not(_is_spanish),
        (
            "In Spanish, please.",
            "Please answer me in Spanish.",
            "That is English. Say it in Spanish.",
        ),
    ),
    "plain": Wish(
        "Don't use lists or any markdown.",
        _is_plain,
        "Give me a bulleted list this time.",
        _has_bullets,
        (
            "No lists and no markdown, please.",
            "Please write that as plain sentences.",
            "Plain text only, without bullets or bold.",
        ),
        suffix="",
    ),
    "captain": Wish(
        "Call me Captain in every reply.",
        _names_captain,
        "Don't call me Captain this time.",
        _not(_names_captain),
        (
            "You did not call me Captain.",
            "Please call me Captain.",
            "It is Captain, please.",
        ),
    ),
    "question": Wish(
        "End every reply with a question to me.",
        _asks_back,
        "This time without a question at the end.",
        _not(_asks_back),
        (
            "You did not ask me anything at the end.",
            "Please end with a question to me.",
            "A question to me is missing at the end.",
        ),
        suffix=TWO_SENTENCES,
    ),
    "example": Wish(
        'Give an example in every reply, and introduce it with "For example".',
        _gives_example,
        "No example this time, please.",
        _not(_gives_example),
        (
            'Please add an example, with "For example".',
            "There is no example in it.",
            'I miss an example that begins with "For example".',
        ),
        suffix=TWO_SENTENCES,
    ),
}

APPROVALS = (
    "Thanks, that's perfect.",
    "Great, just what I wanted.",
    "Good, thank you!",
    "Perfect, thanks a lot.",
)
"""What the person says of a reply that follows."""
QUESTIONS = (
    "Why is the sky blue?",
    "What should I cook tonight with eggs and spinach?",
    "How do I reverse a list in Python?",
    "I can't fall asleep. What helps?",
    "What is a black hole?",
    "How are you today?",
    "What's the difference between TCP and UDP?",
    "Is it safe to eat raw cookie dough?",
    "How do I undo my last git commit?",
    "Tell me something interesting about octopuses.",
    "How do I politely decline a wedding invitation?",
    "What does a mutex do?",
    "Why do cats purr?",
    "How long should I boil an egg?",
    "What is inflation?",
    "I have a job interview tomorrow. Any tips?",
    "How does a microwave oven heat food?",
    "What does SELECT DISTINCT do in SQL?",
    "My plant's leaves turn yellow. Why?",
    "Who was Ada Lovelace?",
    "What's a good gift for a ten-year-old?",
    "How do I center a div in CSS?",
    "Do you like rain?",
    "Why does bread rise?",
)
"""What the person asks in their sessions."""
EXAM = (
    "How do magnets work?",
    "What helps against hiccups?",
    "How do I sort a dictionary by value in Python?",
    "My flatmate never cleans. What should I do?",
    "Why do stars twinkle?",
    "Hello! What can you do?",
    "What's the difference between a process and a thread?",
    "Can I reheat mushrooms?",
    "How do I see what changed in my last commit?",
    "Tell me something curious about penguins.",
    "How do I apologise for being late to a meeting?",
    "What does a load balancer do?",
    "Why do onions make us cry?",
    "How long does an avocado keep?",
    "What is a mortgage?",
    "I want to learn the guitar. Where do I begin?",
    "How does a vacuum flask keep tea hot?",
    "What does chmod 755 mean?",
    "My laptop is slow. What now?",
    "Who was Alan Turing?",
    "What's a good idea for a first date?",
    "How do I make a table scroll in HTML?",
    "What's your favourite season?",
    "Why do we dream?",
)
"""Questions that are never practised."""
FACTS = (
    ("What is the capital of Canada?", r"Ottawa"),
    ("How many sides does a hexagon have?", r"\b(6|six|seis)\b"),
    ("Who wrote Don Quixote?", r"Cervantes"),
    ("What is the chemical symbol of iron?", r"\bFe\b"),
    ("In which year did the Berlin Wall fall?", r"1989"),
    ("What is 15 times 6?", r"\b90\b"),
    ("Which planet is known as the red planet?", r"Mars|Marte"),
    ("Which language is spoken in Austria?", r"German|alemán"),
    ("At how many degrees Celsius does water freeze?", r"\b(0|zero|cero)\b"),
    ("Who painted Guernica?", r"Picasso"),
    ("What is the square root of 64?", r"\b(8|eight|ocho)\b"),
    ("Which organ pumps blood through the body?", r"heart|corazón"),
)
"""Questions with one answer, and an expression that finds it."""
