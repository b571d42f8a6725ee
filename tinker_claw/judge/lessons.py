"""The judge's questions about lessons: does what an owner says hold for later replies, and is it
one of their earlier wishes again, or the end of one?

Rule: an answer only points at the owner's words, and at the numbers of their lessons. These are
questions of their own: asked with the verdict, they would colour it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from tinker_claw.judge.fence import TOLD, Part, draw_mark, fence, shorten
from tinker_claw.judge.prompts import BY_USER, Schema, object_in, object_of, stands_in, text_in
from tinker_claw.types import Message, Wish
from tinker_claw.wishes import hidden, own_sentences

Asked: TypeAlias = tuple[list[Message], Schema]
"""The messages of a question, and the schema of an answer."""

_STANDING: Final = """\
A user has said something right after a reply of their AI assistant. You find out whether it is a
standing wish: one about how later replies should be, too, and not about this one alone.

A standing wish says so: "always", "never", "from now on", "I told you", "in my mails". A correction
of this reply, a new request, a question, thanks, and whatever somebody else is quoted with are no
standing wishes."""
_OF_STANDING: Final = {
    "reasoning": "one sentence on what the user wants, and for how long",
    "quote": "the user's own words, copied letter for letter: the whole standing wish, or empty",
    "words": "those of the quote's words that show that it lasts, or name the kind, or empty",
    "scope": '"always" if it holds for whatever the user will ask, "for this kind of request" if '
    'the user names a kind, "this once" if it is about this reply or you cannot tell',
}
_SCOPES: Final = {"always": "always", "for this kind of request": "kind", "this once": None}
"""How far a wish reaches, as it is asked for and stored."""

_COMPARE: Final = """\
A user has said earlier how an assistant should reply. These wishes are numbered. Now they have said
something about a reply, and you compare that with their wishes.

A wish is repeated if the user now asks for the same again, in whatever words. It is contradicted if
the user now wants the opposite from now on, so that it cannot hold any more. What is only about
this one reply, or only about one kind of request, contradicts no wish."""
_OF_COMPARED: Final = {
    "reasoning": "one sentence on what the user says now, and which wish is about the same, if any",
    "repeats": "the number of the wish that is repeated, or 0",
    "contradicts": "the number of the wish that is contradicted, or 0",
}


def standing(said: str, draw: Callable[[], str] = draw_mark) -> Asked:
    """Ask whether the owner's words are a standing wish."""
    string = {"type": "string"}
    kinds = dict.fromkeys(_OF_STANDING, string) | {"scope": {**string, "enum": [*_SCOPES]}}
    return _asked(_STANDING, _OF_STANDING, kinds, [], said, draw)


def comparison(lessons: Sequence[str], said: str, draw: Callable[[], str] = draw_mark) -> Asked:
    """Ask which lesson the owner's words repeat, and which one they contradict."""
    known = "\n".join(f"{n}. {text}" for n, text in enumerate(lessons, 1))
    number = {"type": "integer", "enum": [*range(len(lessons) + 1)]}
    kinds = dict.fromkeys(_OF_COMPARED, number) | {"reasoning": {"type": "string"}}
    return _asked(
        _COMPARE, _OF_COMPARED, kinds, [Part("earlier wishes", BY_USER, known)], said, draw
    )


def _asked(
    asks: str,
    fields: Mapping[str, str],
    kinds: Mapping[str, Any],
    earlier: Sequence[Part],
    said: str,
    draw: Callable[[], str],
) -> Asked:
    case, mark = fence([*earlier, Part("next state", BY_USER, shorten(said))], draw)
    form = "\n".join(f"{name}: {what}" for name, what in fields.items())
    form = f"Answer with one JSON object and nothing else. Its fields, in this order:\n{form}"
    system = "\n\n".join([asks, form, TOLD.format(mark=mark)])
    case = f"{case}\n\nAnswer as JSON with {', '.join(fields)}."
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": case},
    ], object_of(kinds)


def choose_wish(answers: Sequence[str], owner: str) -> Wish | None:
    """Return the wish that a majority of the readable answers call lasting, in the sentences at
    which most of those point; None: there is none.

    Args:
        owner: the owner's own words, where whatever an answer copies must stand.
    """
    read = [said for said in map(object_in, answers) if text_in(said, "scope") in _SCOPES]
    found = Counter(wish for said in read if (wish := _wish(said, owner)) is not None)
    if 2 * found.total() <= len(read):
        return None
    return min(found, key=lambda wish: (-found[wish], len(wish.text), wish.text))


def _wish(said: Mapping[str, Any], owner: str) -> Wish | None:
    scope = _SCOPES[text_in(said, "scope")]
    quote, words = (_as_said(text_in(said, name), owner) for name in ("quote", "words"))
    if scope is None or hidden(words) is not None:
        return None
    if not (stands_in(quote, owner) and stands_in(words, owner)):
        return None
    text = own_sentences(owner, quote, words)
    return Wish(text, words, scope) if text else None


def _as_said(quote: str, owner: str) -> str:
    """Return a quote with its first letter as the owner wrote it."""
    quote = " ".join(quote.split())
    other = quote[:1].swapcase() + quote[1:]
    return other if other in owner and quote not in owner else quote


def choose_lessons(answers: Sequence[str], most: int) -> tuple[int, int]:
    """Return the numbers of the lessons that are repeated and contradicted by a majority of the
    readable answers; 0: none is, or one that is both."""
    numbers, found = range(most + 1), list[tuple[int, int]]()
    for said in map(object_in, answers):
        pair = said.get("repeats"), said.get("contradicts")
        if all(type(one) is int and one in numbers for one in pair):
            found.append(cast("tuple[int, int]", pair))
    chosen = (
        next((n for n, count in Counter(named).items() if 2 * count > len(found)), 0)
        for named in zip(*found, strict=True)
    )
    repeats, contradicts = [*chosen] or (0, 0)
    return (0, 0) if repeats == contradicts else (repeats, contradicts)
