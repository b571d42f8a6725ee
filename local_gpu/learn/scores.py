"""Logprobs of given tokens, many sequences in one pass: teacher and current policy.

`score` computes; `ScoreQueue` batches the requests of many callers, so that few passes answer them
and shared prefixes are computed once.

Rule: no gradients, no sampling, nothing padded; the head computes only the rows that are asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from local_gpu.halves import ScoreAsk
from local_gpu.learn.head import read_logprobs
from local_gpu.learn.passes import Passes
from local_gpu.model.vision import BatchImages
from tinker_claw.errors import BackendError, ClawError, SamplerError, StepError
from tinker_claw.types import TokenLogprobs


@torch.no_grad()
def score(passes: Passes, module: Any, asks: Sequence[ScoreAsk]) -> list[TokenLogprobs]:
    """Score every ask under a module, in order; ranks share the work.

    Raises:
        SamplerError: it failed on some rank.
    """

    def compute(
        indices: Sequence[int], sequences: Sequence[torch.Tensor], pictures: BatchImages | None
    ) -> list[TokenLogprobs]:
        firsts = [asks[i].start - 1 for i in indices]
        rows = passes.body.hidden(module, sequences, firsts, pictures)
        head = module.get_output_embeddings()
        return [_read(head, r, asks[i]) for i, r in zip(indices, rows, strict=True)]

    inputs = [(torch.tensor(ask.tokens[:-1]), ask.images) for ask in asks]
    try:
        return passes.run(module, inputs, compute, undo=lambda: None)
    except StepError as error:
        raise SamplerError(f"Scoring failed: {error}") from error


def _read(head: Any, rows: torch.Tensor, ask: ScoreAsk) -> TokenLogprobs:
    """rows (M, hidden), one for each of `ask.tokens[ask.start:]`."""
    ids = torch.tensor(ask.tokens[ask.start :], device=rows.device)[:, None]
    if ask.targets is not None:
        ids = torch.cat([ids, torch.tensor(ask.targets, device=rows.device)], dim=1)
    read = read_logprobs(head, rows, ids, ask.top_k)
    if not bool(read.chosen.isfinite().all()):
        raise SamplerError("The model's logprobs are not finite.")
    values: list[list[float]] = read.chosen.tolist()
    return TokenLogprobs(
        start=ask.start,
        logprobs=tuple(row[0] for row in values),
        targets=() if ask.targets is None else tuple(tuple(row[1:]) for row in values),
        topk_ids=tuple(map(tuple, read.top_ids.tolist())) if ask.top_k else (),
        topk_logprobs=tuple(map(tuple, read.top.tolist())) if ask.top_k else (),
    )


ScoreAll = Callable[[str, Sequence[ScoreAsk]], Awaitable[list[TokenLogprobs]]]
_MOST_TOKENS = 500_000
"""Tokens per batch, before prefixes are shared: bounds how long a training step waits behind it."""


@dataclass(eq=False, slots=True)
class _Waiting:
    ref: str
    ask: ScoreAsk
    answer: TokenLogprobs | ClawError | None = None
    """None: not scored yet, or its pass was cancelled."""


class ScoreQueue:
    """Implements `local_gpu.halves.Score`.

    Requests that arrive during a pass are queued; the next pass takes all of them for the same
    weights, so no caller waits longer than alone. There is no task of its own: one of the waiting
    callers runs the pass for all.
    """

    def __init__(self, score_all: ScoreAll) -> None:
        self._score_all = score_all
        self._waiting: list[_Waiting] = []
        self._turn = asyncio.Lock()

    async def score(self, ref: str, ask: ScoreAsk) -> TokenLogprobs:
        """Score one sequence, together with others that wait for the same weights."""
        mine = _Waiting(ref, ask)
        self._waiting.append(mine)
        try:
            await asyncio.sleep(0)  # requests made at the same time are batched
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
        """Take this and other requests for its ref out of the queue, up to `_MOST_TOKENS`."""
        batch, tokens = [mine], len(mine.ask.tokens)
        for other in self._waiting:
            if other is not mine and other.ref == mine.ref:
                tokens += len(other.ask.tokens)
                if tokens > _MOST_TOKENS:
                    break
                batch.append(other)
        self._waiting = [w for w in self._waiting if w not in batch]
        return batch

    async def _answer(self, batch: Sequence[_Waiting]) -> None:
        """Score a batch and answer all who wait for it.

        If this task is cancelled, the others score their own. If scoring fails, each half is scored
        alone, so that only a sequence that cannot be scored fails.
        """
        try:
            scores = await self._score_all(batch[0].ref, [waiting.ask for waiting in batch])
        except ClawError as error:
            if isinstance(error, SamplerError) and (half := len(batch) // 2):
                await self._answer(batch[:half])
                await self._answer(batch[half:])
                return
            for waiting in batch:
                waiting.answer = error
        else:
            for waiting, score in zip(batch, scores, strict=True):
                waiting.answer = score
