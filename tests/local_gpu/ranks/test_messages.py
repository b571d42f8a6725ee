"""Messages of ranks are plain bytes: they come back unchanged, and are never code."""

from __future__ import annotations

import ast
import os
import pickle
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from local_gpu.config import LocalConfig
from local_gpu.halves import Facts, ScoreAsk
from local_gpu.learn.losses import LossInputs, LossRecord, RecordPass, Scored
from local_gpu.model.files import SavedState
from local_gpu.model.lora import LoraShape
from local_gpu.ranks.messages import (
    Command,
    Failure,
    RankAnswer,
    RankLost,
    Start,
    decode,
    encode,
)
from tinker_claw.errors import (
    BackendError,
    ContextLengthError,
    OutageError,
    RequestError,
    StepError,
)
from tinker_claw.types import Adam, Datum, LossPass, PlacedImage, StepReport, TokenLogprobs

ROOT = Path(__file__).parents[3]
ROW = tuple(-0.1 * i for i in range(40))
WIDE = tuple((float(i), float("inf")) for i in range(40))
IMAGES = (PlacedImage(0, 1, b"\x89PNG\r\n", "png"),)
DATUM = Datum(tuple(range(41)), 1, ROW, ROW, tuple((i, 2**40) for i in range(40)), WIDE, IMAGES)


@pytest.mark.parametrize(
    "said",
    [
        None,
        (True, 1, 1.0, -0.0, "ü \ud800", 2**80, (), [], {}, {1: (2,), "x": [3.5]}),
        (ROW, list(ROW), tuple(range(-8, 40)), (1, 2.0) * 20, (True,) * 20, (2**70,) * 20),
        Start(LocalConfig(model="m", root=Path("/x/ü"), train_gpus=(1, 2)), 3.0),
        RankAnswer(Facts("f", 3, 4, ("note",))),
        Command("step", ((LossPass("ppo", (DATUM,), {"clip_low_threshold": 0.8}),), Adam(1e-5))),
        Command("score", (Path("/a"), (ScoreAsk((1, 2, 3), 1, ((4,), (5,)), 2, IMAGES),))),
        RankAnswer(StepReport((1.0,), (((-0.5,),), (ROW,)), None, 7)),
        RankAnswer([TokenLogprobs(1, ROW, WIDE, ((1,),), ((-0.1,),))]),
        RankLost(2, "no", outage=True),
        LoraShape(4, 8),
    ],
    ids=lambda said: type(said).__name__,
)
def test_records_words_and_numbers_come_back_as_they_were(said: object) -> None:
    heard = decode(encode(said))
    assert heard == said
    assert repr(heard) == repr(said), "1 is not 1.0, and a list is no tuple"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    tensors = [
        torch.randn(3, 4).to(dtype).T,
        torch.tensor(1).to(dtype),
        torch.empty(0, 5).to(dtype),
    ]
    state = SavedState({str(i): t for i, t in enumerate(tensors)}, {"step": torch.tensor(3.0)}, 3)
    heard = decode(encode({0: Scored(0.5, tensors[0]), 1: state}))
    assert torch.equal(heard[0].logprobs, tensors[0])
    assert all(torch.equal(heard[1].adapter[str(i)], t) for i, t in enumerate(tensors))
    assert [t.dtype for t in heard[1].adapter.values()] == [dtype] * 3


def test_records_of_a_loss_come_back_as_they_were() -> None:
    ids = torch.arange(6).reshape(3, 2)
    inputs = LossInputs(None, None, weights=torch.ones(2, 2))
    record = LossRecord(torch.arange(3), ids, 1, inputs)
    heard: RecordPass = decode(encode(RecordPass("cross_entropy", (record,), {"beta": 0.1})))
    (told,) = heard.records
    assert (heard.loss, heard.config, told.learns_from) == ("cross_entropy", {"beta": 0.1}, 1)
    assert torch.equal(told.ids, ids)
    assert told.inputs_of_loss.behaviour is None
    assert torch.equal(told.inputs_of_loss.weights, inputs.weights)


def test_errors_come_back_as_the_class_that_they_were() -> None:
    class Own(StepError):
        """An error about a file; the other side knows its base class."""

    refused = RequestError(
        "no", status=HTTPStatus.CONFLICT, code="c", param="p", headers={"a": "b"}
    )
    missing = FileNotFoundError(2, "No such file or directory", "/x")
    for error in (refused, missing, ContextLengthError(1, 2, 3), OutageError("away"), Own("own")):
        heard = decode(encode(Failure(error))).error
        known = StepError if isinstance(error, Own) else type(error)
        assert (type(heard), str(heard), vars(heard)) == (known, str(error), vars(error))
    failed = StepError("void")
    failed.__cause__ = RuntimeError("torch")
    heard = decode(encode(failed)).__cause__
    assert (type(heard), str(heard)) == (RuntimeError, "torch")
    heard = decode(encode(torch.OutOfMemoryError("CUDA out of memory")))
    assert (type(heard), str(heard)) == (RuntimeError, "CUDA out of memory")


def test_what_has_no_words_is_a_mistake_of_the_programmer() -> None:
    for thing in (object(), len, {1, 2}, bytearray(b"bytes"), Own):
        with pytest.raises(TypeError, match="cannot be sent to ranks"):
            encode(thing)


class Own:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made",)


def said(head: str, tensor: torch.Tensor | None = None) -> bytes:
    tensors = {"head": torch.tensor(list(head.encode()), dtype=torch.uint8)}
    return save(tensors | ({} if tensor is None else {"0": tensor}))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff" * 20,
        pickle.dumps(Own()),
        said("{}x"),
        said("[]"),
        said('["Popen","true"]'),
        said('["os.system","true"]'),
        said('["Datum",1]'),
        said('["error","SystemExit",["tuple"],["dict"]]'),
        said('["numbers","tuple","0"]'),
        said('["numbers","tuple"]', torch.ones(1)),
        said('["bytes",["tuple"]]', torch.ones(1)),
        save({"0": torch.ones(1)}),
        said("[]", torch.ones(9))[:-4],
        said('["tuple",' * 100_000 + "]" * 100_000),
    ],
    ids=lambda raw: repr(raw[8:40]),
)
def test_bytes_of_a_stranger_are_an_error_and_run_nothing(
    raw: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BackendError, match="cannot be read"):
        decode(raw)
    assert not (tmp_path / "made").exists()


MODULES = {"pickle", "_pickle", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "rpc_sync", "rpc_async", "read_pickle"),
    *("torch.load", "marshal.load", "marshal.loads", "link.send", "link.recv", "allow_pickle"),
}
"""Calls that may unpickle; `send_bytes` and `recv_bytes` of a multiprocessing link do not."""


@pytest.mark.parametrize("package", ["tinker_claw", "local_gpu"])
def test_nothing_of_the_product_unpickles(package: str) -> None:
    """Torch, numpy and multiprocessing are not made to unpickle either."""
    found: list[str] = []
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found += [f"{path}: {name}" for name in _names(node) & (MODULES | CALLS)]
    assert found == []


def _names(node: ast.AST) -> set[str]:
    """Imported modules, and the last two words of each call."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {str(node.module).partition(".")[0], *(alias.name for alias in node.names)}
    if isinstance(node, ast.keyword):
        return {str(node.arg)}
    if isinstance(node, ast.Attribute):
        owner = getattr(node.value, "attr", getattr(node.value, "id", "")).lstrip("_")
        return {node.attr, f"{owner}.{node.attr}"}
    return set()
