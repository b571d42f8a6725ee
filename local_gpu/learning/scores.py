"""Logprobs of given tokens, many sequences in one pass: teacher and current policy.

Rule: no gradients, no sampling, nothing padded; the rows that are asked for are the only ones that
the head computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from local_gpu.learning.head import read_logprobs
from local_gpu.learning.passes import Body, Budget
from local_gpu.packing import cut
from local_gpu.parts import Ask
from local_gpu.ranks.world import World
from tinker_claw.errors import ClawError, SamplerError
from tinker_claw.types import TokenLogprobs


class Scorer:
    """Scores under any module over the base that `body` computes."""

    def __init__(self, body: Body, budget: Budget, world: World) -> None:
        self._body = body
        self._budget = budget
        self._world = world

    @torch.no_grad()
    def score(self, module: Any, asks: Sequence[Ask]) -> list[TokenLogprobs]:
        """Each ask's answer, in order; ranks share the work.

        Raises:
            SamplerError: it failed on some rank.
        """
        sequences = [torch.tensor(ask.tokens[:-1]) for ask in asks]
        tokens = self._body.tokens_at_once(self._budget.tokens)
        parts = cut(sequences, ranks=self._world.size, tokens=tokens)
        failure: Exception | None = None
        mine: dict[int, TokenLogprobs] = {}

        def compute(indices: Sequence[int]) -> list[TokenLogprobs]:
            firsts = [asks[i].start - 1 for i in indices]
            rows = self._body.hidden(module, [sequences[i] for i in indices], firsts)
            head = module.get_output_embeddings()
            return [_read(head, r, asks[i]) for i, r in zip(indices, rows, strict=True)]

        try:
            mine = self._budget.run(
                parts[self._world.rank],
                compute,
                sequences=sequences,
                undo=_nothing,
                idle=lambda: self._body.idle(module, learn=False),
                most=max(map(len, parts)),
            )
        except (ClawError, RuntimeError, IndexError) as error:
            failure = error
        if told := self._world.agree(failure and (str(failure) or type(failure).__name__)):
            raise SamplerError(f"Scoring failed: {told}") from failure
        done = {i: scored for part in self._world.gather(mine) for i, scored in part.items()}
        return [done[i] for i in range(len(asks))]


def _read(head: Any, rows: torch.Tensor, ask: Ask) -> TokenLogprobs:
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


def _nothing() -> None:
    """A pass without gradients leaves nothing behind."""
