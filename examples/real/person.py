"""A person with one wish, who talks to the gateway by the openai SDK; and a judge by rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from re import search
from typing import Any, Final, NamedTuple

from openai import AsyncOpenAI, OpenAIError

from examples.demo import DemoError
from examples.demo.judge import Case, Opinion
from examples.real.wishes import APPROVALS, EXAM, FACTS, QUESTIONS, Wish
from tinker_claw.wishes import lesson_text

MODEL: Final = "small"
"""Name under which the model is served."""
MOST_TOKENS: Final = 64
CLOSING_TOKENS: Final = 8
"""Tokens of the reply to a session's last message, which nobody reads."""
ANSWER_S: Final = 1800.0
"""Seconds until a request is given up; a reply may wait for a step."""


class Reply(NamedTuple):
    """A reply, and whether the model ended it by itself."""

    text: str
    ended: bool


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
    for n, text in enumerate(EXAM):
        yield Question("follow", n, text + wish.suffix, partial(is_accepted, wish))
    for n, text in enumerate(EXAM[::2]):
        contrary = f"{text}{wish.suffix} {wish.opposite}"
        yield Question("contrary", n, contrary, partial(_obeys, wish))
    for n, (text, rule) in enumerate(FACTS):
        yield Question("facts", n, text, partial(_holds, rule))


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


def client(url: str) -> AsyncOpenAI:
    """Return the SDK for a gateway at this address, which does not end in /v1."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=ANSWER_S, max_retries=0)


@dataclass(frozen=True)
class Person:
    """A person at the gateway."""

    sdk: AsyncOpenAI
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
        while True:
            reply = await self.ask(messages, {"X-Session-Id": key})
            accepted.append(is_accepted(self.wish, reply))
            message = rng.choice(APPROVALS if accepted[-1] else self.wish.corrections)
            messages += [{"role": "assistant", "content": reply.text}, _user(message)]
            if accepted[-1] or len(accepted) == turns:
                closing = {"X-Session-Id": key, "X-Session-Done": "1"}
                await self.ask(messages, closing, max_tokens=CLOSING_TOKENS)
                return accepted[0]

    async def always(self) -> None:
        """Say the wish once, by command."""
        reply = await self.ask([_user(f"/always {self.wish.text}")], {"X-Session-Id": "always"})
        if "holds from your next session on" not in reply.text:
            raise DemoError(f"the gateway holds no lesson: {reply.text}")

    async def examine(self, question: Question, version: int, *, with_wish: bool) -> Reply:
        """Ask a question of the exam of a version, as a side call, which is told no lessons.

        Args:
            with_wish: the wish stands in the system prompt, in the product's words.
        """
        system = [{"role": "system", "content": lesson_text([self.wish.text])}] if with_wish else []
        return await self.ask(
            [*system, _user(question.text)],
            {"X-Session-Id": "exam", "X-Turn-Type": "side"},
            model=f"{MODEL}@v{version}",
            temperature=1.0,
            seed=1000 * self.seed + question.number,
        )

    async def ask(
        self, messages: Sequence[Mapping[str, str]], headers: Mapping[str, str], **more: Any
    ) -> Reply:
        """Ask for a reply.

        Raises:
            DemoError: there is none.
        """
        fields: Any = {"messages": messages, "model": MODEL, "max_tokens": MOST_TOKENS, **more}
        try:
            done = await self.sdk.chat.completions.create(extra_headers=headers, **fields)
        except OpenAIError as error:
            raise DemoError(f"the gateway gave no reply: {error}") from error
        (choice,) = done.choices
        return Reply(choice.message.content or "", choice.finish_reason == "stop")


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
