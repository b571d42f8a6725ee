"""Many callers that each want one sequence scored, answered by few passes over many.

While a pass runs, whoever asks waits; the next pass takes all that wait for the same weights. So
prefixes that their sequences share are computed once, and nobody waits longer than he would alone.

Rule: no task of its own: one of those who wait does the work for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from local_gpu.parts import Ask
from tinker_claw.errors import BackendError, ClawError, SamplerError
from tinker_claw.types import TokenLogprobs

ScoreAll = Callable[[str, Sequence[Ask]], Awaitable[list[TokenLogprobs]]]
_MOST_TOKENS = 500_000
"""Of one turn, counted before sharing: it bounds how long a training step waits behind it."""


@dataclass(eq=False, slots=True)
class _Waiting:
    ref: str
    ask: Ask
    answer: TokenLogprobs | ClawError | None = None
    """None: not asked yet, or its pass was called off."""


class ScoreQueue:
    """Implements `local_gpu.parts.Score`."""

    def __init__(self, score_all: ScoreAll) -> None:
        self._score_all = score_all
        self._waiting: list[_Waiting] = []
        self._turn = asyncio.Lock()

    async def score(self, ref: str, ask: Ask) -> TokenLogprobs:
        """Score one sequence, together with what others want under the same weights."""
        mine = _Waiting(ref, ask)
        self._waiting.append(mine)
        try:
            async with self._turn:
                if mine.answer is None:
                    await self._answer(self._take(mine))
        finally:
            self._waiting = [waiting for waiting in self._waiting if waiting is not mine]
        if isinstance(mine.answer, ClawError):
            raise mine.answer
        if mine.answer is None:
            raise BackendError("Scoring gave no answer.")
        return mine.answer

    def _take(self, mine: _Waiting) -> list[_Waiting]:
        """Mine and others of its ref, as many as a turn may have, out of the queue."""
        taken, tokens = [mine], len(mine.ask.tokens)
        for other in self._waiting:
            if other is not mine and other.ref == mine.ref:
                tokens += len(other.ask.tokens)
                if tokens > _MOST_TOKENS:
                    break
                taken.append(other)
        self._waiting = [w for w in self._waiting if w not in taken]
        return taken

    async def _answer(self, taken: Sequence[_Waiting]) -> None:
        """Where it is called off, the others ask for themselves.

        Where it fails, halves are asked about, so that one that cannot be scored fails alone.
        """
        try:
            scores = await self._score_all(taken[0].ref, [waiting.ask for waiting in taken])
        except ClawError as error:
            if isinstance(error, SamplerError) and (half := len(taken) // 2):
                await self._answer(taken[:half])
                await self._answer(taken[half:])
                return
            for waiting in taken:
                waiting.answer = error
        else:
            for waiting, score in zip(taken, scores, strict=True):
                waiting.answer = score
