"""Messages between the control process and the ranks, and their encoding as bytes.

The control process and rank 0 exchange them over a pair of sockets:

    control ─ Start ─▶ rank 0        once
    control ◀ RankAnswer ─ rank 0    once: facts of the base, which is loaded on every rank
    control ─ Command ─▶ rank 0      then, any number of times,
    control ◀ RankAnswer ─ rank 0    one answer to one command
    control ◀ RankLost ─ rank 0      at any time: a rank is about to end

The pair is the standard input of torchrun and of every rank that it starts. Rank 0 alone reads and
writes; for the others and torchrun it is a leash: it hangs up when the control process is gone, and
they end.

Rule: an error on the far side is raised here, with the same class, message and cause.

Messages are encoded as safetensors: one tensor holds JSON, the others hold the tensors and long
rows of numbers that it names.

Rule: decoding yields only numbers, strings, tensors and the records of one table, whoever wrote the
bytes: some come over the network. No message can name code to run.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from local_gpu.config import LocalConfig
from local_gpu.halves import Facts, Learning, ScoreAsk
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
    """A rank has failed, so all ranks end."""

    rank: int
    sentence: str
    outage: bool
    """Whether the device failed, so that the computation is not to blame."""


CLOSE: Final = "close"
"""The last command."""

COMMANDS: Final = frozenset(name for name in vars(Learning) if not name.startswith("_"))
"""Names that a command may have: the methods of `Learning`."""

EXPECTED: Final = (ClawError, OSError)
"""Errors that a command may raise without ending the ranks; anything else ends them."""


_HEAD: Final = "head"
_ROW: Final = 16
"""Least length of a row of numbers that is encoded as a tensor."""
_KINDS: Final = {int: torch.int64, float: torch.float64}
_RECORDS: Final[dict[str, Any]] = {
    record.__name__: record
    for record in (
        *(Start, Command, RankAnswer, Failure, RankLost, LocalConfig, Facts, ScoreAsk),
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
Tensors = dict[str, Tensor]


def encode(value: object) -> bytes:
    """Encode a message. Raises TypeError for an unknown type: a programming error."""
    tensors: Tensors = {}
    head = json.dumps(_flat(value, tensors), separators=(",", ":")).encode()
    return save(tensors | {_HEAD: as_tensor(head)})


def decode(raw: bytes) -> Any:
    """Decode a message.

    Raises:
        BackendError: it cannot be read.
    """
    try:
        tensors = load(raw)
        return _value(json.loads(tensors[_HEAD].numpy().tobytes()), tensors)
    except (
        *(SafetensorError, ValueError, TypeError, LookupError),
        *(RuntimeError, RecursionError, AttributeError),
    ) as error:
        raise BackendError(f"A message to this rank cannot be read: {error}") from error


def as_tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0).byte()


def _add(tensor: Tensor, tensors: Tensors) -> str:
    """Put a tensor beside the head; return its name."""
    name = str(len(tensors))
    tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return name


def _flat(value: Any, tensors: Tensors) -> Any:
    """Flatten a value: strings and numbers as they are; everything else as a list that begins with
    its kind."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is bytes:
        return ["bytes", _add(as_tensor(value), tensors)]
    if kind is tuple or kind is list:
        numbers = _numbers(value)
        if numbers is None:
            return [kind.__name__, *(_flat(item, tensors) for item in value)]
        return ["numbers", kind.__name__, _add(numbers, tensors)]
    if isinstance(value, Mapping):
        return ["dict", *([_flat(k, tensors), _flat(v, tensors)] for k, v in value.items())]
    if isinstance(value, Tensor):
        return ["tensor", _add(value, tensors)]
    if kind.__name__ in _RECORDS and kind is _RECORDS[kind.__name__]:
        named = _FIELDS[kind.__name__]
        return [kind.__name__, *(_flat(getattr(value, name), tensors) for name in named)]
    if isinstance(value, Exception):
        return _flat_error(value, tensors)
    if isinstance(value, Path):
        return ["path", str(value)]
    if isinstance(value, HTTPStatus):
        return ["status", int(value)]
    raise TypeError(f"A {kind.__name__} cannot be sent to ranks.")


def _flat_error(error: Exception, tensors: Tensors) -> list[Any]:
    """Encode an error as its nearest class that the other side knows."""
    kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _ERRORS), "RuntimeError")
    arguments = error.__reduce__()[1]  # of an OSError: the file, too
    assert isinstance(arguments, tuple)
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else None
    return ["error", kind, *(_flat(x, tensors) for x in (arguments, dict(vars(error)), cause))]


def _numbers(row: Sequence[Any]) -> Tensor | None:
    """Encode a long row of whole numbers, or of floats; None: it is neither."""
    kinds = set(map(type, row)) if len(row) >= _ROW else set()
    if len(kinds) != 1 or (dtype := _KINDS.get(kinds.pop())) is None:
        return None
    try:
        return torch.tensor(row, dtype=dtype)
    except (ValueError, RuntimeError):  # a number of more than 64 bits
        return None


def _value(flat: Any, tensors: Tensors) -> Any:
    def value(inner: Any) -> Any:
        return _value(inner, tensors)

    if not isinstance(flat, list):
        return flat
    kind, *rest = flat
    if kind in _RECORDS:
        return _RECORDS[kind](**dict(zip(_FIELDS[kind], map(value, rest), strict=True)))
    match kind, rest:
        case "tuple", items:
            return tuple(map(value, items))
        case "list", items:
            return list(map(value, items))
        case "dict", items:
            return {value(key): value(held) for key, held in items}
        case "numbers", [form, name]:
            row = tensors[name].tolist()
            return tuple(row) if form == "tuple" else row
        case "tensor", [name]:
            return tensors[name]
        case "bytes", [name]:
            return tensors[name].numpy().tobytes()
        case "path", [str(path)]:
            return Path(path)
        case "status", [int(status)]:
            return HTTPStatus(status)
        case "error", [name, *rest]:
            return _error(_ERRORS[name], *map(value, rest))
        case _:
            raise ValueError(f"there is no {kind!r} of {len(rest)} parts")


def _error(kind: type[Exception], arguments: Any, more: Any, cause: Any) -> Exception:
    error = kind.__new__(kind, *arguments)
    vars(error).update(more)
    error.__cause__ = cause
    return error
