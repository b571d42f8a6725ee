"""Convert our compact datums to the SDK's shifted arrays, and its answers to our rows.

A datum of ours has tokens [L] and loss rows for `tokens[start:]`, M = L - start. Tinker's has the
model's input `tokens[:-1]` and arrays over the N = L - 1 predictions, of which the last M are ours;
the rows before carry weight 0.

Rule: nothing is cut, padded to fit or made up. Rows of prompt tokens are zeros because their weight
is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinker import types as sdk
from tinker.types.topk_logprobs import TopkLogprobs

from tinker_claw.errors import AlignmentError, SamplerError, StepError
from tinker_claw.types import (
    Completion,
    Datum,
    LossPass,
    PlacedImage,
    SamplingParams,
    StopReason,
    Tokens,
)

Array = NDArray[Any]
_ARRAYS = {
    "ppo": ("logprobs", "advantages"),
    "importance_sampling": ("logprobs", "advantages"),
    "cross_entropy": ("weights",),
}
_EMPTY_CELL = -99999.0
"""Padding value on the wire where there are fewer candidates than were asked for."""


def model_input(tokens: Tokens, images: Sequence[PlacedImage]) -> sdk.ModelInput:
    """A prompt as chunks of text and images; the service expands each image itself, and refuses it
    where it counts other tokens than are expected."""
    chunks, done = list[sdk.ModelInputChunk](), 0
    for image in images:
        chunks.append(sdk.EncodedTextChunk(tokens=list(tokens[done : image.at])))
        chunks.append(
            sdk.ImageChunk(data=image.data, format=image.format, expected_tokens=image.tokens)
        )
        done = image.at + image.tokens
    chunks.append(sdk.EncodedTextChunk(tokens=list(tokens[done:])))
    return sdk.ModelInput(chunks=[chunk for chunk in chunks if chunk.length])


def to_sdk(loss_pass: LossPass, *, sparse: bool) -> list[sdk.Datum]:
    """The datums of a pass in Tinker's layout; `sparse`: 2-D arrays go as CSR.

    Raises:
        StepError, AlignmentError, ValueError: a datum does not fit its loss. Nothing was sent.
    """
    if not loss_pass.datums:
        raise StepError(f"The {loss_pass.loss} pass has no datums.")
    wanted = _ARRAYS.get(loss_pass.loss)
    if wanted is None:
        raise StepError(f"Unknown loss {loss_pass.loss!r}; there are {', '.join(_ARRAYS)}.")
    for datum in loss_pass.datums:
        for name in wanted:
            if not getattr(datum, name):
                raise StepError(f"loss {loss_pass.loss}: the datum has no {name}.")
    table = partial(_cross_entropy, sparse=sparse)
    convert = table if loss_pass.loss == "cross_entropy" else _reinforcement
    return list(map(convert, loss_pass.datums))


def rows_of(datum: Datum, logprobs: sdk.TensorData) -> tuple[float, ...]:
    """The trainer's logprobs of `tokens[start:]` out of an answer over all N predictions.

    Raises:
        AlignmentError: the answer has another shape than what was sent.
    """
    table, rows = logprobs.to_numpy(), len(datum.tokens) - 1
    width = 1 + len(datum.targets[0]) if datum.targets else 1
    if table.shape[:1] != (rows,) or table.size != rows * width:
        raise AlignmentError(
            f"Tinker gave logprobs of shape {list(table.shape)} for {rows} tokens with {width} "
            "targets each."
        )
    table = table.reshape(rows, width)
    # The sampled token is the first candidate of every row (see `_cross_entropy`).
    return tuple(table[datum.start - 1 :, 0].tolist())


def loss_of(output: sdk.ForwardBackwardOutput) -> float:
    """Return the summed loss of an answer, which SkyRL gives by token alone.

    Raises:
        KeyError: the answer has neither.
    """
    if (loss := output.metrics.get("loss:sum")) is not None:
        return float(loss)
    by_token = [arrays["elementwise_loss"] for arrays in output.loss_fn_outputs]
    return sum(float(losses.to_numpy().sum()) for losses in by_token)


def _reinforcement(datum: Datum) -> sdk.Datum:
    return _datum(
        datum,
        {
            "target_tokens": np.asarray(datum.tokens[1:], dtype=np.int64),
            "logprobs": _tail(datum, datum.logprobs),
            "advantages": _tail(datum, datum.advantages),
        },
    )


def _cross_entropy(datum: Datum, *, sparse: bool) -> sdk.Datum:
    """Without targets of its own a datum is scored at its sampled tokens, K = 1.

    With targets [M, K] the sampled token goes in front of every row, with weight 0: it changes no
    gradient and costs nothing, and the trainer's logprob of it comes back.
    """
    sampled = np.asarray(datum.tokens[1:], dtype=np.int64)
    if not datum.targets:
        return _datum(
            datum,
            {"target_tokens": sampled, "weights": _tail(datum, np.squeeze(datum.weights, 1))},
        )
    rows = len(datum.targets)
    own = sampled[-rows:, None]
    targets = np.concatenate([own, np.asarray(datum.targets, np.int64)], axis=1)
    weights = np.pad(np.asarray(datum.weights, np.float32), ((0, 0), (1, 0)))
    if targets.shape != weights.shape:
        raise AlignmentError(
            f"cross_entropy: targets {targets.shape} and weights {weights.shape} differ in shape"
        )
    if sparse and datum.start > 1:
        return _datum(
            datum,
            {
                "target_tokens": csr(targets, before=datum.start - 1),
                "weights": csr(weights, before=datum.start - 1),
            },
        )
    ids = np.repeat(sampled[:, None], targets.shape[1], axis=1)
    ids[-rows:] = targets
    return _datum(datum, {"target_tokens": ids, "weights": _under_zeros(weights, datum.start - 1)})


def csr(tail: Array, *, before: int) -> sdk.TensorData:
    """`tail` [M, K] under `before` rows without entries, as compressed sparse rows."""
    rows, width = tail.shape
    return sdk.TensorData(
        data=np.ascontiguousarray(tail).reshape(-1),
        dtype="int64" if tail.dtype == np.int64 else "float32",
        shape=[before + rows, width],
        sparse_crow_indices=[0] * before + [i * width for i in range(rows + 1)],
        sparse_col_indices=list(range(width)) * rows,
    )


def named_ids(tail: Array, *, before: int, sparse: bool) -> sdk.TensorData:
    """The ids [M, K] to score at the end of a prompt, under `before` positions without any."""
    if sparse and before:
        return csr(tail, before=before)
    unnamed = np.full((before, tail.shape[1]), -1, dtype=np.int64)
    return sdk.TensorData.from_numpy(np.concatenate([unnamed, tail]))


def _datum(datum: Datum, arrays: dict[str, Any]) -> sdk.Datum:
    inputs = model_input(datum.tokens[:-1], datum.images)
    return sdk.Datum(model_input=inputs, loss_fn_inputs=arrays)


def _tail(datum: Datum, values: Sequence[float] | Array) -> Array:
    """[N] float32: zeros for the prompt, then the loss rows."""
    return _under_zeros(np.asarray(values, dtype=np.float32), datum.start - 1)


def _under_zeros(tail: Array, before: int) -> Array:
    return np.concatenate([np.zeros((before, *tail.shape[1:]), tail.dtype), tail])


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
    table: TopkLogprobs | None, rows: int, k: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]:
    """The last `rows` rows of a top-k table, whole."""
    if table is None or table.token_ids.shape[0] < rows or table.token_ids.shape[1] != k:
        raise SamplerError(f"Tinker gave no {k} candidates for each of {rows} positions.")
    ids, best = table.token_ids[-rows:], table.logprobs[-rows:]
    if not bool((best > _EMPTY_CELL).all()):  # NaN is no candidate either
        raise SamplerError(f"Tinker gave fewer than {k} candidates for a position.")
    return tuple(map(tuple, ids.tolist())), tuple(map(tuple, best.tolist()))


def named(data: sdk.TensorData | None, rows: int, k: int) -> Any:
    """The scores [rows, k] of the ids that were named, whichever layout they come in."""
    # Values only, in order: rows before the named ones are listed by the dense layout alone.
    values = np.asarray(() if data is None else data.data)
    if len(values) < rows * k or len(values) % k:
        raise SamplerError("Tinker did not score the ids that were asked for.")
    scores = values.reshape(-1, k)[-rows:]
    if bool(np.isnan(scores).any()):
        raise SamplerError("Tinker left out a score of the ids that were asked for.")
    return scores


def tail(values: Any, length: int, rows: int, what: str) -> Any:
    """The last `rows` of `length` values, all of them numbers."""
    if values is None or len(values) != length:
        raise SamplerError(f"Tinker gave no {what} for {length} tokens.")
    tail = values[length - rows :]
    if bool(np.isnan(tail).any()):
        raise SamplerError(f"Tinker left out {what}.")
    return tail
