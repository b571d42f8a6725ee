"""Device failures: training starts anew, and no sample is blamed."""

from __future__ import annotations

import functools
import operator
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import torch

from local_gpu.device import device_fault, out_of_memory
from local_gpu.ranks.remote import RankedLearning
from local_gpu.trainer import LocalTrainer
from tests.support.backends import start_local
from tests.support.clients import talking
from tests.support.ledger import check, one, read
from tests.support.lives import Fate, life, until
from tests.support.ranks import (
    ADAM,
    PASSES,
    build_ill,
    lives,
    one_process,
    prescribe,
    same_report,
)
from tests.support.waits import alive
from tinker_claw.errors import BackendError, ConfigError, OutageError, StepError

ILLEGAL = (
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
    "asynchronously reported at some other API call"
)
ILL = torch.AcceleratorError(ILLEGAL)


@pytest.mark.parametrize(
    "words",
    [
        ILLEGAL,
        "CUDA error: unspecified launch failure",
        "CUDA driver error: unknown error",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "NCCL error in: ProcessGroupNCCL.cpp:2345, unhandled cuda error",
        "HIP error: an illegal memory access was encountered",
    ],
)
def test_what_a_device_says_is_known_by_class_and_by_words(words: str) -> None:
    for kind in (RuntimeError, torch.AcceleratorError):
        assert device_fault(kind(words)) == words.partition("\n")[0]
    wrapped = StepError("the step is void")
    wrapped.__cause__ = RuntimeError(words)
    assert device_fault(wrapped)


@pytest.mark.parametrize(
    ("error", "no_room"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (torch.AcceleratorError("CUDA error: invalid configuration argument"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), False),
        (StepError("a user wrote: CUDA error: an illegal memory access was encountered"), False),
    ],
    ids=str,
)
def test_no_room_and_wrong_questions_are_not_the_devices_fault(
    error: Exception, no_room: bool
) -> None:
    assert device_fault(error) is None
    assert isinstance(error, StepError) or out_of_memory(error) == no_room


Starts = Callable[..., AbstractAsyncContextManager[LocalTrainer]]


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    """A trainer in processes whose device fails as `prescribe` says."""

    @asynccontextmanager
    async def start(error: Exception, *, well: int, ill: int) -> AsyncIterator[LocalTrainer]:
        for name, value in prescribe(tmp_path / "sick", error, well=well, ill=ill).items():
            monkeypatch.setenv(name, value)
        sick = functools.partial(RankedLearning, build=build_ill)
        monkeypatch.setattr("local_gpu.backend.RankedLearning", sick)
        started = await start_local(tmp_path, in_process=False)
        try:
            yield started
        finally:
            await started.aclose()

    return start


@pytest.mark.slow
async def test_a_device_that_fails_ends_its_process_and_a_new_one_goes_on(
    trainer: Starts, tmp_path: Path
) -> None:
    async with trainer(ILL, well=2, ill=2) as local:
        ref = await local.save_state("good")
        await local.train_step(PASSES[:1], ADAM)
        await local.load_state(ref)
        assert len(lives(tmp_path / "sick")) == 1, "what went well is undone in the same process"
        await local.train_step(PASSES[:1], ADAM)
        for _ in range(2):
            with pytest.raises(OutageError, match="illegal memory access"):
                await local.train_step(PASSES[:1], ADAM)
            assert not alive(lives(tmp_path / "sick")[-1])
            with pytest.raises(OutageError, match="load a state first"):
                await local.train_step(PASSES[:1], ADAM)
            await local.load_state(ref)
            if len(lives(tmp_path / "sick")) < 3:
                for _ in range(2):
                    await local.train_step(PASSES[:1], ADAM)
        assert len(lives(tmp_path / "sick")) == 3
        await local.load_state(ref)
        core = one_process(tmp_path / "model", tmp_path / "root")
        core.read_state(tmp_path / "run" / "states" / ref)
        same_report(await local.train_step(PASSES, ADAM), core.step(PASSES, ADAM))


@pytest.mark.slow
async def test_ranks_that_do_not_start_again_are_an_outage(trainer: Starts, tmp_path: Path) -> None:
    """The device may be gone for hours; the ranks started before with the same settings."""
    async with trainer(ILL, well=0, ill=1) as local:
        ref = await local.save_state("good")
        with pytest.raises(OutageError):
            await local.train_step(PASSES[:1], ADAM)
        weights = tmp_path / "model" / "model.safetensors"
        away = weights.rename(weights.with_suffix(".away"))
        with pytest.raises(OutageError, match="do not start again"):
            await local.load_state(ref)
        away.rename(weights)
        await local.load_state(ref)
        await local.train_step(PASSES[:1], ADAM)


@pytest.mark.slow
def test_the_product_serves_while_its_device_fails_and_blames_no_sample(tmp_path: Path) -> None:
    data, sick = tmp_path / "data", tmp_path / "sick"
    fate = Fate(
        constants={
            "local_gpu.backend:_ranked": operator.truth,  # as on CUDA
            "local_gpu.backend:RankedLearning": functools.partial(RankedLearning, build=build_ill),
        }
    )
    # The gate would ask the device, too, and take some of what it is prescribed.
    flags = ("--batch-size", "2", "--learning-rate", "1e-3", "--lora-rank", "4", "--gate", "off")
    env = prescribe(sick, ILL, well=4, ill=2)
    with life(data, *flags, fate=fate, env=env) as running, talking(running.url) as who:
        assert running.serves()
        who.wanted.set()
        until(lambda: running.health()["learner"] == "stalled")
        told = running.health()
        assert "illegal memory access" in told["learner_error"]
        assert "learning waits" in told["meaning"]
        before = len(who.seen)
        until(lambda: len(who.seen) > before + 2)
        until(lambda: len(lives(sick)) == 3)
        version = running.health()["policy_version"]
        until(lambda: running.health()["policy_version"] > version)
        until(lambda: running.health()["status"] == "ok")
        who.over.set()
        assert running.stop() == 0
    assert who.errors == []
    check(data, who.seen, batch_size=2)
    assert one(data, "SELECT COUNT(*) FROM turns WHERE reason = 'steps with it failed'") == 0
    void = read(data, "SELECT DISTINCT void > 1 FROM steps WHERE status = 'void'")
    assert [row[0] for row in void] == [1], "no sample is to blame"


async def test_where_a_cuda_device_is_seen_a_process_of_its_own_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, tuple[int, ...]]] = []

    class Asked(BackendError):
        pass

    def ranked(config: object, **_: object) -> None:
        from local_gpu.ranks.remote import _placed

        placed = _placed(config)  # type: ignore[arg-type]
        asked.append((placed.device, placed.train_gpus))
        raise Asked

    monkeypatch.setattr("local_gpu.backend.RankedLearning", ranked)
    monkeypatch.setattr("local_gpu.backend.connect", _nobody)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("auto", "cuda", "cuda:1"):
        with pytest.raises(Asked):
            await start_local(tmp_path, device=device, sampler_urls=("http://127.0.0.1:9",))
    assert asked == [("auto", ()), ("cuda", ()), ("cuda", (1,))]


async def test_on_a_gpu_the_process_itself_does_not_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=r"On a GPU vLLM samples.*--sampler-urls"):
            await start_local(tmp_path, device=device)


async def _nobody(*_: object) -> tuple[()]:
    return ()
