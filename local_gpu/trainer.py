"""The local backend as the gateway's trainer: one policy, with its versions and states on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from local_gpu.backend import LocalBackend, unheard
from local_gpu.config import LocalConfig
from local_gpu.halves import BASE_REF
from local_gpu.learn.losses import LOSSES
from local_gpu.model.files import KeptFiles, slug, sweep
from tinker_claw.errors import BackendError
from tinker_claw.policy import Sampler
from tinker_claw.types import Adam, Capabilities, LossPass, StepReport


class LocalTrainer:
    """Implements `tinker_claw.policy.Trainer` on this machine. Made by `start`."""

    def __init__(self, config: LocalConfig) -> None:
        self._config = config
        self._keeping = KeptFiles(config, lambda: self._backend.serving.live())
        self._backend: LocalBackend

    @classmethod
    async def start(
        cls,
        config: LocalConfig,
        say: Callable[[str], None] = unheard,
        away: Callable[[Sequence[str]], object] = len,
    ) -> LocalTrainer:
        """See `LocalBackend.start`, which says what is raised and what is heard."""
        for folder in (config.root / "adapters", config.root / "states"):
            await asyncio.to_thread(sweep, folder)
        trainer = cls(config)
        trainer._backend = await LocalBackend.start(config, trainer._keeping.adapter, say, away)
        return trainer

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            model=self._config.name or self._config.model,
            losses=frozenset(LOSSES),
            two_d_targets=True,
            student_topk=True,
            context_tokens=self._backend.serving.context_tokens,
            score_fresh=self._backend.serving.rounds_otherwise,
        )

    async def train_step(self, passes: Sequence[LossPass], adam: Adam) -> StepReport:
        self._keeping.stepped()
        return await self._backend.step(lambda: self._backend.learning.step(passes, adam))

    async def publish(self) -> Sampler:
        def write() -> str:
            ref = self._keeping.new_adapter()
            self._backend.learning.write_adapter(self._keeping.adapter(ref))
            self._keeping.prune_adapters(ref)
            return ref

        ref = await self._backend.run(write)
        try:
            sampler = await self.open(ref)
        except BackendError:
            self._keeping.not_published(ref)
            raise
        self._keeping.published()
        return sampler

    async def open(self, ref: str) -> Sampler:
        if ref == BASE_REF:
            return await self.base()
        folder = self._keeping.adapter(ref)
        with self._keeping.opening(ref):
            return await self._backend.serving.open(ref, folder)

    async def base(self) -> Sampler:
        return await self._backend.serving.base()

    async def save_state(self, name: str) -> str:
        def write() -> str:
            ref = f"{self._keeping.new_state()}-{slug(name)}"
            self._backend.learning.write_state(self._keeping.state(ref))
            self._keeping.prune_states(ref)
            return ref

        ref = await self._backend.run(write)
        self._keeping.saved(ref)
        return ref

    async def load_state(self, ref: str) -> None:
        def read() -> None:
            self._backend.learning.read_state(self._keeping.state(ref))
            self._keeping.loaded(ref)
            self._keeping.drop()

        await self._backend.run(read)

    async def export_adapter(self, directory: Path) -> None:
        await self._backend.run(lambda: self._backend.learning.export_adapter(directory))

    async def aclose(self) -> None:
        """Close every sampler that is still open, then the half that learns."""
        await self._backend.aclose()
