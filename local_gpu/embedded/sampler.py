"""One version's sampler: streams from its engine; the half that learns scores for it.

Rule: weights never change after construction.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from local_gpu.embedded.engine import Engine, EngineSize
from local_gpu.parts import Ask, Facts, Score
from tinker_claw.types import Completion, SamplingParams, TokenChunk, TokenLogprobs, Tokens


class LocalSampler:
    """Implements `tinker_claw.policy.Sampler` on this machine."""

    def __init__(
        self,
        ref: str,
        module: Any,
        size: EngineSize,
        facts: Facts,
        score: Score,
        closed: Callable[[LocalSampler], None],
    ) -> None:
        self.ref = ref
        self._facts = facts
        self._score = score
        self._closed = closed
        self._engine = Engine(module, size)

    def stream(self, prompt: Tokens, params: SamplingParams) -> AsyncGenerator[TokenChunk]:
        return self._engine.stream(prompt, params)

    async def sample(self, prompt: Tokens, params: SamplingParams, n: int = 1) -> list[Completion]:
        return await self._engine.sample(prompt, params, n)

    async def logprobs(
        self,
        tokens: Tokens,
        *,
        start: int,
        targets: Sequence[Sequence[int]] | None = None,
        top_k: int = 0,
    ) -> TokenLogprobs:
        return await self._score(self.ref, Ask.of(self._facts, tokens, start, targets, top_k))

    async def aclose(self) -> None:
        self._closed(self)
        await self._engine.aclose()

    @property
    def held_requests(self) -> int:
        """Requests that hold cache or wait for it."""
        return self._engine.held_requests
