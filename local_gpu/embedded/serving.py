"""The half that serves, inside this process: an engine per version over one set of base tensors.

Rule: weights come from published folders, as any server's would.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import torch

from local_gpu.device import own_stream
from local_gpu.embedded.engine import EngineSize
from local_gpu.embedded.sampler import LocalSampler
from local_gpu.files import read_adapter
from local_gpu.model import BaseModel, with_lora
from local_gpu.parts import BASE_REF, Facts, Score
from tinker_claw.errors import BackendError, ConfigError
from tinker_claw.policy import Sampler

Run = Callable[[Callable[[], object]], Awaitable[object]]


class EmbeddedServing:
    """Implements `local_gpu.parts.Serving`."""

    def __init__(self, base: BaseModel, size: EngineSize, score: Score, run: Run) -> None:
        """`run`: in a thread that no training step holds; what fails there comes in words."""
        self._base = base
        self._size = size
        self._score = score
        self._run = run
        self._open: set[LocalSampler] = set()

    @property
    def context_tokens(self) -> int:
        return self._size.context_tokens

    @property
    def rounds_otherwise(self) -> bool:
        """A cache is filled in other pieces than a trainer's row, and bfloat16 shows it."""
        return self._base.dtype != torch.float32

    async def open(self, ref: str, folder: Path) -> Sampler:
        module = await self._run(lambda: self._read(folder))
        return self._sampler(ref, module)

    async def base(self) -> Sampler:
        return self._sampler(BASE_REF, self._base.module)

    def live(self) -> frozenset[str]:
        # Asked in another thread: the copy is made in one go, while samplers open and close.
        return frozenset([sampler.ref for sampler in tuple(self._open)])

    async def aclose(self) -> None:
        for sampler in list(self._open):
            await sampler.aclose()

    def _read(self, folder: Path) -> object:
        saved = read_adapter(folder, self._base)
        try:
            with own_stream(self._base.device):
                return with_lora(self._base, saved.shape, saved.tensors)
        except ConfigError as error:
            raise BackendError(str(error)) from error

    def _sampler(self, ref: str, module: object) -> LocalSampler:
        facts = Facts(self._base.fingerprint, self._size.vocabulary, self._size.context_tokens)
        sampler = LocalSampler(ref, module, self._size, facts, self._score, self._open.discard)
        self._open.add(sampler)
        return sampler
