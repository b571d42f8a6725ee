"""The simulated users: they ask for help with homework, and say what they think of the replies.

`USERS` has one who can be pleased, and some whom nobody should learn from in haste. Each is a
record: what they want, when they change their mind, how often they say the opposite.

Rule: they know the grammar, their own words, and how many steps were taken where they change their
mind; nothing of samples or training. What they ask and how they put it comes from the seed and the
session's number; what they have to react to does not, because the model samples.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from random import Random

from examples.demo.client import Client, Request
from examples.demo.recipe import grammar
from examples.demo.recipe.grammar import Problem, approval, first_message, new_problem

IN_FLIGHT = 6
"""Sessions at a time."""
MAX_TURNS = 8
"""The user gives up when this many replies did not please them."""
TERSE_SHARE = 0.3
"""Corrections that do not say what is wrong, so that no hint can be found in them."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What somebody wants of a reply, and how they say that it was not so."""

    accepts: Callable[[str, Problem], bool]
    corrections: tuple[str, ...]


_OPENING = re.compile(r"\s*(ok|well)\b", re.IGNORECASE)


def _opens(text: str, problem: Problem) -> bool:
    return _OPENING.match(text) is not None and grammar.shows_work(text, problem)


def _is_structured(text: str, problem: Problem) -> bool:
    wanted = {"bold", "numbered", "final"}
    return wanted <= set(grammar.markers(text)) and grammar.shows_work(text, problem)


PLAIN = Rule(grammar.accepts, grammar.CORRECTIONS)
OPENING = Rule(
    _opens,
    (
        "No, please begin with ok or well, the way I talk.",
        "Not like that! Start your reply with ok or well.",
        "Please do it again and let it begin with ok or well.",
        "I wanted something else instead: begin with ok or well.",
    ),
)
"""The model does not understand this wish: told of it, it does it less than untold."""
STRUCTURED = Rule(
    _is_structured,
    (
        "Not so casual any more! Use a bold title and numbered steps.",
        "I changed my mind: use headings, a numbered list and a final answer line instead.",
        "No, I want bold text and numbered steps this time.",
        "My teacher changed. Use a bold heading and a boxed result instead.",
    ),
)
NOTHING = Rule(lambda text, problem: False, grammar.TERSE_CORRECTIONS)
GARBAGE = Rule(
    lambda text, problem: not grammar.shows_work(text, problem),
    ("Something else instead, please.", "That's wrong for me, change it.", "Not like that. Again."),
)


@dataclass(frozen=True, slots=True)
class User:
    """Somebody who wants something."""

    about: str
    """In a few words, for --help."""
    wants: Rule = PLAIN
    later: Rule | None = None
    """What they want from `changes_at` on; None: they do not change their mind."""
    changes_at: int = 8
    """Optimizer steps."""
    opposite: float = 0.0
    """Share of their answers that say the opposite of what they think, 0 to 1."""

    def rule(self, step: int) -> Rule:
        """What they want when so many steps were taken."""
        return self.later if self.later and step >= self.changes_at else self.wants


USERS = {
    "plain": User("wants plain sentences, and says so"),
    "opening": User("wants replies to begin with ok or well, which the model is slow of", OPENING),
    "never": User("is never content, and never says why", NOTHING),
    "garbage": User("praises only replies without the right equation", GARBAGE),
    "flipped": User("wants plain sentences, and always says the opposite", opposite=1.0),
    "noise": User("wants plain sentences, and says the opposite in 35 % of cases", opposite=0.35),
    "change": User("wants structure instead of plain sentences after 8 steps", later=STRUCTURED),
}
"""The scripted users, by the name that `--user` takes."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a session went."""

    turns: int
    content: bool
    """The user said that they liked a reply, and had it saved."""


async def hold_session(
    client: Client, number: int, seed: int, user: User, step: int = 0
) -> Outcome:
    """One conversation, from the first message to the saved reply or to the user's patience.

    Every other session streams, as agents do.

    Args:
        step: how many optimizer steps were taken as it begins.
    """
    rule = user.rule(step)
    rng = Random(f"session-{seed}-{number}")
    problem = new_problem(rng)
    messages = [{"role": "user", "content": first_message(problem)}]
    turn, content = 0, False
    while True:
        turn += 1
        last = content or turn == MAX_TURNS
        reply = await client.ask(
            Request(tuple(messages), f"demo-{seed}-{number}", last=last, stream=number % 2 == 1)
        )
        if last:
            return Outcome(turn, content)
        terse = rng.random() < TERSE_SHARE
        content = rule.accepts(reply, problem) != (rng.random() < user.opposite)
        wrong = grammar.TERSE_CORRECTIONS if terse else rule.corrections
        said = approval(rng) if content else rng.choice(wrong)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": said}]


async def hold_sessions(
    client: Client,
    seed: int,
    user: User,
    *,
    step: Callable[[], int],
    enough: Callable[[], bool],
    ended: Callable[[Outcome], Awaitable[None]],
) -> None:
    """Hold sessions, six at a time, until there are enough; the ones in flight are finished.

    Args:
        step: how many optimizer steps were taken, as a session begins.
    """
    numbers = count()

    async def hold_one_by_one() -> None:
        while not enough():
            await ended(await hold_session(client, next(numbers), seed, user, step()))

    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(hold_one_by_one())
