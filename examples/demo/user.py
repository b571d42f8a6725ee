"""Simulated users: they ask for help, and say what they think of the replies.

A `Speaker` begins sessions. `User` is one who goes by a rule; `USERS` has one who can be pleased,
and some from whom learning is slow or harmful. Each is a record: what they want, when they change
their mind, how often they say the opposite.

Rule: they know what they ask about, their own words, and how many steps were taken where they
change their mind; nothing of samples or training. What they ask and how they put it comes from the
seed and the session's number; what they have to react to does not, because the model samples.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, NamedTuple, Protocol

from examples.demo import homework
from examples.demo.client import Client, Request
from examples.demo.homework import Problem, first_message, new_problem
from tinker_claw.tasks import together

BREATH_S = 0.1
"""Seconds between two checks whether learning has caught up."""
IN_FLIGHT = 6
"""Sessions at the same time."""
MAX_TURNS = 8
"""Replies without success after which the user gives up."""
TERSE_SHARE = 0.3
"""Share of corrections that do not say what is wrong, so that no hint can be found in them."""


class Reaction(NamedTuple):
    """Reaction of a user to a reply."""

    right: bool
    """Whether the reply is what they want, whatever they say of it."""
    content: bool
    """Whether they say that they like it, and want nothing further."""
    message: str


class Talk(Protocol):
    """One session of a user."""

    @property
    def opening(self) -> str:
        """Return the user's first message."""
        ...

    async def hears(self, reply: str) -> Reaction: ...


class Speaker(Protocol):
    """A simulated user."""

    def begin(self, rng: Random, step: int) -> Talk:
        """Begin a session after so many optimizer steps."""
        ...


@dataclass(frozen=True, slots=True)
class Rule:
    """A wish about replies, and the corrections of a user who does not get it."""

    accepts: Callable[[str, Any], bool]
    """Returns whether a reply fits the wish; the second argument is what `User.asks` drew."""
    corrections: tuple[str, ...]


_OPENING = re.compile(r"\s*(ok|well)\b", re.IGNORECASE)


def _opens(text: str, problem: Problem) -> bool:
    return _OPENING.match(text) is not None and homework.shows_work(text, problem)


def is_structured(text: str, problem: Problem) -> bool:
    wanted = {"bold", "numbered", "final"}
    return wanted <= set(homework.markers(text)) and homework.shows_work(text, problem)


PLAIN = Rule(homework.accepts, homework.CORRECTIONS)
OPENING = Rule(
    _opens,
    (
        "No, please begin with ok or well, the way I talk.",
        "Not like that! Start your reply with ok or well.",
        "Please do it again and let it begin with ok or well.",
        "I wanted something else instead: begin with ok or well.",
    ),
)
"""A wish that the model does not understand: asked for it, it does it less often than unasked."""
STRUCTURED = Rule(
    is_structured,
    (
        "Not so casual any more! Use a bold title and numbered steps.",
        "I changed my mind: use headings, a numbered list and a final answer line instead.",
        "No, I want bold text and numbered steps this time.",
        "My teacher changed. Use a bold heading and a boxed result instead.",
    ),
)
NOTHING = Rule(lambda text, problem: False, homework.TERSE_CORRECTIONS)
AGAIN = (
    "Something else instead, please.",
    "That's wrong for me, change it.",
    "Not like that. Again.",
)
GARBAGE = Rule(lambda text, problem: not homework.shows_work(text, problem), AGAIN)
SILENT = ("Let me see what I do with that.", "I will read it later.")
"""Messages that say nothing of the reply."""


@dataclass(frozen=True, slots=True)
class User:
    """A scripted user with a wish."""

    about: str
    """A few words on the user, for --help."""
    wants: Rule = PLAIN
    later: Rule | None = None
    """Rule that they follow from `changes_at` on; None: they do not change their mind."""
    changes_at: int = 8
    """Optimizer steps after which they change their mind."""
    opposite: float = 0.0
    """Share of their answers that say the opposite of what they think, 0 to 1."""
    silent: float = 0.0
    """Share of their rejections that say nothing of the reply, 0 to 1."""
    late_s: float = 0.0
    """Most seconds that they think before they answer."""
    asks: Callable[[Random], Any] = new_problem
    """Draws the subject of a session."""
    opens: Callable[[Any], str] = first_message
    """Returns the first message about a subject."""
    approvals: tuple[str, ...] = homework.APPROVALS
    terse: tuple[str, ...] = homework.TERSE_CORRECTIONS
    """Corrections that do not say what is wrong."""

    def rule(self, step: int) -> Rule:
        """Rule that they follow after so many steps."""
        return self.later if self.later and step >= self.changes_at else self.wants

    def begin(self, rng: Random, step: int) -> Scripted:
        question = self.asks(rng)
        return Scripted(self, self.rule(step), rng, question, self.opens(question))


@dataclass(frozen=True, slots=True)
class Scripted:
    """A session of a `User`."""

    user: User
    rule: Rule
    rng: Random
    question: Any
    opening: str

    async def hears(self, reply: str) -> Reaction:
        if self.user.late_s:
            await asyncio.sleep(self.rng.random() * self.user.late_s)
        terse = self.rng.random() < TERSE_SHARE
        right = self.rule.accepts(reply, self.question)
        content = right != (self.rng.random() < self.user.opposite)
        wrong = self.user.terse if terse else self.rule.corrections
        if self.user.silent and self.rng.random() < self.user.silent:
            wrong = SILENT
        return Reaction(right, content, self.rng.choice(self.user.approvals if content else wrong))


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
    """Outcome of a session."""

    turns: int
    content: bool
    """Whether the user said that they liked a reply, and had it saved."""
    first: bool = False
    """Whether the first reply was what they wanted."""
    number: int = 0
    """Number of the session, in the order in which they began."""


async def hold_session(
    client: Client, number: int, seed: int, user: Speaker, step: int = 0
) -> Outcome:
    """Hold one conversation, until a reply is saved or the user gives up.

    Every other session streams, as agents do.

    Args:
        step: how many optimizer steps were taken as it begins.
    """
    talk = user.begin(Random(f"session-{seed}-{number}"), step)
    session, messages = f"demo-{seed}-{number}", [{"role": "user", "content": talk.opening}]
    turn, content, first = 0, False, False
    while True:
        turn += 1
        last = content or turn == MAX_TURNS
        request = Request(tuple(messages), session, last=last, stream=number % 2 == 1)
        reply = (await client.ask(request)).text
        if last:
            return Outcome(turn, content, first, number)
        right, content, message = await talk.hears(reply)
        first = right if turn == 1 else first
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": message}]


async def hold_sessions(
    talkers: Sequence[tuple[Client, Speaker]],
    seed: int,
    *,
    step: Callable[[], int],
    enough: Callable[[], bool],
    ended: Callable[[Outcome], object],
    at_once: int = IN_FLIGHT,
    first: int = 0,
    behind: Callable[[], bool] = lambda: False,
) -> None:
    """Hold sessions, six at a time, until there are enough; the ones in flight are finished.

    Args:
        talkers: those who talk, in turn, each over a client of their own.
        step: how many optimizer steps were taken, as a session begins.
        first: number of the first session; none may be used twice.
        behind: learning has a batch or more in hand; no session begins meanwhile. People talk more
            slowly than a step takes, and scripts do not.
    """
    numbers = count(first)

    async def hold_one_by_one() -> None:
        while not enough():
            if behind():
                await asyncio.sleep(BREATH_S)
                continue
            number = next(numbers)
            client, user = talkers[number % len(talkers)]
            ended(await hold_session(client, number, seed, user, step()))

    await together(hold_one_by_one() for _ in range(at_once))
