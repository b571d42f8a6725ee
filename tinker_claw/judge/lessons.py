"""The judge's questions about lessons: whether an owner's words hold for later replies, and what
becomes of each of their earlier wishes.

Rule: an answer only points at the owner's words, letter for letter. These are questions of their
own: asked with the verdict, they would colour it. A small model follows examples, as turns of the
conversation, where it does not follow rules.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from tinker_claw.judge.fence import TOLD, Part, draw_mark, fence, shorten
from tinker_claw.judge.prompts import (
    BY_USER,
    JudgeQuestion,
    Schema,
    form_of,
    object_in,
    own_words,
    schema_of,
    text_in,
    with_examples,
)
from tinker_claw.prose import quotable
from tinker_claw.types import Wish
from tinker_claw.wishes import hidden, own_sentences

Shown: TypeAlias = Sequence[tuple[tuple[str, ...], tuple[str, ...]]]
"""Examples: the texts of each, and the fields of its answer."""

_STANDING: Final = """\
A user has written a message after a reply of their AI assistant. You find out whether it holds a
standing wish: one for later replies, too. It does if it says "always", "never", "from now on" or
the like, reminds of an earlier wish, or says when it holds: "in mails". Thanks, questions,
corrections and new tasks hold none."""
_OF_STANDING: Final = {
    "scope": '"always", or "this once" if there is no standing wish',
    "quote": "the standing wish in the user's own words, letter for letter, or empty",
    "words": "those of its words that say that it lasts, or when it holds, or empty",
}
_ALWAYS, _ONCE = _SCOPES = ("always", "this once")
"""How far a wish reaches."""
_NONE: Final = (_ONCE, "", "")
_STANDING_SHOWN: Final[Shown] = (
    (("Thank you, that helps a lot!",), _NONE),
    (
        ("From now on write dates as day and month.",),
        ("always", "From now on write dates as day and month.", "From now on"),
    ),
    (("No, the meeting is on Tuesday.",), _NONE),
    (
        ("In Gedichten will ich keine Reime.",),
        (_ALWAYS, "In Gedichten will ich keine Reime.", "In Gedichten"),
    ),
    (("Once more, with a title this time.",), _NONE),
    (
        ("Too bold. I told you to use British spelling.",),
        ("always", "I told you to use British spelling.", "I told you"),
    ),
    (("¿Por qué lo crees?",), _NONE),
    (
        ("Ne propose jamais de viande.",),
        ("always", "Ne propose jamais de viande.", "jamais"),
    ),
)

AGAIN, ENDED = "said again", "taken back"
"""What becomes of an earlier wish that is not untouched."""
_OUTCOMES: Final = ("untouched", AGAIN, ENDED)
_BECOMES: Final = """\
A user has wishes that all replies of their AI assistant are to follow. What becomes of an earlier
wish, now that they say more?"""
_OF_OUTCOME: Final = {
    "earlier": "the words of the earlier wish that they now speak of, letter for letter, or empty",
    "now": "the user's words that speak of it now, letter for letter, or empty",
    "outcome": '"untouched" if they do not speak of it, "said again" if they want the same as '
    'before, "taken back" if they have changed their mind about it',
}
_UNTOUCHED: Final = ("", "", "untouched")
_OUTCOMES_SHOWN: Final[Shown] = (
    (
        ("Always write dates as day and month.", "From now on add a title to each reply."),
        _UNTOUCHED,
    ),
    (
        ("Write my surname in capitals.", "Capitals for the surname, as always!"),
        ("my surname in capitals", "Capitals for the surname", AGAIN),
    ),
    (("Never suggest meat.", "In code never use tabs."), _UNTOUCHED),
    (
        ("From now on use British spelling.", "From now on American spelling, please."),
        ("British spelling", "American spelling", ENDED),
    ),
    (("Immer mit Titel, bitte.", "Schlag nie wieder Fleisch vor."), _UNTOUCHED),
    (
        ("Siempre en grados Celsius.", "Ya no quiero Celsius."),
        ("en grados Celsius", "Ya no quiero Celsius", ENDED),
    ),
    (("Round all figures.", "Always end with a question."), _UNTOUCHED),
    (
        ("No rhymes, please.", "I told you: never any rhymes!"),
        ("No rhymes", "never any rhymes", AGAIN),
    ),
)
_KINDS: Final[Mapping[str, Schema]] = {
    "scope": {"type": "string", "enum": [*_SCOPES]},
    "outcome": {"type": "string", "enum": [*_OUTCOMES]},
}
"""Fields of an answer that are no free text."""


def standing(words: str) -> JudgeQuestion:
    """Ask whether the owner's words are a standing wish."""
    asks = _STANDING, "Does the message hold a standing wish?"
    return _question(asks, _OF_STANDING, _STANDING_SHOWN, [words])


def becomes(lesson: str, words: str) -> JudgeQuestion:
    """Ask what becomes of a lesson by the owner's words."""
    asks = _BECOMES, "What becomes of the earlier wish?"
    return _question(asks, _OF_OUTCOME, _OUTCOMES_SHOWN, [lesson, words])


def _question(
    asks: tuple[str, str],
    fields: Mapping[str, str],
    examples: Shown,
    texts: Sequence[str],
) -> JudgeQuestion:
    """
    Args:
        asks: what is asked, before the texts and behind them.
        texts: the message, and before it the earlier wish, if it is about one.
    """

    def case(texts: Sequence[str], draw: Callable[[], str]) -> tuple[str, str]:
        whats = ("earlier wish", "message")[-len(texts) :]
        parts = [
            Part(what, BY_USER, shorten(text)) for what, text in zip(whats, texts, strict=True)
        ]
        fenced, mark = fence(parts, draw)
        return f"{fenced}\n\n{asks[1]}", mark

    def answer(values: Sequence[str]) -> str:
        return json.dumps(dict(zip(fields, values, strict=True)), ensure_ascii=False)

    pairs = [(case(few, lambda: "example")[0], answer(values)) for few, values in examples]
    messages = with_examples(f"{asks[0]}\n\n{form_of(fields)}", pairs)
    question, mark = case(texts, draw_mark)
    messages.append({"role": "user", "content": f"{TOLD.format(mark=mark)}\n\n{question}"})
    return messages, schema_of(fields, _KINDS)


def choose_wish(answers: Sequence[str], owner: str) -> Wish | None:
    """Return the wish that a majority of the readable answers call lasting, in the sentences at
    which most of those point; None: there is none.

    Args:
        owner: the owner's own words, where whatever an answer copies must stand.
    """
    read = [answer for answer in map(object_in, answers) if text_in(answer, "scope") in _SCOPES]
    wishes = Counter(wish for answer in read if (wish := _wish(answer, owner)) is not None)
    if 2 * wishes.total() <= len(read):
        return None
    return min(wishes, key=lambda wish: (-wishes[wish], len(wish.text), wish.text))


def _wish(answer: Mapping[str, Any], owner: str) -> Wish | None:
    copied = (own_words(text_in(answer, name), quotable(owner)) for name in ("quote", "words"))
    quote, words = (" ".join(text.split()) for text in copied)
    if text_in(answer, "scope") == _ONCE or not (quote and words) or hidden(words) is not None:
        return None
    text = own_sentences(owner, quote, words)
    return Wish(text, words) if text else None


def choose_outcome(answers: Sequence[str], lesson: str, owner: str) -> str:
    """Return what a majority of the readable answers say becomes of a lesson. One counts as
    untouched whose quotes do not stand in the lesson and in the owner's words."""
    read = [answer for answer in map(object_in, answers) if text_in(answer, "outcome") in _OUTCOMES]
    outcomes = Counter(
        text_in(answer, "outcome")
        for answer in read
        if own_words(text_in(answer, "earlier"), lesson)
        and own_words(text_in(answer, "now"), quotable(owner))
    )
    return next(
        (outcome for outcome in (AGAIN, ENDED) if 2 * outcomes[outcome] > len(read)), "untouched"
    )
