"""The server behind its routes: one base model, and what clients keep on it.

Rule: what a session held is free when it ends, and everything that runs belongs to one TaskGroup.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from uuid import uuid4

from local_gpu.learn.passes import Body
from local_gpu.model.load import checkpoints_activations, open_base
from local_gpu.sample.batching import check_version
from local_gpu.sample.embedded import EngineSize
from local_gpu.tinker import requests
from local_gpu.tinker.config import WireConfig, source_of
from local_gpu.tinker.futures import Promises
from local_gpu.tinker.memory import Adapters
from local_gpu.tinker.models import Models, check_base
from local_gpu.tinker.sampling import Samplers
from local_gpu.tinker.sessions import Sessions
from local_gpu.tinker.store import Links, Place, Store
from local_gpu.tinker.torch_thread import TorchThread
from local_gpu.tinker.training import Workshop
from local_gpu.tree.kernels import SdpaKernel
from tinker_claw.errors import BackendError, RequestError


def build(config: WireConfig) -> Workshop:
    """Load the base model. Blocking.

    Raises:
        ConfigError: a setting or the installed transformers does not fit.
        ModelFileError: the model is missing or corrupt.
    """
    check_version()
    source = source_of(config.model)
    base = open_base(source, device=config.device, dtype=config.dtype, threads=config.threads)
    store = Store(config.root)
    store.recover()
    return Workshop(
        config=config,
        base=base,
        size=EngineSize.fit(
            base,
            context_tokens=config.context_tokens,
            kv_cache_tokens=config.kv_cache_tokens,
            max_batch_tokens=config.max_batch_tokens,
        ),
        body=Body(SdpaKernel(), base.device, packs=base.packs),
        checkpointing=checkpoints_activations(base, config.checkpointing),
        torch=TorchThread(),
        store=store,
        adapters=Adapters(base, config.adapters_bytes),
    )


class Service:
    """Carries out what the routes are asked for. Made by `running`."""

    def __init__(self, shop: Workshop, group: asyncio.TaskGroup) -> None:
        config = shop.config
        self.shop = shop
        self.links = Links()
        self.sessions = Sessions(config.silence_s, config.open_sessions)
        self.samplers = Samplers(shop)
        self._group = group
        self._tasks: set[asyncio.Task[None]] = set()
        self.promises = Promises(
            self._spawn,
            keep_s=config.keep_result_s,
            keep_retrieved_s=config.keep_retrieved_s,
            keep_bytes=config.keep_result_bytes,
            pending_bytes=config.pending_bytes,
        )
        self.models = Models(shop, self.sessions, self.samplers, self.promises)

    @classmethod
    @asynccontextmanager
    async def running(cls, shop: Workshop) -> AsyncGenerator[Service]:
        async with asyncio.TaskGroup() as group:
            service = cls(shop, group)
            service._spawn(service._keep_house())
            try:
                yield service
            finally:
                for task in list(service._tasks):
                    task.cancel()
        await service.samplers.aclose()
        await shop.torch.aclose()

    def create_sampling_session(self, ask: requests.CreateSamplingSession) -> str:
        """The sampler's id; a re-sent request gets the same."""
        session, number = self.sessions.get(ask.session_id), ask.sampling_session_seq_id
        if (known := session.samplers.get(number)) is not None:
            return known.id
        if ask.model_path is not None:
            self.shop.store.read(Place.at(ask.model_path))
        elif ask.base_model is None:
            raise RequestError("create_sampling_session needs base_model or model_path.")
        if ask.base_model is not None:
            check_base(self.shop, ask.base_model)
        self.sessions.check_room(len(session.samplers), "samplers in this session")
        return session.add_sampler(number, self.shop.config.offered, ask.model_path).id

    def sample(self, ask: requests.SampleAsk) -> tuple[str, list[str]]:
        """The request's id and one id per sequence; a re-sent request gets the same."""
        if ask.sampling_session_id is None:
            raise RequestError("asample needs sampling_session_id: create_sampling_session first.")
        sampler = self.sessions.sampler(ask.sampling_session_id)
        if ask.seq_id is not None and ask.seq_id in sampler.requests:
            return sampler.requests[ask.seq_id]
        place = None if sampler.model_path is None else Place.at(sampler.model_path)
        request_id = self.promises.start(
            sampler.session_id,
            lambda: self.samplers.sample(ask, place),
            size=ask.size,
            cancellable=True,
        )
        ids = request_id, [uuid4().hex for _ in range(ask.num_samples)]
        if ask.seq_id is not None:
            sampler.requests[ask.seq_id] = ids
        return ids

    async def end_session(self, session_id: str, why: str) -> None:
        """Free what the session holds; its requests in flight fail with a sentence."""
        session = self.sessions.end(session_id, why)
        if session is None:
            return
        self.promises.cancel_all(session_id)
        for run in session.runs.values():
            run.free()
            for place in run.ephemeral:
                await self.delete(place)
        used = {s.model_path for other in self.sessions for s in other.samplers.values()}
        for sampler in session.samplers.values():
            if sampler.model_path is not None and sampler.model_path not in used:
                await self.samplers.close(Place.at(sampler.model_path))

    async def delete(self, place: Place) -> None:
        await self.shop.torch.run(partial(self.shop.store.remove, place))
        await self.samplers.close(place)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep_house(self) -> None:
        def alive(run: str) -> bool:
            return run.partition(":train:")[0] in self.sessions

        while True:
            await asyncio.sleep(self.shop.config.sweep_s)
            self.promises.sweep()
            for session_id in self.sessions.silent():
                await self.end_session(session_id, "was silent for too long")
            try:
                gone = await self.shop.torch.run(partial(self.shop.store.sweep, alive))
            except BackendError:
                continue  # a disk that fails is told to those who use it
            for place in gone:
                await self.samplers.close(place)
