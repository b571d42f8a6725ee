"""Draw next tokens from rows of logits, each row by its own rules.

Rule: a token's logprob is that of the distribution it was drawn from, which is what an importance
ratio needs; only argmax (temperature 0) reports the untempered one. No global random generator:
each row brings one uniform number from a generator of its own request.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from tinker_claw.types import SamplingParams, StopReason, TokenChunk

_Table = list[list[float]]


class Recipe(NamedTuple):
    """Rules by which one row is drawn."""

    temperature: float
    """0 means argmax."""
    top_p: float
    top_k: int | None
    uniform: float
    """Uniform random number in [0, 1): where in the cumulative distribution the token lies."""
    student_topk: int
    """Number of top-k logprobs to report, at temperature 1, unfiltered."""


class Drawn(NamedTuple):
    token: int
    logprob: float
    """Nats."""
    topk_ids: tuple[int, ...]
    topk_logprobs: tuple[float, ...]


class Draws:
    """The draws of one completion."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._random = Random(params.seed)
        """Seeded by the request; without a seed, by the operating system."""
        self._count = 0

    def recipe(self) -> Recipe:
        p = self._params
        return Recipe(p.temperature, p.top_p, p.top_k, self._random.random(), p.student_topk)

    def chunk(self, drawn: Drawn, *, cached_tokens: int = 0) -> TokenChunk:
        """Count a token and wrap it; the last one also has `cached_tokens`, of the prompt."""
        self._count += 1
        ended = drawn.token in self._params.stop_tokens
        full = self._count == self._params.max_tokens
        stop = StopReason.STOP if ended else StopReason.LENGTH if full else None
        has_topk = self._params.student_topk > 0
        return TokenChunk(
            tokens=(drawn.token,),
            logprobs=(drawn.logprob,),
            topk_ids=(drawn.topk_ids,) if has_topk else (),
            topk_logprobs=(drawn.topk_logprobs,) if has_topk else (),
            stop_reason=stop,
            cached_tokens=cached_tokens if stop else 0,
        )


def draw(logits: Tensor, recipes: Sequence[Recipe]) -> list[Drawn | None]:
    """Draw one token per row of logits [R, V], float32; None for a row that is not finite.

    Inverse transform: the first v whose cumulative probability exceeds the row's uniform number,
    under p = softmax(logits / temperature), restricted to top_k and top_p and renormalised.
    """
    finite = logits.isfinite().all(-1)
    logits = logits.masked_fill(~finite[:, None], 0.0)
    raw = logits.log_softmax(-1)
    shaped = _shape(logits, raw, recipes)
    tokens = _invert(shaped, [recipe.uniform for recipe in recipes])
    greedy = [i for i, recipe in enumerate(recipes) if recipe.temperature == 0]
    if greedy:
        tokens[greedy] = logits[greedy].argmax(-1)
    chosen: list[float] = shaped.gather(1, tokens[:, None])[:, 0].tolist()
    top = raw.topk(min(max(r.student_topk for r in recipes), raw.shape[-1]))
    ids: list[list[int]] = top.indices.tolist()
    values: _Table = top.values.tolist()
    rows = zip(recipes, tokens.tolist(), chosen, ids, values, strict=True)
    drawn = [
        Drawn(token, logprob, tuple(i[: r.student_topk]), tuple(v[: r.student_topk]))
        for r, token, logprob, i, v in rows
    ]
    return [d if ok else None for d, ok in zip(drawn, finite.tolist(), strict=True)]


def _shape(logits: Tensor, raw: Tensor, recipes: Sequence[Recipe]) -> Tensor:
    """The logprobs that each row is drawn from, [R, V]."""
    if all(r.temperature in (0, 1) and r.top_p == 1 and r.top_k is None for r in recipes):
        return raw
    temperatures = torch.tensor([r.temperature or 1.0 for r in recipes], device=logits.device)
    shaped = (logits / temperatures[:, None]).log_softmax(-1)
    for row, recipe in enumerate(recipes):
        if recipe.temperature == 0:
            continue
        if recipe.top_k is not None:
            shaped[row] = _likeliest(shaped[row], recipe.top_k)
        if recipe.top_p < 1:
            shaped[row] = _nucleus(shaped[row], recipe.top_p)
    return shaped


def _likeliest(logprobs: Tensor, top_k: int) -> Tensor:
    """Keep the k likeliest of [V], renormalised; ties with the k-th stay."""
    least = logprobs.topk(min(top_k, logprobs.shape[-1])).values[-1]
    return logprobs.masked_fill(logprobs < least, float("-inf")).log_softmax(-1)


def _nucleus(logprobs: Tensor, top_p: float) -> Tensor:
    """Keep the fewest of [V] whose probabilities reach top_p, renormalised; at least one."""
    values, order = logprobs.sort(descending=True)
    before = values.exp().cumsum(-1) - values.exp()
    dropped = order[before >= top_p]
    return logprobs.index_fill(0, dropped, float("-inf")).log_softmax(-1)


def _invert(logprobs: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Cumulative inversion in float64: [R, V] and R numbers in [0, 1) -> [R] ids."""
    cumulative = logprobs.double().exp().cumsum(-1)
    points = torch.tensor(uniforms, dtype=torch.float64, device=logprobs.device)[:, None]
    ids = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)
    return ids[:, 0].clamp(max=logprobs.shape[-1] - 1)
