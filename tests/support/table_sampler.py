"""A table that samples and scores: token by token, each drawn after the one before it.

Rule: the table is never written to, so a sampler needs nothing of its trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from random import Random

from tests.support.table_math import Array, draw, likeliest, log_softmax
from tinker_claw.errors import (
    AlignmentError,
    ContextLengthError,
    RequestError,
    SamplerError,
    same_length,
)
from tinker_claw.types import (
    Completion,
    Images,
    SamplingParams,
    StopReason,
    TokenChunk,
    TokenLogprobs,
    Tokens,
)


class TableSampler:
    """Implements `tinker_claw.policy.Sampler` over a table that nobody writes to."""

    def __init__(self, ref: str, logits: Array, context_tokens: int) -> None:
        self.ref = ref
        self._logits = logits
        self._logprobs = log_softmax(logits)
        self._context_tokens = context_tokens
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def stream(self, prompt: Tokens, params: SamplingParams) -> AsyncGenerator[TokenChunk]:
        self._check(prompt, params)
        self._in_flight += 1
        self._idle.clear()
        random, previous = Random(params.seed), prompt[-1]
        try:
            for left in reversed(range(params.max_tokens)):
                await asyncio.sleep(0)
                token, logprob = draw(self._logits[previous], params, random.random())
                ids, logprobs = likeliest(self._logprobs[previous], params.student_topk)
                stopped = StopReason.STOP if token in params.stop_tokens else None
                reason = stopped or (None if left else StopReason.LENGTH)
                near = ((ids,), (logprobs,)) if ids else ((), ())
                yield TokenChunk((token,), (logprob,), *near, stop_reason=reason)
                if reason is not None:
                    return
                previous = token
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def sample(self, prompt: Tokens, params: SamplingParams, n: int = 1) -> list[Completion]:
        """Sample n completions. With a seed, completion i is drawn with seed + i."""
        if n < 1:
            raise RequestError(f"n is {n}, not at least 1.", param="n")
        drawn: list[Completion] = []
        for i in range(n):
            own = params if params.seed is None else replace(params, seed=params.seed + i)
            async with aclosing(self.stream(prompt, own)) as stream:
                drawn.append(Completion.collect([chunk async for chunk in stream], params))
        return drawn

    async def logprobs(
        self,
        tokens: Tokens,
        *,
        start: int,
        targets: Sequence[Sequence[int]] | None = None,
        top_k: int = 0,
        images: Images = (),
    ) -> TokenLogprobs:
        if not 1 <= start < len(tokens):
            raise AlignmentError(f"logprobs: start {start} outside 1..{len(tokens) - 1}")
        if len(tokens) > self._context_tokens:
            raise ContextLengthError(len(tokens), 0, self._context_tokens)
        if targets is not None:
            same_length("logprobs", tail=tokens[start:], targets=targets)
            if len({len(row) for row in targets}) != 1:
                raise AlignmentError("logprobs: rows of targets differ in length")
        self._check_ids((*tokens, *(i for row in targets or () for i in row)))
        rows = self._logprobs[list(tokens[start - 1 : -1])]
        named = [] if targets is None else list(zip(rows, targets, strict=True))
        near = [likeliest(row, top_k) for row in rows] if top_k else []
        return TokenLogprobs(
            start=start,
            logprobs=tuple(float(r[t]) for r, t in zip(rows, tokens[start:], strict=True)),
            targets=tuple(tuple(row[list(ids)].tolist()) for row, ids in named),
            topk_ids=tuple(ids for ids, _ in near),
            topk_logprobs=tuple(logprobs for _, logprobs in near),
        )

    async def aclose(self) -> None:
        """Wait for the streams that have begun; one that comes later is served all the same."""
        await self._idle.wait()

    def _check(self, prompt: Tokens, params: SamplingParams) -> None:
        fits = {
            "messages": len(prompt) >= 1,
            "max_tokens": params.max_tokens >= 1,
            "temperature": params.temperature >= 0,
            "top_p": 0 < params.top_p <= 1,
            "top_k": params.top_k is None or params.top_k >= 1,
        }
        for name, fine in fits.items():
            if not fine:
                raise RequestError(f"{name} is out of range.", param=name)
        if len(prompt) + params.max_tokens > self._context_tokens:
            raise ContextLengthError(len(prompt), params.max_tokens, self._context_tokens)
        self._check_ids(prompt)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if min(ids) < 0 or max(ids) >= len(self._logits):
            raise SamplerError(f"There is a token outside 0..{len(self._logits) - 1}.")
