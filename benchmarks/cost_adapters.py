"""Adapters between the loop and the wire while costs are counted.

Rule: every request goes through and is billed; only its first token, or the judge's answer, is
changed here.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from benchmarks.tiny_server import VOCABULARY
from tinker_claw.judge.endpoints import Endpoint
from tinker_claw.judge.prompts import Schema
from tinker_claw.policy import Sampler
from tinker_claw.types import (
    Completion,
    Images,
    Message,
    SamplingParams,
    TokenChunk,
    TokenLogprobs,
    Tokens,
)

MARK = "elsewise"
"""A word in the next state of the turns that get a hint."""
HINTS = tuple(
    f"Answer in {n} short sentences, without a list, and name the file that you have read first; "
    "leave out the summary at the end, because the user reads the file himself anyway."
    for n in ("two", "three", "four")
)


class Fresh(Sampler):
    """A sampler whose requests share no prefix, so that no cache helps: ours and naive pay in full.

    Stop tokens are left out, too: a random model would stop at random.
    """

    _numbers = itertools.count()

    def __init__(self, inner: Sampler) -> None:
        self.ref = inner.ref
        self._inner = inner

    def _begin(self, tokens: Tokens) -> tuple[int, ...]:
        return (10 + next(self._numbers) % (VOCABULARY - 10), *tokens[1:])

    def stream(self, prompt: Tokens, params: SamplingParams) -> AsyncIterator[TokenChunk]:
        return self._inner.stream(self._begin(prompt), params)

    async def sample(self, prompt: Tokens, params: SamplingParams, n: int = 1) -> list[Completion]:
        return await self._inner.sample(self._begin(prompt), replace(params, stop_tokens=()), n)

    async def logprobs(
        self,
        tokens: Tokens,
        *,
        start: int,
        targets: Sequence[Sequence[int]] | None = None,
        top_k: int = 0,
        images: Images = (),
    ) -> TokenLogprobs:
        return await self._inner.logprobs(
            self._begin(tokens), start=start, targets=targets, top_k=top_k
        )

    async def aclose(self) -> None:
        await self._inner.aclose()


class Scripted(Endpoint):
    """Asks the real endpoint, which is billed, and answers by the marks in the case."""

    def __init__(self, inner: Endpoint) -> None:
        self._inner = inner

    async def answers(self, messages: Sequence[Message], n: int, schema: Schema) -> list[str]:
        await self._inner.answers(messages, n, schema)
        marked = MARK in messages[-1]["content"]
        told = {"quote": MARK, "hint": HINTS[0]} if marked else {}
        return [json.dumps({**told, "rating": -1 if marked else 1})] * n

    async def aclose(self) -> None: ...


class OneByOne(Endpoint):
    """Every vote is a request of its own, all at the same time."""

    def __init__(self, inner: Endpoint) -> None:
        self._inner = inner

    async def answers(self, messages: Sequence[Message], n: int, schema: Schema) -> list[str]:
        votes = await asyncio.gather(*(self._inner.answers(messages, 1, schema) for _ in range(n)))
        return [vote for (vote,) in votes]

    async def aclose(self) -> None: ...
