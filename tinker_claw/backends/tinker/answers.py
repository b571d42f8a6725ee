"""The service's answers to a sampler, as our records. Nothing is padded, cut or made up."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from tinker import types as sdk
from tinker.types.topk_logprobs import TopkLogprobs

from tinker_claw.errors import SamplerError
from tinker_claw.types import Completion, SamplingParams, StopReason

_EMPTY_CELL: Final = -99999.0
"""What the wire has where there are fewer candidates than were asked for."""


def completion(sequence: sdk.SampledSequence, params: SamplingParams, cached: int) -> Completion:
    if sequence.tokens_np is None or sequence.logprobs_np is None:
        raise SamplerError("Tinker gave no tokens with their logprobs.")
    if not bool(np.isfinite(sequence.logprobs_np).all()):
        raise SamplerError("Tinker gave a logprob that is not finite.")
    tokens: list[int] = sequence.tokens_np.tolist()
    k = params.student_topk
    ids, best = candidates(sequence.topk_logprobs_np, len(tokens), k) if k and tokens else ((), ())
    return Completion(
        tokens=tuple(tokens),
        logprobs=tuple(sequence.logprobs_np.tolist()),
        topk_ids=ids,
        topk_logprobs=best,
        stop_reason=StopReason(sequence.stop_reason),
        params=params,
        cached_tokens=cached,
    )


def candidates(
    found: TopkLogprobs | None, rows: int, k: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]:
    """The last `rows` rows of a top-k table, whole."""
    if found is None or found.token_ids.shape[0] < rows or found.token_ids.shape[1] != k:
        raise SamplerError(f"Tinker gave no {k} candidates for each of {rows} positions.")
    ids, best = found.token_ids[-rows:], found.logprobs[-rows:]
    if not bool((best > _EMPTY_CELL).all()):  # NaN is no candidate either
        raise SamplerError(f"Tinker gave fewer than {k} candidates for a position.")
    return tuple(map(tuple, ids.tolist())), tuple(map(tuple, best.tolist()))


def named(found: sdk.TensorData | None, rows: int, k: int) -> Any:
    """The scores [rows, k] of the ids that were named, whichever layout they come in."""
    # Values only, in order: rows before the named ones are listed by the dense layout alone.
    values = np.asarray(() if found is None else found.data)
    if len(values) < rows * k or len(values) % k:
        raise SamplerError("Tinker did not score the ids that were asked for.")
    scores = values.reshape(-1, k)[-rows:]
    if bool(np.isnan(scores).any()):
        raise SamplerError("Tinker left a score of the ids that were asked for out.")
    return scores


def tail(values: Any, length: int, rows: int, what: str) -> Any:
    """The last `rows` of `length` values, all of them numbers."""
    if values is None or len(values) != length:
        raise SamplerError(f"Tinker gave no {what} for {length} tokens.")
    tail = values[length - rows :]
    if bool(np.isnan(tail).any()):
        raise SamplerError(f"Tinker left {what} out.")
    return tail
