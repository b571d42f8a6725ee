"""Messages between the control process and the ranks, and their encoding as bytes.

What the control process and rank 0 say to one another, over a pair of sockets.

    control ─ Start ─▶ rank 0        once
    control ◀ Ready ─ rank 0         once: the base is loaded on every rank
    control ─ Command ─▶ rank 0      then, any number of times,
    control ◀ RankAnswer ─ rank 0        one answer to one command
    control ◀ RankLost ─ rank 0          at any time: a rank is about to end

The pair is the standard input of torchrun and of every rank that it starts. Rank 0 alone reads and
writes; for the others, and for torchrun's end, it is a leash: when the control process is gone, it
hangs up.

Rule: what is raised on the far side is raised here, as the same class with the same sentence and
the same cause.

What ranks say to one another and to the control process, as bytes.

    8 bytes: length of the head │ head: JSON │ blobs: long rows of numbers, and tensors

Rule: reading makes numbers, words, tensors and the records of one table, whoever wrote the bytes:
some of them come over the network. Nothing that is read names code.
"""

from __future__ import annotations

import builtins
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from local_gpu.config import LocalConfig
from local_gpu.halves import Facts, ScoreAsk
from local_gpu.learn.losses import LossInputs, LossRecord, RecordPass, Scored
from local_gpu.model.files import SavedAdapter, SavedState
from local_gpu.model.lora import LoraShape
from tinker_claw import errors
from tinker_claw.errors import BackendError, ClawError
from tinker_claw.types import Adam, Datum, LossPass, PlacedImage, StepReport, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Start:
    config: LocalConfig
    timeout_s: float
    """Longest wait of one rank for another, in seconds."""


@dataclass(frozen=True, slots=True)
class Ready:
    facts: Facts


@dataclass(frozen=True, slots=True)
class Command:
    """A method of `Learning`, for every rank to call."""

    name: str
    """Name of a method, one of `COMMANDS`."""
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class RankAnswer:
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    error: Exception


@dataclass(frozen=True, slots=True)
class RankLost:
    """A rank cannot go on, and so none can."""

    rank: int
    sentence: str
    outage: bool
    """Whether the device failed, so that the computation is not to blame."""


CLOSE: Final = "close"
"""The last command."""

COMMANDS: Final = frozenset(
    {
        *("create", "drop", "step", "forward_backward", "forward", "optim_step", "discard"),
        *("score", "write_adapter", "write_probe", "export_adapter", "write_state"),
        *("read_state", "read_adapter"),
        CLOSE,
    }
)

EXPECTED: Final = (ClawError, OSError)
"""Errors that a command may raise without ending the ranks; anything else ends them."""


_HEAD: Final = 8
_ROW: Final = 16
"""Least length of a row of numbers that is encoded as a blob."""
_RECORDS: Final[dict[str, Any]] = {
    record.__name__: record
    for record in (
        *(Start, Ready, Command, RankAnswer, Failure, RankLost, LocalConfig, Facts, ScoreAsk),
        *(Adam, Datum, LossPass, PlacedImage, StepReport, TokenLogprobs),
        *(RecordPass, LossRecord, LossInputs, Scored),
        *(LoraShape, SavedAdapter, SavedState),
    )
}
_FIELDS: Final = {name: [f.name for f in fields(record)] for name, record in _RECORDS.items()}
_ERRORS: Final[dict[str, type[Exception]]] = {
    name: kind
    for name, kind in (vars(builtins) | vars(errors)).items()
    if isinstance(kind, type) and issubclass(kind, ClawError | OSError | RuntimeError)
}
_DTYPES: Final = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.uint8, torch.bool),
    )
}


def encode(value: object) -> bytes:
    """Encode a message. Raises TypeError for an unknown type: a programming error."""
    blobs: list[bytes] = []
    head = json.dumps(_flat(value, blobs), separators=(",", ":")).encode()
    return b"".join((len(head).to_bytes(_HEAD, "big"), head, *blobs))


def decode(raw: bytes) -> Any:
    """Decode a message.

    Raises:
        BackendError: it cannot be read.
    """
    try:
        start = _HEAD + int.from_bytes(raw[:_HEAD], "big")
        return _Reader(memoryview(raw)[start:]).value(json.loads(raw[_HEAD:start]))
    except (ValueError, TypeError, LookupError, RuntimeError, RecursionError) as error:
        raise BackendError(f"What was said to this rank cannot be read: {error}") from error


def _flat(value: Any, blobs: list[bytes]) -> Any:
    """Flatten a value: words and numbers as they are; everything else as a list that begins with
    its kind."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is bytes:
        blobs.append(value)
        return ["bytes", len(value)]
    if kind is tuple or kind is list:
        numbers = _numbers(value)
        if numbers is None:
            return [kind.__name__, *(_flat(item, blobs) for item in value)]
        blobs.append(numbers.tobytes())
        return ["numbers", kind.__name__, numbers.typecode, len(blobs[-1])]
    if isinstance(value, Mapping):
        return ["dict", *([_flat(k, blobs), _flat(v, blobs)] for k, v in value.items())]
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        blobs.append(_bytes_of(value))
        return ["tensor", dtype, list(value.shape), len(blobs[-1])]
    if kind.__name__ in _RECORDS and kind is _RECORDS[kind.__name__]:
        named = _FIELDS[kind.__name__]
        return [kind.__name__, *(_flat(getattr(value, name), blobs) for name in named)]
    if isinstance(value, Exception):
        return _flat_error(value, blobs)
    if isinstance(value, Path):
        return ["path", str(value)]
    if isinstance(value, HTTPStatus):
        return ["status", int(value)]
    raise TypeError(f"Ranks have no words for a {kind.__name__}.")


def _flat_error(error: Exception, blobs: list[bytes]) -> list[Any]:
    """Encode an error as its nearest class that the other side knows."""
    kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _ERRORS), "RuntimeError")
    arguments = error.__reduce__()[1]  # of an OSError: the file, too
    assert isinstance(arguments, tuple)
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else None
    return ["error", kind, *(_flat(x, blobs) for x in (arguments, dict(vars(error)), cause))]


def _numbers(row: Sequence[Any]) -> array[Any] | None:
    """Encode a long row of whole numbers, or of floats; None: it is neither."""
    if len(row) < _ROW:
        return None
    kinds = set(map(type, row))
    try:
        return array({int: "q", float: "d"}[kinds.pop()], row) if len(kinds) == 1 else None
    except (KeyError, OverflowError):
        return None


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


class _Reader:
    """Decodes values; blobs are taken in the order in which the head names them."""

    def __init__(self, blobs: memoryview) -> None:
        self._blobs = blobs

    def value(self, flat: Any) -> Any:
        if not isinstance(flat, list):
            return flat
        kind, *rest = flat
        if kind in _RECORDS:
            return _RECORDS[kind](**dict(zip(_FIELDS[kind], map(self.value, rest), strict=True)))
        match kind, rest:
            case "tuple", items:
                return tuple(map(self.value, items))
            case "list", items:
                return list(map(self.value, items))
            case "dict", items:
                return {self.value(key): self.value(value) for key, value in items}
            case "numbers", [form, "q", int(size)]:
                return _row(form, array("q", self._blob(size)))
            case "numbers", [form, "d", int(size)]:
                return _row(form, array("d", self._blob(size)))
            case "tensor", [dtype, shape, int(size)]:
                return _tensor(self._blob(size), _DTYPES[dtype], shape)
            case "bytes", [int(size)]:
                return self._blob(size)
            case "path", [str(path)]:
                return Path(path)
            case "status", [int(status)]:
                return HTTPStatus(status)
            case "error", [name, *rest]:
                return self._error(_ERRORS[name], *map(self.value, rest))
            case _:
                raise ValueError(f"there is no {kind!r} of {len(rest)} parts")

    def _error(self, kind: type[Exception], arguments: Any, more: Any, cause: Any) -> Exception:
        error = kind.__new__(kind, *arguments)
        vars(error).update(more)
        error.__cause__ = cause
        return error

    def _blob(self, size: int) -> bytes:
        if not 0 <= size <= len(self._blobs):
            raise ValueError(f"{size} bytes of numbers are announced, and {len(self._blobs)} left")
        blob, self._blobs = self._blobs[:size], self._blobs[size:]
        return bytes(blob)


def _row(form: str, numbers: array[Any]) -> Sequence[Any]:
    return tuple(numbers) if form == "tuple" else list(numbers)


def _tensor(blob: bytes, dtype: torch.dtype, shape: list[int]) -> Tensor:
    flat = torch.frombuffer(bytearray(blob), dtype=dtype) if blob else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)
