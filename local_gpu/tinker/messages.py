"""Bodies of Tinker's requests and answers: the SDK's own types and protobuf, to and from records.

Rule: a field that would change the result and is not served is refused by name, and so is a wrong
value; nothing is padded or cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import _tensor_data_to_proto  # pyright: ignore[reportPrivateUsage]
from tinker.proto.response_conv import (
    _tensor_data_from_proto,  # pyright: ignore[reportPrivateUsage]
)

from local_gpu.halves import Facts
from local_gpu.learn.losses import Loss, LossInputs, LossRecord, Scored, loss_named
from local_gpu.model.vision import Vision
from tinker_claw.errors import AlignmentError, RequestError, StepError
from tinker_claw.types import Completion, Images, PlacedImage, StopReason, TokenLogprobs

Array = NDArray[Any]
B = TypeVar("B", bound=BaseModel)

MOST_NUMBERS: Final = 1 << 22
"""Most numbers in the arrays of one request, and most logprobs that one may ask for: of its prompt,
or of its replies at their longest."""
_NOT_SCORED: Final = -99999.0
"""The logprob that the SDK reads as none in a top-k table."""
_CLIP: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Tinker's own defaults (its documentation), which are not this project's."""


def checked(kind: type[B], body: object) -> B:
    """Check a JSON body. Raises RequestError that names the first wrong field."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise RequestError(f"{field}: {first['msg']}.") from error


def refuse(**fields: object) -> None:
    """Raise RequestError that names a field with a value, none of which is served."""
    for name, value in fields.items():
        if value:
            raise RequestError(f"{name} is {value!r}, which is not served here: leave it out.")


def records_of(
    message: pb.ForwardBackwardRequest, facts: Facts, vision: Vision | None
) -> list[LossRecord]:
    """Check a request and convert it.

    Args:
        vision: counts the tokens of images; None: there may be none.

    Raises:
        StepError, AlignmentError, RequestError: naming what is wrong.
    """
    loss = loss_named(message.loss_fn)
    config = dict(_CLIP) if loss.name == "ppo" else {}
    for key, value in message.loss_fn_config_v2.items():
        refuse(**{key: value.text})
        config[key] = value.number
    config = loss.config(config)
    if not message.data:
        raise StepError("The request has no datums.")
    tensors = (tensor for datum in message.data for tensor in datum.loss_fn_inputs.values())
    if (numbers := sum(math.prod(tensor.shape) for tensor in tensors)) > MOST_NUMBERS:
        raise StepError(
            f"The arrays have {numbers} numbers, and one request may have {MOST_NUMBERS}: send "
            "fewer datums or candidates."
        )
    records: list[LossRecord] = []
    for number, datum in enumerate(message.data):
        try:
            records.append(_record(loss, config, datum, facts, vision))
        except (StepError, AlignmentError, RequestError) as error:
            raise type(error)(f"datum {number}: {error}") from error
    return records


def _record(
    loss: Loss, config: Mapping[str, float], datum: pb.Datum, facts: Facts, vision: Vision | None
) -> LossRecord:
    pieces = [
        np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()
        if chunk.HasField("encoded_text")
        else chunk.image
        for chunk in datum.model_input
    ]
    tokens, images = tokens_of(pieces, vision)
    inputs = np.array(tokens, np.int64)
    arrays = _arrays(loss, datum, inputs, facts)
    ids = arrays["target_tokens"]
    signal = arrays["weights" if loss.by_candidate else "advantages"]
    learning = np.flatnonzero(signal.reshape(len(ids), -1).any(axis=1))
    first = min(learning.tolist(), default=len(ids))
    tails = {key: torch.from_numpy(rows[first:]) for key, rows in arrays.items()}
    return LossRecord(
        loss,
        config,
        inputs=torch.from_numpy(inputs),
        ids=torch.from_numpy(ids.reshape(len(ids), -1)),
        learns_from=first,
        inputs_of_loss=LossInputs(*map(tails.get, ("logprobs", "advantages", "weights"))),
        images=images,
    )


def _arrays(loss: Loss, datum: pb.Datum, inputs: Array, facts: Facts) -> dict[str, Array]:
    """Return the checked arrays of a datum; those of cross_entropy as (N, K)."""
    tensors, wanted = datum.loss_fn_inputs, {"target_tokens", *loss.arrays}
    if set(tensors) != wanted:
        raise StepError(f"loss {loss.name} takes {sorted(wanted)}, not {sorted(tensors)}.")
    arrays = {k: _tensor_data_from_proto(tensor).to_numpy() for k, tensor in tensors.items()}
    ids = arrays["target_tokens"]
    shape = ids.shape if loss.by_candidate else inputs.shape
    for key, rows in arrays.items():
        if rows.shape != shape or shape[:1] != inputs.shape:
            raise AlignmentError(
                f"{key} has shape {rows.shape}, beside {len(inputs)} input tokens and "
                f"target_tokens {ids.shape}."
            )
    for key, rows in (("model_input", inputs), ("target_tokens", ids)):
        if not rows.size or int(rows.min()) < 0 or int(rows.max()) >= facts.vocabulary:
            raise StepError(f"{key} has an id outside 0..{facts.vocabulary - 1}, or none.")
    if len(inputs) > facts.context_tokens:
        raise StepError(f"it has {len(inputs)} tokens, and the context has {facts.context_tokens}.")
    if not loss.by_candidate:
        return arrays
    return {name: array.reshape(len(ids), -1) for name, array in arrays.items()}


def tokens_of(pieces: Sequence[Any], vision: Vision | None) -> tuple[list[int], Images]:
    """Return the tokens of texts and images, with placeholders for the images, and the images.

    Args:
        pieces: lists of tokens, and messages with an image's data.
        vision: counts the tokens of images; None: there may be none.

    Raises:
        RequestError: an image is not read here, or takes other tokens than are expected.
    """
    ids, images = list[int](), list[PlacedImage]()
    for piece in pieces:
        if isinstance(piece, list):
            ids += piece
            continue
        if vision is None or not getattr(piece, "data", b""):
            raise RequestError("There is a chunk that is no text, which this model does not read.")
        count = vision.tokens(piece.data)
        if piece.expected_tokens not in (None, 0, count):
            raise RequestError(
                f"There is an image of {count} tokens, not of the {piece.expected_tokens} that are "
                "expected."
            )
        images.append(PlacedImage(len(ids), count, piece.data, piece.format))
        ids += [vision.placeholder] * count
    return ids, tuple(images)


def forward_backward_output(message: pb.ForwardBackwardRequest, scored: Sequence[Scored]) -> bytes:
    """Return the logprobs in the shapes of target_tokens, a record for each datum, and the summed
    loss."""
    out = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    out.metrics["loss:sum"] = float(sum(row.loss for row in scored))
    for datum, row in zip(message.data, scored, strict=True):
        data = row.logprobs.numpy().astype(np.float32).tobytes()
        record = out.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        record.fields["logprobs"].CopyFrom(
            pb.BatchedTensor(
                data=data,
                offsets=np.array([0, len(data)], np.int64).tobytes(),
                dtype=pb.DTYPE_FLOAT32,
                trailing_shape=datum.loss_fn_inputs["target_tokens"].shape[1:],
            )
        )
    return out.SerializeToString()


def add_scores(
    out: pb.SampleResponse, ask: types.SampleRequest, read: TokenLogprobs, targets: Array | None
) -> None:
    """Add a prompt's logprobs to an answer, with gaps before the first position that was scored."""
    start, tokens, k = read.start, read.start + len(read.logprobs), ask.topk_prompt_logprobs
    if ask.prompt_logprobs:
        own = np.full(tokens, np.nan, np.float32)
        own[start:] = read.logprobs
        out.prompt_logprobs = own.tobytes()
    if k:
        ids, top = np.zeros((tokens, k), np.int32), np.full((tokens, k), _NOT_SCORED, np.float32)
        ids[start:], top[start:] = read.topk_ids, read.topk_logprobs
        out.topk_prompt_logprobs.CopyFrom(_table(ids, top))
    table = ask.target_prompt_logprobs
    if table is None or targets is None:
        return
    dense = np.zeros(targets.shape, np.float32)
    dense[start - 1 :] = read.targets
    dense[targets < 0] = 0
    crow, columns = table.sparse_crow_indices, table.sparse_col_indices
    if crow is not None:
        dense = dense[np.repeat(np.arange(len(dense)), np.diff(crow)), columns]
    scores = types.TensorData(dense, "float32", table.shape, crow, columns)
    out.target_prompt_logprobs.CopyFrom(_tensor_data_to_proto(scores))


def add_completions(out: pb.SampleResponse, completions: Sequence[Completion]) -> None:
    """Add replies to an answer."""
    for completion in completions:
        stopped = completion.stop_reason is StopReason.STOP
        sequence = out.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH,
            tokens=np.array(completion.tokens, np.int32).tobytes(),
            logprobs=np.array(completion.logprobs, np.float32).tobytes(),
        )
        if completion.topk_ids:
            ids = np.array(completion.topk_ids, np.int32)
            logprobs = np.array(completion.topk_logprobs, np.float32)
            sequence.topk_sampled_logprobs.CopyFrom(_table(ids, logprobs))
    out.prompt_cache_hit_tokens = completions[0].cached_tokens


def _table(ids: Array, logprobs: Array) -> pb.TopkLogprobs:
    rows, k = ids.shape
    return pb.TopkLogprobs(length=rows, k=k, token_ids=ids.tobytes(), logprobs=logprobs.tobytes())
