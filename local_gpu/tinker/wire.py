"""Tinker's protobuf messages, to and from plain records.

Rule: the only file that knows the messages' layout. An error in a message is named, with the
datum's number; nothing is padded or cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tinker.proto import tinker_public_pb2 as pb

from local_gpu.learn.losses import LOSSES, LossInputs, LossRecord, RecordPass, Scored, check_loss
from local_gpu.model.vision import Vision
from tinker_claw.errors import AlignmentError, RequestError, StepError
from tinker_claw.types import Completion, Images, PlacedImage, StopReason

Array = NDArray[Any]

NOT_SCORED: Final = -99999.0
"""The logprob that the SDK reads as none in a top-k table."""
_CLIP: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Tinker's own defaults (its documentation), which are not this project's."""
_DTYPES: Final = {
    pb.DTYPE_FLOAT32: np.dtype(np.float32),
    pb.DTYPE_INT64: np.dtype(np.int64),
    pb.DTYPE_INT32: np.dtype(np.int32),
}


def parse_forward_backward(body: bytes) -> pb.ForwardBackwardRequest:
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RequestError(f"The body is not a ForwardBackwardRequest: {error}.") from error
    return message


def record_pass(
    message: pb.ForwardBackwardRequest,
    *,
    vocabulary: int,
    context_tokens: int,
    most_cells: int,
    vision: Vision | None = None,
) -> RecordPass:
    """Check a request and convert it.

    Args:
        vision: counts the tokens of images; None: there may be none.

    Raises:
        StepError, AlignmentError, RequestError: naming what is wrong.
    """
    check_loss(message.loss_fn)
    name = message.loss_fn
    defaults = _CLIP if name in ("ppo", "cispo") else {}
    config = LOSSES[name].config(name, {**defaults, **_config(message)})
    if not message.data:
        raise StepError("The request has no datums.")
    _check_tables(message.data, vocabulary, most_cells)
    records: list[LossRecord] = []
    for number, datum in enumerate(message.data):
        try:
            record = _record(name, datum, vision)
            _check_ids(record, vocabulary, context_tokens)
        except (StepError, AlignmentError, RequestError) as error:
            raise type(error)(f"datum {number}: {error}") from error
        records.append(record)
    return RecordPass(name, tuple(records), config)


def _check_tables(data: Sequence[pb.Datum], vocabulary: int, most_cells: int) -> None:
    """Check the tables of all datums together before any sparse one is unfolded: it may name any
    shape."""
    cells = 0
    for number, datum in enumerate(data):
        for key, tensor in datum.loss_fn_inputs.items():
            shape = list(tensor.shape[:3])
            if len(shape) == 2 and shape[1] > vocabulary:
                raise StepError(
                    f"datum {number}: {key} has K = {shape[1]}, and the vocabulary is {vocabulary}."
                )
            if key == "target_tokens":
                cells += abs(math.prod(shape))
    if cells > most_cells:
        raise StepError(
            f"The targets are {cells} in all; this server takes {most_cells} in one request: send "
            "fewer datums at once, or fewer candidates."
        )


def _config(message: pb.ForwardBackwardRequest) -> dict[str, float]:
    config = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise StepError(f"loss {message.loss_fn}: config key {key!r} must be a number.")
        config[key] = value.number
    if wrong := [key for key, value in config.items() if not np.isfinite(value)]:
        raise StepError(f"loss {message.loss_fn}: config key {wrong[0]!r} is not finite.")
    return config


def _record(name: str, datum: pb.Datum, vision: Vision | None) -> LossRecord:
    inputs, images = _tokens(datum.model_input, vision)
    wanted = {"target_tokens", *LOSSES[name].arrays}
    tensors = dict(datum.loss_fn_inputs)
    if missing := sorted(wanted - set(tensors)):
        raise StepError(f"loss {name} needs {missing[0]}, which is missing.")
    if unknown := sorted(set(tensors) - wanted):
        raise StepError(f"loss {name} takes {', '.join(sorted(wanted))}, and no {unknown[0]}.")
    # No sparse table is unfolded to a shape that was not counted.
    shape = list(tensors["target_tokens"].shape)
    for key, tensor in tensors.items():
        if tensor.HasField("sparse_csr") and list(tensor.shape) != shape:
            raise AlignmentError(f"{key} has shape {list(tensor.shape)} and target_tokens {shape}.")
    given = {key: _dense(key, tensor) for key, tensor in tensors.items()}
    ids = given["target_tokens"]
    if ids.dtype.kind != "i" or ids.ndim not in (1, 2) or 0 in ids.shape:
        raise StepError(f"target_tokens must be int64 [N] or [N, K], not {ids.dtype} {ids.shape}.")
    if len(ids) != len(inputs):
        raise AlignmentError(f"target_tokens has {len(ids)} rows for {len(inputs)} input tokens.")
    if name != "cross_entropy" and ids.ndim != 1:
        raise StepError(f"loss {name} takes one target per token, not target_tokens {ids.shape}.")
    for key in LOSSES[name].arrays:
        _check_array(key, given[key], ids.shape)
    signal = given["weights" if name == "cross_entropy" else "advantages"].reshape(len(ids), -1)
    mask = given.get("sequence_ratio_mask")
    if mask is not None and signal.any() and not mask.any():
        raise StepError("sequence_ratio_mask marks no token, so the sequence has no ratio.")
    speaks = signal.any(axis=1) if mask is None else signal.any(axis=1) | (mask != 0)
    rows = np.flatnonzero(speaks) if LOSSES[name].silent_at_zero else np.arange(1)
    first = int(rows[0]) if len(rows) else len(ids)
    return LossRecord(
        inputs=torch.from_numpy(inputs),
        ids=torch.from_numpy(ids.reshape(len(ids), -1).astype(np.int64)),
        learns_from=first,
        inputs_of_loss=LossInputs(
            behaviour=_tail(given.get("logprobs"), first),
            advantages=_tail(given.get("advantages"), first),
            weights=_tail(signal if name == "cross_entropy" else None, first),
            ratio_mask=_tail(mask, first),
        ),
        images=images,
    )


def _tail(rows: Array | None, first: int) -> torch.Tensor | None:
    return None if rows is None else torch.from_numpy(rows[first:].astype(np.float32))


def _check_array(key: str, rows: Array, shape: tuple[int, ...]) -> None:
    if rows.shape != shape:
        raise AlignmentError(f"{key} has shape {rows.shape} and target_tokens {shape}.")
    if not np.isfinite(rows).all():
        raise StepError(f"{key} has a value that is not finite.")


def _check_ids(record: LossRecord, vocabulary: int, context_tokens: int) -> None:
    if len(record.inputs) > context_tokens:
        raise StepError(
            f"it has {len(record.inputs)} tokens, and the context has {context_tokens}."
        )
    for key, ids in (("model_input", record.inputs), ("target_tokens", record.ids)):
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise StepError(f"{key} has an id outside 0..{vocabulary - 1}.")


def _tokens(chunks: Sequence[pb.Chunk], vision: Vision | None) -> tuple[Array, Images]:
    """Return the tokens of a prompt, with placeholders for its images, and the images."""
    found, images, length = list[Array](), list[PlacedImage](), 0
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind == "encoded_text":
            if len(chunk.encoded_text.tokens) % 4:
                raise StepError("model_input has no whole tokens.")
            found.append(np.frombuffer(chunk.encoded_text.tokens, np.int32).astype(np.int64))
        elif kind == "image" and chunk.image.HasField("override_dimensions"):
            raise StepError("model_input has an image with other dimensions than its own.")
        elif kind != "image" or vision is None:
            raise StepError(f"model_input has a chunk of {kind}, which this model does not read.")
        else:
            image = place_image(vision, length, chunk.image)
            images.append(image)
            found.append(np.full(image.tokens, vision.placeholder, np.int64))
        length += len(found[-1])
    if not length:
        raise StepError("model_input has no tokens.")
    return np.concatenate(found), tuple(images)


def place_image(vision: Vision, at: int, image: Any) -> PlacedImage:
    """Return an image of a request in its place, from token `at` on.

    Raises:
        RequestError: it cannot be read, or takes other tokens than are expected.
    """
    count = vision.tokens(image.data)
    if image.expected_tokens not in (None, 0, count):
        raise RequestError(
            f"The prompt has an image of {count} tokens, not of the {image.expected_tokens} that "
            "are expected."
        )
    return PlacedImage(at, count, image.data, image.format)


def _dense(key: str, tensor: pb.Tensor) -> Array:
    """Decode a tensor of the wire; unlisted values of a CSR tensor are 0."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise StepError(f"{key} must be float32 or int64.")
    try:
        if min(tensor.shape, default=0) < 0:
            raise ValueError("a negative length")
        if not tensor.HasField("sparse_csr"):
            values = np.frombuffer(tensor.dense, dtype)
            return values.reshape(list(tensor.shape) or [-1])
        csr = tensor.sparse_csr
        return densify(
            np.frombuffer(csr.values, dtype),
            np.frombuffer(csr.crow_indices, np.int64),
            np.frombuffer(csr.col_indices, np.int64),
            list(tensor.shape),
        )
    except (ValueError, OverflowError) as error:
        raise AlignmentError(f"{key} does not fill its shape {list(tensor.shape)}.") from error


def densify(
    values: Array, crow: NDArray[np.int64], col: NDArray[np.int64], shape: list[int], pad: int = 0
) -> Array:
    """Unfold a CSR matrix, with `pad` where it lists nothing. Raises ValueError if it is
    invalid."""
    sound = (
        len(shape) == 2
        and min(shape) >= 0
        and len(crow) == shape[0] + 1
        and crow[0] == 0
        and len(values) == len(col) == crow[-1]
        and (crow[1:] >= crow[:-1]).all()
        and ((col >= 0) & (col < shape[1])).all()
    )
    if not sound:
        raise ValueError("not a CSR matrix of that shape")
    out = np.full(shape, pad, values.dtype)
    out[np.repeat(np.arange(shape[0]), np.diff(crow)), col] = values
    return out


def forward_backward_output(message: pb.ForwardBackwardRequest, scored: Sequence[Scored]) -> bytes:
    """Logprobs in the shapes of target_tokens, one ArrayRecord per datum, and the summed loss."""
    out = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    out.metrics["loss:sum"] = float(sum(row.loss for row in scored))
    for datum, row in zip(message.data, scored, strict=True):
        flat = np.ascontiguousarray(row.logprobs.numpy(), np.float32)
        record = out.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        batched = record.fields["logprobs"]
        batched.data = flat.tobytes()
        batched.offsets = np.array([0, flat.nbytes], np.int64).tobytes()
        batched.dtype = pb.DTYPE_FLOAT32
        batched.trailing_shape.extend(list(datum.loss_fn_inputs["target_tokens"].shape)[1:])
    return out.SerializeToString()


def sample_response(completions: Sequence[Completion], out: pb.SampleResponse) -> bytes:
    """Add completions to the scores of their prompt."""
    for completion in completions:
        stopped = completion.stop_reason is StopReason.STOP
        sequence = out.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH,
            tokens=np.array(completion.tokens, np.int32).tobytes(),
            logprobs=np.array(completion.logprobs, np.float32).tobytes(),
        )
        if completion.topk_ids:
            fill_topk(
                sequence.topk_sampled_logprobs,
                np.array(completion.topk_ids),
                np.array(completion.topk_logprobs),
            )
    out.prompt_cache_hit_tokens = completions[0].cached_tokens
    return out.SerializeToString()


def fill_topk(table: pb.TopkLogprobs, ids: Array, logprobs: Array) -> None:
    table.length, table.k = ids.shape
    table.token_ids = ids.astype(np.int32).tobytes()
    table.logprobs = logprobs.astype(np.float32).tobytes()
