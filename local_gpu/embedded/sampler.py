"""One version's sampler: streams from its engine, scores with its own module.

Rule: weights never change after construction. Scoring runs in the trainer's thread and raises
rather than pads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import torch

from local_gpu.embedded.engine import Engine, EngineSize
from local_gpu.learning.head import hidden_rows, read_logprobs
from tinker_claw.errors import (
    AlignmentError,
    ContextLengthError,
    RequestError,
    SamplerError,
    same_length,
)
from tinker_claw.types import Completion, SamplingParams, TokenChunk, TokenLogprobs, Tokens

T = TypeVar("T")
Run = Callable[[Callable[[], T]], Awaitable[T]]
Score = Run[TokenLogprobs]
"""Runs torch work in the thread that all of it shares."""


class LocalSampler:
    """Implements `tinker_claw.policy.Sampler` on this machine."""

    def __init__(
        self,
        ref: str,
        module: Any,
        size: EngineSize,
        run: Score,
        closed: Callable[[LocalSampler], None],
    ) -> None:
        self.ref = ref
        self._module = module
        self._size = size
        self._run = run
        self._closed = closed
        self._engine = Engine(module, size)

    def stream(self, prompt: Tokens, params: SamplingParams) -> AsyncGenerator[TokenChunk]:
        return self._engine.stream(prompt, params)

    async def sample(self, prompt: Tokens, params: SamplingParams, n: int = 1) -> list[Completion]:
        """Draw n completions at once; with a seed, completion i is drawn with seed + i.

        The others start when the first has its first token, and share its prompt's blocks.
        """
        if n < 1:
            raise RequestError(f"n is {n}, not at least 1.", param="n")
        first = self.stream(prompt, params)
        others = [
            params if params.seed is None else replace(params, seed=params.seed + i)
            for i in range(1, n)
        ]
        async with aclosing(first):
            head = await anext(first)
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(_collect(first, params, head))]
                    tasks += [
                        group.create_task(_collect(self.stream(prompt, p), p)) for p in others
                    ]
            except BaseExceptionGroup as failures:
                raise _first_leaf(failures) from failures
        return [task.result() for task in tasks]

    async def logprobs(
        self,
        tokens: Tokens,
        *,
        start: int,
        targets: Sequence[Sequence[int]] | None = None,
        top_k: int = 0,
    ) -> TokenLogprobs:
        if not 1 <= start < len(tokens):
            raise AlignmentError(f"logprobs: start {start} outside 1..{len(tokens) - 1}")
        if len(tokens) > self._size.context_tokens:
            raise ContextLengthError(len(tokens), 0, self._size.context_tokens)
        wanted = [tuple(row) for row in targets] if targets is not None else []
        if targets is not None:
            same_length("logprobs", tail=tokens[start:], targets=wanted)
            if len({len(row) for row in wanted}) != 1:
                raise AlignmentError("logprobs: rows of targets differ in length")
        named = (*tokens, *(i for row in wanted for i in row))
        if min(named) < 0 or max(named) >= self._size.vocabulary:
            raise SamplerError(f"logprobs: an id lies outside 0..{self._size.vocabulary - 1}")
        return await self._run(lambda: self._score(tokens, start, wanted, top_k))

    async def aclose(self) -> None:
        self._closed(self)
        await self._engine.aclose()

    @property
    def held_requests(self) -> int:
        """Requests that hold cache or wait for it."""
        return self._engine.held_requests

    @torch.no_grad()
    def _score(
        self, tokens: Tokens, start: int, targets: Sequence[Sequence[int]], top_k: int
    ) -> TokenLogprobs:
        """In the torch thread: forward once, head over the loss rows only; float32, nats."""
        device = self._module.device
        sequence = torch.tensor(tokens, device=device)
        ids = sequence[start:, None]
        if targets:
            ids = torch.cat([ids, torch.tensor(targets, device=device)], dim=1)
        head = self._module.get_output_embeddings()
        k = min(top_k, self._size.vocabulary)
        read = read_logprobs(head, hidden_rows(self._module, sequence[:-1], start - 1), ids, k)
        if not bool(read.chosen.isfinite().all()):
            raise SamplerError("The model's logprobs are not finite.")
        rows: list[list[float]] = read.chosen.tolist()
        return TokenLogprobs(
            start=start,
            logprobs=tuple(row[0] for row in rows),
            targets=tuple(tuple(row[1:]) for row in rows) if targets else (),
            topk_ids=tuple(map(tuple, read.top_ids.tolist())) if top_k else (),
            topk_logprobs=tuple(map(tuple, read.top.tolist())) if top_k else (),
        )


async def _collect(
    stream: AsyncGenerator[TokenChunk], params: SamplingParams, *head: TokenChunk
) -> Completion:
    async with aclosing(stream):
        return Completion.collect([*head, *[chunk async for chunk in stream]], params)


def _first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    leaf = group.exceptions[0]
    return _first_leaf(leaf) if isinstance(leaf, BaseExceptionGroup) else leaf
