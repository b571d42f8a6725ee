"""The sampling engine of one version: starts with its first request, restarts when it has died.

Rule: immutable weights. An engine never sees another version's tensors, so a request keeps its own
version's logprobs whatever is published meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Any

from local_gpu.embedded.batching import Batcher, salted_id
from local_gpu.embedded.jobs import Feed, Job
from local_gpu.model import BaseModel
from local_gpu.together import together
from tinker_claw.errors import ConfigError, ContextLengthError, RequestError, SamplerError
from tinker_claw.types import Completion, SamplingParams, TokenChunk, Tokens


@dataclass(frozen=True, slots=True)
class EngineSize:
    vocabulary: int
    context_tokens: int
    """Prompt and reply together; never more than the cache holds."""
    kv_cache_tokens: int
    max_batch_tokens: int
    """Tokens per forward pass: how long a long prompt holds up other requests' tokens."""

    @classmethod
    def fit(
        cls,
        base: BaseModel,
        *,
        context_tokens: int | None,
        kv_cache_tokens: int | None,
        max_batch_tokens: int,
    ) -> EngineSize:
        """None: the model's own context, and a cache of one and a half contexts.

        Raises:
            ConfigError: this sampler would compute the model wrongly.
        """
        if base.obstacle is not None:
            raise ConfigError(
                f"The sampler in this process cannot serve {base.source!r}, which {base.obstacle}. "
                "It learns and is scored here all the same, while vLLM samples it: run.py with "
                "--sampler-urls http://HOST:PORT."
            )
        context = min(base.context_tokens, context_tokens or base.context_tokens)
        cache = kv_cache_tokens or context * 3 // 2
        return cls(base.vocabulary, min(context, cache), cache, max_batch_tokens)


@dataclass(frozen=True, slots=True)
class _Running:
    batcher: Batcher
    feed: Feed


class Engine:
    """Samples from one module."""

    def __init__(self, module: Any, size: EngineSize) -> None:
        self._module = module
        self._size = size
        self._ids = count()
        self._running: _Running | None = None
        self._retired = False

    async def stream(self, prompt: Tokens, params: SamplingParams) -> AsyncGenerator[TokenChunk]:
        """Yield a chunk per token; closing the generator frees the request.

        Raises:
            RequestError: the request cannot be served as asked.
            SamplerError: the generation failed.
        """
        self._check(prompt, params)
        running = self._start()
        request_id = salted_id(next(self._ids), params.cache_salt)
        job = Job(prompt, params, Random(params.seed))
        # Entered before it is submitted: if the thread dies in between, `on_exit` still fails it.
        running.feed.enter(request_id, job)
        try:
            running.batcher.submit(request_id, prompt, params.max_tokens, params.stop_tokens)
            while not (job.done and job.events.empty()):
                event = await job.events.get()
                if isinstance(event, SamplerError):
                    raise event
                yield event
        finally:
            running.feed.leave(request_id)
            if self._retired and running is self._running and len(running.feed) == 0:
                await self._stop()

    async def sample(self, prompt: Tokens, params: SamplingParams, n: int) -> list[Completion]:
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
            return await together(
                [
                    _collect(first, params, head),
                    *(_collect(self.stream(prompt, p), p) for p in others),
                ]
            )

    async def aclose(self) -> None:
        """End the thread when its requests have ended.

        A request that comes later still, from a reader of the holder just before a swap, is served
        all the same: it starts the thread again, which then ends with it.
        """
        self._retired = True
        await self._stop()

    @property
    def held_requests(self) -> int:
        """Requests that hold any of the cache or wait for it."""
        return self._running.batcher.held_requests if self._running else 0

    def _start(self) -> _Running:
        if self._running is None or not self._running.batcher.accepts:
            self._running = _run(self._module, self._size)
        return self._running

    async def _stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await asyncio.to_thread(running.batcher.drain)

    def _check(self, prompt: Tokens, params: SamplingParams) -> None:
        p = params
        rules = (
            ("messages", len(prompt) >= 1, "The prompt is empty; it needs at least one token."),
            ("max_tokens", p.max_tokens >= 1, f"max_tokens is {p.max_tokens}, not at least 1."),
            ("temperature", p.temperature >= 0, f"temperature is {p.temperature:g}, below 0."),
            ("top_p", 0 < p.top_p <= 1, f"top_p is {p.top_p:g}, not in (0, 1]."),
            ("top_k", p.top_k is None or p.top_k >= 1, f"top_k is {p.top_k}, not at least 1."),
        )
        for name, kept, sentence in rules:
            if not kept:
                raise RequestError(sentence, param=name)
        if len(prompt) + p.max_tokens > self._size.context_tokens:
            raise ContextLengthError(len(prompt), p.max_tokens, self._size.context_tokens)
        if min(prompt) < 0 or max(prompt) >= self._size.vocabulary:
            raise SamplerError(
                f"The prompt has a token outside 0..{self._size.vocabulary - 1}: another model's "
                "tokenizer made it."
            )


def _run(module: Any, size: EngineSize) -> _Running:
    batcher = Batcher(
        module, kv_cache_tokens=size.kv_cache_tokens, max_batch_tokens=size.max_batch_tokens
    )
    feed = Feed(batcher.cancel_request)
    batcher.start_with(feed)
    return _Running(batcher, feed)


async def _collect(
    stream: AsyncGenerator[TokenChunk], params: SamplingParams, *head: TokenChunk
) -> Completion:
    async with aclosing(stream):
        return Completion.collect([*head, *[chunk async for chunk in stream]], params)
