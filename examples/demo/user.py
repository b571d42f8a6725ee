"""The simulated user: asks for help with homework, and says what they think of the replies.

Rule: they know the grammar's rule and their own words, and nothing of versions, samples or
training. What they ask and how they put it comes from the seed and the session's number; what they
have to react to does not, because the model samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from random import Random

from examples.demo.client import Client, Request
from examples.demo.recipe.grammar import accepts, approval, correction, first_message, new_problem

IN_FLIGHT = 6
"""Sessions at a time."""
MAX_TURNS = 8
"""The user gives up when this many replies did not please them."""
TERSE_SHARE = 0.3
"""Corrections that do not say what is wrong, so that no hint can be found in them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a session went."""

    turns: int
    content: bool
    """The user got a reply that they liked, and had it saved."""


async def hold_session(client: Client, number: int, seed: int) -> Outcome:
    """One conversation, from the first message to the saved reply or to the user's patience.

    Every other session streams, as agents do.
    """
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
        content = accepts(reply, problem)
        terse = rng.random() < TERSE_SHARE
        said = approval(rng) if content else correction(rng, directive=not terse)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": said}]


async def hold_sessions(
    client: Client,
    seed: int,
    *,
    enough: Callable[[], bool],
    ended: Callable[[Outcome], Awaitable[None]],
) -> None:
    """Hold sessions, six at a time, until there are enough; the ones in flight are finished."""
    numbers = count()

    async def hold_one_by_one() -> None:
        while not enough():
            await ended(await hold_session(client, next(numbers), seed))

    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(hold_one_by_one())
