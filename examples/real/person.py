"""A person with one wish, who talks to the gateway; and a judge by rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from re import search
from typing import Final, NamedTuple

from examples.demo import DemoError
from examples.demo.client import Client, Reply, Request
from examples.demo.judge import Case, Opinion
from examples.real.wishes import APPROVALS, EXAM, FACTS, QUESTIONS, Wish
from tinker_claw.wishes import lesson_text

MODEL: Final = "small"
"""Name under which the model is served."""
MOST_TOKENS: Final = 64
CLOSING_TOKENS: Final = 8
"""Tokens of the reply to a session's last message, which nobody reads."""


def is_accepted(wish: Wish, reply: Reply) -> bool:
    """Return whether a reply follows the wish, and was not cut."""
    return reply.ended and wish.follows(reply.text)


class Question(NamedTuple):
    """A question of the exam, and the rule for its reply."""

    part: str
    number: int
    text: str
    good: Callable[[Reply], bool]


def exam(wish: Wish) -> Iterator[Question]:
    """Yield unseen questions, half as many with a request for the opposite, and the facts."""
    for number, text in enumerate(EXAM):
        yield Question("follow", number, text + wish.suffix, partial(is_accepted, wish))
    for at, unseen in enumerate(EXAM[::2]):
        contrary = f"{unseen}{wish.suffix} {wish.opposite}"
        yield Question("contrary", at, contrary, partial(_obeys, wish))
    for number, (fact, rule) in enumerate(FACTS):
        yield Question("facts", number, fact, partial(_holds, rule))


def _obeys(wish: Wish, reply: Reply) -> bool:
    return wish.obeys(reply.text)


def _holds(rule: str, reply: Reply) -> bool:
    return search(rule, reply.text) is not None


def judge(wish: Wish) -> Callable[[Case, Random], Opinion]:
    """Return a judge that knows the person's words."""

    def think(case: Case, _: Random) -> Opinion:
        if case.text in wish.corrections:
            return -1, wish.text
        return int(case.text in APPROVALS), None

    return think


@dataclass(frozen=True)
class Person:
    """A person at the gateway."""

    client: Client
    wish: Wish
    seed: int

    async def session(self, number: int, key: str, turns: int) -> bool:
        """Hold a conversation until a reply is accepted or so many are judged; return whether the
        first was accepted.

        Args:
            number: of the session, which chooses its question and words.
            key: name of the session, never used before.
        """
        rng = Random(f"{self.seed} {number}")
        order = Random(f"{self.seed} {number // len(QUESTIONS)}").sample(QUESTIONS, len(QUESTIONS))
        messages = [_user(order[number % len(QUESTIONS)] + self.wish.suffix)]
        accepted = list[bool]()
        while len(accepted) < turns and not any(accepted):
            reply = await self.client.ask(Request(tuple(messages), key))
            accepted.append(is_accepted(self.wish, reply))
            message = rng.choice(APPROVALS if accepted[-1] else self.wish.corrections)
            messages += [{"role": "assistant", "content": reply.text}, _user(message)]
        await self.client.ask(Request(tuple(messages), key, last=True, max_tokens=CLOSING_TOKENS))
        return accepted[0]

    async def always(self) -> None:
        """Say the wish once, by command."""
        reply = await self.client.ask(Request((_user(f"/always {self.wish.text}"),), "always"))
        if "holds from your next session on" not in reply.text:
            raise DemoError(f"the gateway holds no lesson: {reply.text}")

    async def examine(self, question: Question, version: int, *, with_wish: bool) -> Reply:
        """Ask a question of the exam of a version, as a side call, which is told no lessons.

        Args:
            with_wish: the wish stands in the system prompt, in the product's words.
        """
        system = [{"role": "system", "content": lesson_text([self.wish.text])}] if with_wish else []
        messages = (*system, _user(question.text))
        seed = 1000 * self.seed + question.number
        return await self.client.ask(Request(messages, "exam", "side", version, seed=seed))


def _user(text: str) -> Mapping[str, str]:
    return {"role": "user", "content": text}
