"""Opening and scoring versions of the local trainer while it is busy otherwise."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from local_gpu.learn.step import LoraOptimizer
from local_gpu.model.files import read_adapter
from local_gpu.model.load import open_base
from local_gpu.model.lora import LoraShape, fresh_adapter, with_lora
from local_gpu.sample import embedded
from tests.support.backends import VOCABULARY, start_local, tiny_model
from tests.support.local_reference import WARM, rl_datum
from tinker_claw.errors import BackendError, SamplerError
from tinker_claw.types import LossPass, SamplingParams

STEP = [LossPass("ppo", (rl_datum(30, 10, 1),))]
PROMPT = (1, 5, 9, 33)
AT_MOST_S = 120
"""Seconds that a test waits at most. A blocked thread waits for twice as long, and then goes on."""


class Gate:
    """A gate that blocks a thread."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        self._reached.set()
        self._open.wait(2 * AT_MOST_S)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, AT_MOST_S)

    @contextmanager
    def held(self) -> Generator[None]:
        try:
            yield
        finally:
            self._open.set()


async def test_a_version_is_opened_and_answers_while_a_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, gate, step = await start_local(tmp_path), Gate(), LoraOptimizer.step
    ref = (await trainer.publish()).ref

    def slowly(self: LoraOptimizer, *args: Any) -> Any:
        gate()
        return step(self, *args)

    monkeypatch.setattr(LoraOptimizer, "step", slowly)
    async with asyncio.TaskGroup() as group:
        with gate.held():
            stepping = group.create_task(trainer.train_step(STEP, WARM))
            await gate.reached()
            async with asyncio.timeout(AT_MOST_S):
                again = await trainer.open(ref)
                (done,) = await again.sample(PROMPT, SamplingParams(max_tokens=3))
            assert len(done.tokens) == 3
            assert not stepping.done()
    await trainer.aclose()
    with pytest.raises(BackendError, match="closed"):
        await trainer.open(ref)


async def test_a_version_that_is_being_opened_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, gate = await start_local(tmp_path, keep_adapters=1), Gate()
    old = await trainer.publish()
    expected = await old.logprobs(PROMPT, start=1)
    await old.aclose()
    read = read_adapter

    def slowly(*args: Any) -> Any:
        found = read(*args)
        gate()
        return found

    async with asyncio.TaskGroup() as group:
        with gate.held(), monkeypatch.context() as around:
            around.setattr(embedded, "read_adapter", slowly)
            opening = group.create_task(trainer.open(old.ref))
            await gate.reached()
            around.undo()
            async with asyncio.timeout(AT_MOST_S):
                await trainer.train_step(STEP, WARM)
                await trainer.publish()
    opened = opening.result()
    assert (await opened.logprobs(PROMPT, start=1)).logprobs == pytest.approx(expected.logprobs)
    await trainer.aclose()


def test_modules_that_several_threads_build_at_once_are_whole(tmp_path: Path) -> None:
    base = open_base(str(tiny_model(tmp_path)), device="cpu", dtype="float32", threads=1)
    shape = LoraShape(4, 8)
    adapter = fresh_adapter(base, shape, seed=0)
    hollow: list[str] = []

    def build() -> None:
        for _ in range(4):
            module = with_lora(base, shape, adapter)
            hollow.extend(name for name, p in module.named_parameters() if p.is_meta)

    threads = [threading.Thread(target=build) for _ in range(3)]
    often, usual = 1e-4, sys.getswitchinterval()
    sys.setswitchinterval(often)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(usual)
    assert hollow == []
    assert not torch.nn.Linear(1, 1).weight.is_meta, "torch is as it was"


async def test_what_cannot_be_scored_fails_alone_and_not_those_who_asked_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Qwen3MLP.forward

    def too_long(self: Qwen3MLP, x: torch.Tensor) -> Any:
        if x.shape[1] > 300:
            raise torch.OutOfMemoryError("CUDA out of memory, say")
        return forward(self, x)

    monkeypatch.setattr(Qwen3MLP, "forward", too_long)
    trainer = await start_local(tmp_path)
    base, lengths = await trainer.base(), (40, 50, 400, 60, 70)
    asked = [base.logprobs([(i * i + n) % VOCABULARY for i in range(n)], start=1) for n in lengths]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(answer, SamplerError) for answer in answers] == [n > 300 for n in lengths]
    assert len(answers[0].logprobs) == 39  # type: ignore[union-attr]
    await trainer.aclose()
