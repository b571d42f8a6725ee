"""A pool over inference servers in this process, with the trainer beside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from local_gpu.halves import BASE_REF, Facts, ScoreAsk
from local_gpu.model.files import read_adapter, write_adapter
from local_gpu.model.lora import BaseModel, LoraShape, drawn_adapter, fresh_adapter, with_lora
from local_gpu.sample.http import Deadlines
from local_gpu.sample.member import PoolOptions
from local_gpu.sample.sampler import PoolSampler
from local_gpu.sample.serving import PoolServing
from local_gpu.sample.vllm import VllmServer
from tests.support.backends import VOCABULARY
from tests.support.inference_servers import MODULES, InferenceServer, inference_servers, tiny_base
from tinker_claw.retry import Backoff
from tinker_claw.types import Completion, TokenLogprobs

SHAPE = LoraShape(rank=4, alpha=8)
FAST = PoolOptions(returns=Backoff(0.05, 0.2), look_s=600)
PATIENT = Deadlines(connect_s=10, answer_s=30, first_token_s=60, between_tokens_s=60)
"""Long deadlines, as many tests run beside these."""


TEXT = tuple((i * i * 7919 + i * 104_729 + 11) % (VOCABULARY // 2) for i in range(600))
"""What servers are examined on."""


def facts_of(base: BaseModel) -> Facts:
    return Facts(base.vocabulary, base.context_tokens)


def make_adapter(folder: Path, base: BaseModel, *, change: float, seed: int = 0) -> Path:
    """An adapter that moves logprobs; `change` is the size of B's values, 0 for none."""
    with MODULES:
        adapter = fresh_adapter(base, SHAPE, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in adapter.items():
        if ".lora_B." in name:
            adapter[name] = change * torch.randn(tensor.shape, generator=generator)
    folder.mkdir(parents=True)
    with MODULES:
        write_adapter(folder, base, SHAPE, adapter)
    return folder


class Probes:
    """Writes random adapters of the requested size."""

    def __init__(self, base: BaseModel, adapters: Path) -> None:
        self._base = base
        self._adapters = adapters
        self.sizes: list[float] = []

    async def write(self, size: float) -> tuple[str, Path]:
        self.sizes.append(size)
        folder = self._adapters / f"probe-{len(self.sizes)}"
        folder.mkdir()
        with MODULES:
            write_adapter(folder, self._base, SHAPE, drawn_adapter(self._base, SHAPE, size))
        return folder.name, folder


class Trainer:
    """The part of a trainer that serving uses: full logits, one sequence at a time."""

    def __init__(self, base: BaseModel, adapters: Path) -> None:
        self.base = base
        self._adapters = adapters
        self._built: dict[str, Any] = {BASE_REF: base.module}
        self.busy: asyncio.Event | None = None
        """Event after which scores come, as behind a training step; None: they come at once."""
        self.fault: Exception | None = None
        """What scoring raises; None: it succeeds."""
        self.scored: list[str] = []
        self._lock = threading.Lock()

    async def score(self, ref: str, ask: ScoreAsk) -> TokenLogprobs:
        if self.busy is not None:
            await self.busy.wait()
        if self.fault is not None:
            raise self.fault
        self.scored.append(ref)
        return await asyncio.to_thread(self.scores, ref, ask)

    @torch.no_grad()
    def scores(self, ref: str, ask: ScoreAsk) -> TokenLogprobs:
        with self._lock:
            if ref not in self._built:
                with MODULES:
                    saved = read_adapter(self._adapters / ref, self.base)
                    self._built[ref] = with_lora(self.base, saved.shape, saved.tensors)
            tokens = torch.tensor([ask.tokens])
            logits = self._built[ref](tokens, use_cache=False).logits[0]
        rows = logits[ask.start - 1 : -1].log_softmax(-1)
        top = rows.topk(ask.top_k) if ask.top_k else None
        chosen = rows.gather(1, tokens[0, ask.start :, None])[:, 0]
        return TokenLogprobs(
            ask.start,
            tuple(chosen.tolist()),
            topk_ids=tuple(map(tuple, top.indices.tolist())) if top else (),
            topk_logprobs=tuple(map(tuple, top.values.tolist())) if top else (),
        )


@dataclass
class Site:
    """A pool over servers, with the trainer beside it."""

    pool: PoolServing
    trainer: Trainer
    servers: list[InferenceServer]
    folder: Path

    def adapter(self, ref: str, *, change: float = 0.05, seed: int | None = None) -> Path:
        """Make a new adapter's folder, with a change as large as that of some steps."""
        seed = sum(ref.encode()) if seed is None else seed
        return make_adapter(self.folder / ref, self.trainer.base, change=change, seed=seed)

    async def publish(self, ref: str, **made: Any) -> PoolSampler:
        return await self.pool.open(ref, self.adapter(ref, **made))

    def errors(self, ref: str, prompt: tuple[int, ...], drawn: Completion) -> float:
        """Largest difference to a version's own logprobs, in nats."""
        ask = ScoreAsk((*prompt, *drawn.tokens), len(prompt), None, 0)
        scored = self.trainer.scores(ref, ask)
        pairs = zip(scored.logprobs, drawn.logprobs, strict=True)
        return max((abs(a - b) for a, b in pairs), default=0.0)


@asynccontextmanager
async def site(
    folder: Path,
    count: int = 2,
    *,
    options: PoolOptions = FAST,
    deadlines: Deadlines = PATIENT,
    **settings: Any,
) -> AsyncGenerator[Site]:
    base = tiny_base()
    trainer = Trainer(base, folder)
    with inference_servers(base, count, **settings) as servers:
        connected = [VllmServer(server.url, deadlines=deadlines) for server in servers]
        pool = await PoolServing.start(connected, facts_of(base), trainer.score, TEXT, options)
        try:
            yield Site(pool, trainer, servers, folder)
        finally:
            await pool.aclose()
