"""The local trainer: the async rim around the optimizer, its files and its samplers.

Rule: all torch work but sampling runs on one executor thread, in the order it was asked for, so
the event loop never waits and no two operations meet in one module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import Any, TypeVar

from local_gpu.config import LocalConfig
from local_gpu.device import checkpoints_activations, open_base
from local_gpu.embedded.batching import check_version
from local_gpu.embedded.engine import EngineSize
from local_gpu.embedded.sampler import LocalSampler
from local_gpu.files import (
    export_adapter,
    new_folder,
    prune,
    read_adapter,
    read_state,
    slug,
    stamp,
    sweep,
    write_adapter,
    write_state,
)
from local_gpu.learning.losses import LOSSES
from local_gpu.learning.optimizer import LoraOptimizer
from local_gpu.model import BaseModel, LoraShape, fresh_adapter, with_lora
from tinker_claw.errors import BackendError, ConfigError, OutageError
from tinker_claw.types import Adam, Capabilities, LossPass, StepReport

T = TypeVar("T")

BASE_REF = "base"
_FULL = frozenset({ENOSPC, EDQUOT, EFBIG})
"""Somebody will make room: no step is to blame, and waiting helps."""


class LocalTrainer:
    """Implements `tinker_claw.policy.Trainer` on this machine. Made by `start`."""

    def __init__(self, config: LocalConfig, base: BaseModel, executor: ThreadPoolExecutor) -> None:
        self._config = config
        self._base = base
        self._executor = executor
        self._shape = LoraShape(config.rank, config.alpha)
        self._size = EngineSize.fit(
            base,
            context_tokens=config.context_tokens,
            kv_cache_tokens=config.kv_cache_tokens,
            max_batch_tokens=config.max_batch_tokens,
        )
        for folder in (self._adapters, self._states):
            sweep(folder)
        adapter = fresh_adapter(base, self._shape, config.seed)
        self._optimizer = LoraOptimizer(
            base,
            self._shape,
            adapter,
            context_tokens=self._size.context_tokens,
            checkpointing=checkpoints_activations(base, config.checkpointing),
        )
        self._samplers: set[LocalSampler] = set()
        self._loaded_state: str | None = None

    @classmethod
    async def start(cls, config: LocalConfig) -> LocalTrainer:
        """Load the base model.

        Raises:
            ConfigError: a setting or the installed transformers does not fit.
            ModelFileError: the model is missing or corrupt.
        """
        check_version()
        executor = ThreadPoolExecutor(1, thread_name_prefix="tinker-claw-torch")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(executor, _build, cls, config, executor)
        except BaseException:
            executor.shutdown(wait=False)
            raise

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            model=self._config.name or self._config.model,
            losses=frozenset(LOSSES),
            two_d_targets=True,
            student_topk=True,
            context_tokens=self._size.context_tokens,
        )

    async def train_step(self, passes: Sequence[LossPass], adam: Adam) -> StepReport:
        return await self._run(lambda: self._optimizer.step(passes, adam))

    async def publish(self) -> LocalSampler:
        def write() -> LocalSampler:
            ref, adapter = stamp(self._adapters), self._optimizer.adapter()
            with new_folder(self._adapters / ref) as draft:
                write_adapter(draft, self._base, self._shape, adapter)
            serving = {ref, *(sampler.ref for sampler in list(self._samplers))}
            prune(self._adapters, self._config.keep_adapters, serving.__contains__)
            return self._sampler(ref, with_lora(self._base, self._shape, adapter))

        return self._remember(await self._run(write))

    async def open(self, ref: str) -> LocalSampler:
        def read() -> LocalSampler:
            saved = read_adapter(_inside(self._adapters, ref), self._base)
            try:
                module = with_lora(self._base, saved.shape, saved.tensors)
            except ConfigError as error:
                raise BackendError(str(error)) from error
            return self._sampler(ref, module)

        if ref == BASE_REF:
            return await self.base()
        return self._remember(await self._run(read))

    async def base(self) -> LocalSampler:
        return self._remember(self._sampler(BASE_REF, self._base.module))

    async def save_state(self, name: str) -> str:
        def write() -> str:
            ref = f"{stamp(self._states)}-{slug(name)}"
            write_state(self._states / ref, self._base, self._shape, self._optimizer.state())
            prune(self._states, self._config.keep_states, {ref, self._loaded_state}.__contains__)
            return ref

        return await self._run(write)

    async def load_state(self, ref: str) -> None:
        def read() -> None:
            self._optimizer.load(read_state(_inside(self._states, ref), self._base))
            self._loaded_state = ref

        await self._run(read)

    async def export_adapter(self, directory: Path) -> None:
        def write() -> None:
            export_adapter(directory, self._base, self._shape, self._optimizer.adapter())

        await self._run(write)

    async def aclose(self) -> None:
        """Close every sampler that is still open, then the thread."""
        for sampler in list(self._samplers):
            await sampler.aclose()
        await asyncio.to_thread(self._executor.shutdown)

    @property
    def _adapters(self) -> Path:
        return self._config.root / "adapters"

    @property
    def _states(self) -> Path:
        return self._config.root / "states"

    async def _run(self, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            future = loop.run_in_executor(self._executor, call)
        except RuntimeError as error:
            raise BackendError("The trainer is closed.") from error
        try:
            return await future
        except OSError as error:
            if error.errno in _FULL:
                raise OutageError(f"There is no room in {self._config.root}: {error}") from error
            raise BackendError(f"The files in {self._config.root} failed: {error}") from error
        except RuntimeError as error:
            raise BackendError(f"torch failed: {error}") from error

    def _sampler(self, ref: str, module: Any) -> LocalSampler:
        return LocalSampler(ref, module, self._size, self._run, self._samplers.discard)

    def _remember(self, sampler: LocalSampler) -> LocalSampler:
        self._samplers.add(sampler)
        return sampler


def _build(
    make: Callable[[LocalConfig, BaseModel, ThreadPoolExecutor], LocalTrainer],
    config: LocalConfig,
    executor: ThreadPoolExecutor,
) -> LocalTrainer:
    base = open_base(config.model, device=config.device, dtype=config.dtype, threads=config.threads)
    return make(config, base, executor)


def _inside(folder: Path, ref: str) -> Path:
    """The entry of that name; a ref is never a path."""
    if Path(ref).name != ref:
        raise BackendError(f"{ref!r} is not the name of anything in {folder}.")
    return folder / ref
