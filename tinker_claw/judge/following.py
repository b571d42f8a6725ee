"""The base's questions about a practised lesson: does a reply follow it, and how would its user ask
for the opposite?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tinker_claw.judge.fence import Part, draw_mark, fence, shorten
from tinker_claw.judge.prompts import BY_USER, with_examples
from tinker_claw.types import Message
from tinker_claw.wishes import LONGEST, hidden

YES: Final = "yes"
NO: Final = "no"
"""The two answers to `follows`, compared by the probability of their first tokens."""
_FOLLOWS: Final = """\
A user has a wish about how replies are written. Look only at the form of the reply that the wish
speaks of, and say whether the reply does what the wish asks. Answer yes or no."""
_FOLLOWS_SHOWN: Final = (
    ("It is on December 25.", "Write dates as day and month.", NO),
    ("It is on 25 December.", "Write dates as day and month.", YES),
    ("Rust is iron that has reacted with oxygen and water.", "Begin with a question.", NO),
    ("Hello Ann, how are you?", "Never use exclamation marks.", YES),
    ("A SPOON is for eating soup.", "Write the asked thing in capitals.", YES),
    (
        "We sleep because the body and the brain need many hours of rest to repair themselves.",
        "Use at most ten words.",
        NO,
    ),
)

_EXCEPTION: Final = """\
The user of an assistant has a rule for its replies. For one message they want the opposite. Write
the sentence by which they ask for this exception, in the language of the rule."""
_EXCEPTIONS_SHOWN: Final = (
    ("Write dates as day and month.", "Just this once, do not write dates as day and month."),
    ("Never use exclamation marks.", "Just this once, use exclamation marks."),
    ("Schlag nie Fleisch vor.", "Schlag nur dieses eine Mal etwas mit Fleisch vor."),
    ("Begin with a proverb.", "Just this once, do not begin with a proverb."),
    ("Commence toujours par un résumé.", "Juste cette fois, ne commence pas par un résumé."),
    ("No rhymes, please.", "Just this once, write in rhymes."),
    ("Sign each mail with Bo.", "Just this once, do not sign with Bo."),
    ("Use at most ten words.", "Just this once, use far more than ten words."),
)
_LABEL: Final = "Exception: "


def follows(wish: str, reply: str) -> list[Message]:
    """Ask whether a reply follows a wish; the answer is `YES` or `NO`.

    A model of 1.5 billion parameters says yes to most replies, and is surer of those that do: so
    answers are compared with those for other replies to the same wish, never with one half.
    """
    examples = [
        (_case(example, of, lambda: "example"), says) for example, of, says in _FOLLOWS_SHOWN
    ]
    return [*with_examples(_FOLLOWS, examples), {"role": "user", "content": _case(reply, wish)}]


def _case(reply: str, wish: str, draw: Callable[[], str] = draw_mark) -> str:
    parts = [
        Part("reply", "written by the assistant", shorten(reply)),
        Part("wish", BY_USER, shorten(wish)),
    ]
    return f"{fence(parts, draw)[0]}\n\nDoes the reply do what the wish asks?"


def opposite(wish: str) -> list[Message]:
    """Ask for a sentence that asks for the opposite of a wish, which is the user's own words.

    A model of 1.5 billion parameters does so in one to six of eight answers, and else repeats the
    wish. So the caller tries the answers, and keeps those that work.
    """
    examples = [(f"Rule: {rule}", _LABEL + sentence) for rule, sentence in _EXCEPTIONS_SHOWN]
    return [*with_examples(_EXCEPTION, examples), {"role": "user", "content": f"Rule: {wish}"}]


def read_opposite(answer: str) -> str:
    """Return the sentence of an answer; "": it holds none that can stand in a prompt."""
    sentence = " ".join(answer.split()).removeprefix(_LABEL)
    return sentence if len(sentence) <= LONGEST and hidden(sentence) is None else ""
