"""The local backend: training and sampling, started from one configuration and joined.

Rule: all training calls run on one executor thread, in order, so the event loop is never blocked
and no two operations use one module at once. A version is opened from its files in another thread,
so opening one never waits for a step.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

import torch

from local_gpu.config import LocalConfig, Say
from local_gpu.device import device_fault
from local_gpu.halves import BASE_REF, Learning, Score, ScoreAsk, Serving
from local_gpu.learn.learning import LearningCore
from local_gpu.learn.scores import ScoreQueue
from local_gpu.model.load import base_of, real_text
from local_gpu.model.lora import BaseModel
from local_gpu.model.vision import Vision
from local_gpu.ranks.remote import RankedLearning
from local_gpu.sample.embedded import EmbeddedServing, EngineSize
from local_gpu.sample.member import PoolOptions
from local_gpu.sample.serving import PoolServing
from local_gpu.sample.vllm import VllmServer, connect
from tinker_claw.errors import BackendError, ConfigError, OutageError
from tinker_claw.tasks import together
from tinker_claw.types import TokenLogprobs

T = TypeVar("T")

_PROBE = "probe-"
"""Prefix of the refs of randomly drawn probe adapters."""
_FULL = frozenset({ENOSPC, EDQUOT, EFBIG})
"""errno values of a full disk: no step is to blame, and waiting helps once somebody makes room."""


class LocalBackend:
    """A trainer and the samplers that serve its versions. Made by `start`."""

    serving: Serving
    score: Score
    """Score given tokens with the trainer; requests made at the same time are computed together."""

    def __init__(
        self,
        config: LocalConfig,
        learning: Learning,
        executor: ThreadPoolExecutor,
        adapter: Callable[[str], Path],
    ) -> None:
        self.config = config
        self.learning = learning
        self._executor = executor
        self._adapter = adapter
        self._probes = config.root / "probe"
        self._closed = False
        self._steps = 0
        """Number of training steps that are running."""

    @classmethod
    async def start(
        cls,
        config: LocalConfig,
        adapter: Callable[[str], Path],
        options: PoolOptions | None = None,
    ) -> LocalBackend:
        """Load the base model, here or on ranks, and connect it to the samplers.

        Servers in `sampler_urls` must run already: they take their memory first.

        Args:
            adapter: returns the folder of a published ref.
            options: of the samplers; `say` hears of the trainer, too.

        Raises:
            ConfigError: a setting or a server does not fit.
            ModelFileError: the model is missing or corrupt.
            BackendError: ranks or servers did not start.
        """
        if _on_cuda(config) and not config.sampler_urls:
            raise ConfigError(
                "On a GPU vLLM samples: start a server and name it by --sampler-urls, or learn on "
                "the CPU with --device cpu."
            )
        options = options or PoolOptions()
        # Before the base is loaded, which takes minutes: an address may be wrong.
        servers = await connect(config.sampler_urls, config.sampler_api_key)
        executor = ThreadPoolExecutor(1, thread_name_prefix="tinker-claw-torch")
        loop = asyncio.get_running_loop()
        started: LocalBackend | None = None
        try:
            try:
                base, learning = await loop.run_in_executor(
                    executor, _learning, config, options.say
                )
            except RuntimeError as error:  # e.g. another process has taken the memory
                raise BackendError(
                    f"{config.model} cannot be loaded on device {config.device!r}: {error}"
                ) from error
            started = cls(config, learning, executor, adapter)
            for note in learning.facts.notes:
                options.say(note)
            await started._serve(base, servers, options)
            offered, learned = started.serving.context_tokens, learning.facts.context_tokens
            if offered < learned:
                options.say(
                    f"Samplers hold {offered:,} tokens of prompt and reply, not {learned:,}."
                )
            return started
        except BaseException:
            await together(server.aclose() for server in servers)
            if started is not None:
                started.learning.close()
            executor.shutdown(wait=False)
            raise

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call in the one thread that uses the trainer, after the calls made before it.

        Raises:
            BackendError: torch or the disk failed; an OutageError where waiting may help.
        """
        loop = asyncio.get_running_loop()
        try:
            future = loop.run_in_executor(self._executor, call)
        except RuntimeError as error:
            raise BackendError("The trainer is closed.") from error
        with self._mapped_errors():
            return await future

    async def step(self, call: Callable[[], T]) -> T:
        """Run a training call as `run` does. A version opened meanwhile is not examined."""
        self._steps += 1
        try:
            return await self.run(call)
        finally:
            self._steps -= 1

    async def aside(self, call: Callable[[], T]) -> T:
        """Run a call in a thread other than the executor's."""
        if self._closed:
            raise BackendError("The trainer is closed.")
        with self._mapped_errors():
            return await asyncio.to_thread(call)

    async def aclose(self) -> None:
        """Close every sampler that is still open, then the trainer."""
        self._closed = True
        await self.serving.aclose()
        # Outside the executor: a running step on ranks is ended, not waited for.
        await asyncio.to_thread(self.learning.close)
        await asyncio.to_thread(self._executor.shutdown)
        await asyncio.to_thread(shutil.rmtree, self._probes, ignore_errors=True)

    async def _serve(
        self, base: BaseModel | None, servers: Sequence[VllmServer], options: PoolOptions
    ) -> None:
        config, self.score = self.config, ScoreQueue(self._score_all).score
        if base is None:
            options = replace(
                options, student_topk=config.student_topk, steps=lambda: self._steps > 0
            )
            facts = self.learning.facts
            text = await asyncio.to_thread(real_text, config.model, facts.vocabulary)
            self.serving = await PoolServing.start(
                servers, facts, self.score, text, options, self._write_probe
            )
            return
        size = EngineSize.fit(base, config.context_tokens)
        learning = self.learning
        vision = learning.vision if isinstance(learning, LearningCore) else Vision.of(base)
        self.serving = EmbeddedServing(base, size, self.score, self.aside, vision)

    async def _score_all(self, ref: str, asks: Sequence[ScoreAsk]) -> list[TokenLogprobs]:
        def score() -> list[TokenLogprobs]:
            # Looked up when the call runs, not while it is queued.
            return self.learning.score(None if ref == BASE_REF else self._folder(ref), asks)

        return await self.run(score)

    async def _write_probe(self, size: float) -> tuple[str, Path]:
        ref = f"{_PROBE}{token_hex(4)}"
        folder = self._folder(ref)

        def write() -> None:
            shutil.rmtree(self._probes, ignore_errors=True)  # an earlier one, or a killed process's
            self.learning.write_probe(folder, size)

        await self.run(write)
        return ref, folder

    def _folder(self, ref: str) -> Path:
        return self._probes / ref if ref.startswith(_PROBE) else self._adapter(ref)

    @contextmanager
    def _mapped_errors(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise OutageError(f"There is no room in {self.config.root}: {error}") from error
            raise BackendError(f"The files in {self.config.root} failed: {error}") from error
        except (RuntimeError, BackendError) as error:
            if (message := device_fault(error)) is not None:
                raise OutageError(f"The device failed: {message}") from error
            if isinstance(error, BackendError):
                raise
            raise BackendError(f"torch failed: {error}") from error


def _on_cuda(config: LocalConfig) -> bool:
    return config.device.startswith(("auto", "cuda")) and torch.cuda.is_available()


def _ranked(config: LocalConfig) -> bool:
    """Return whether training runs in processes of its own.

    On CUDA always: after some errors of a GPU every further call of the process fails, and what
    serves must not end with it.
    """
    return _on_cuda(config) or config.ranks > 1 or not config.in_process


def _learning(config: LocalConfig, say: Say) -> tuple[BaseModel | None, Learning]:
    """Start training; also return the base, where this process samples from it."""
    base, ranked = None, _ranked(config)
    if not (ranked and config.sampler_urls):
        base = base_of(config)
    if ranked:
        return base, RankedLearning(config, say=say)
    assert base is not None
    learning = LearningCore(config, base, say=say)
    return None if config.sampler_urls else base, learning
