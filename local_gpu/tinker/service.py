"""The server behind its routes: one base model, and the sessions of clients.

Rule: a session's memory is freed when it ends, and all tasks belong to one TaskGroup.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from local_gpu.backend import LocalBackend, unheard
from local_gpu.config import LocalConfig, Say
from local_gpu.tinker import requests
from local_gpu.tinker.config import WireConfig
from local_gpu.tinker.futures import Promises
from local_gpu.tinker.models import Models, check_base
from local_gpu.tinker.sampling import ModelCard, Samplers
from local_gpu.tinker.sessions import Sessions
from local_gpu.tinker.store import Place, Store
from local_gpu.tinker.training import Shared
from tinker_claw.errors import BackendError, RequestError
from tinker_claw.policy import Sampler

Start = Callable[[LocalConfig, Callable[[str], Path], Say], Coroutine[Any, Any, LocalBackend]]


class Service:
    """Carries out the requests of all routes. Made by `running`."""

    def __init__(
        self, shared: Shared, card: ModelCard, base: Sampler, group: asyncio.TaskGroup
    ) -> None:
        config = shared.config
        self.shared = shared
        self.card = card
        self.links: dict[str, Place] = {}
        """Exports that may be downloaded without the key, by the random part of their address."""
        self.sessions = Sessions(config.silence_s, config.open_sessions)
        self.samplers = Samplers(shared, card, base)
        self._group = group
        self._tasks: set[asyncio.Task[None]] = set()
        self.promises = Promises(
            self._spawn,
            keep_s=config.keep_result_s,
            keep_retrieved_s=config.keep_retrieved_s,
            most=config.requests,
        )
        self.models = Models(shared, self.sessions, self.samplers, self.promises)

    @classmethod
    @asynccontextmanager
    async def running(
        cls, config: WireConfig, say: Say = unheard, *, start: Start = LocalBackend.start
    ) -> AsyncGenerator[Service]:
        """Load the base model, and carry out requests until the block ends.

        Args:
            say: called with sentences on what is waited for, what was chosen, what goes wrong.
            start: starts the backend.

        Raises:
            ConfigError, ModelFileError, BackendError: see `Store.locked`, `LocalBackend.start`.
        """
        store = Store(config.local.root)
        with store.locked():
            store.recover()
            backend = await start(config.local, store.serving, say)
            try:
                card = await backend.aside(partial(ModelCard.read, config.local.model))
                shared = Shared(config=config, backend=backend, store=store)
                async with asyncio.TaskGroup() as group:
                    service = cls(shared, card, await backend.serving.base(), group)
                    service._spawn(service._sweep_regularly())
                    try:
                        yield service
                    finally:
                        for task in list(service._tasks):
                            task.cancel()
                await service.samplers.aclose()
            finally:
                await backend.aclose()

    def create_sampling_session(self, ask: requests.CreateSamplingSession) -> str:
        """Return the sampler's id; a re-sent request gets the same."""
        session = self.sessions.get(ask.session_id)
        if ask.model_path is not None:
            self.shared.store.read(Place.at(ask.model_path))
        elif ask.base_model is None:
            raise RequestError("create_sampling_session needs base_model or model_path.")
        if ask.base_model is not None:
            check_base(self.shared, ask.base_model)
        return session.add_sampler(ask.sampling_session_seq_id, ask.model_path).id

    def sample(self, ask: requests.SampleRequest) -> str:
        """Return the request's id; a re-sent request gets the same."""
        if ask.sampling_session_id is None:
            raise RequestError("asample needs sampling_session_id: create_sampling_session first.")
        sampler = self.sessions.sampler(ask.sampling_session_id)
        if ask.seq_id is not None and ask.seq_id in sampler.requests:
            return sampler.requests[ask.seq_id]
        place = None if sampler.model_path is None else Place.at(sampler.model_path)
        request_id = self.promises.start(
            sampler.session_id,
            lambda: self.samplers.sample(ask, place),
            cancellable=True,
        )
        if ask.seq_id is not None:
            sampler.requests[ask.seq_id] = request_id
        return request_id

    async def end_session(self, session_id: str) -> None:
        """Free what the session holds; its requests in flight fail with a message."""
        session = self.sessions.end(session_id)
        if session is None:
            return
        self.promises.cancel_all(session_id)
        for run in session.runs.values():
            await run.free()
            for place in run.ephemeral:
                await self.delete(place)
        used = {s.model_path for other in self.sessions for s in other.samplers.values()}
        for sampler in session.samplers.values():
            if sampler.model_path is not None and sampler.model_path not in used:
                await self.samplers.close(Place.at(sampler.model_path))

    async def delete(self, place: Place) -> None:
        await self.shared.backend.aside(partial(self.shared.store.remove, place))
        await self.samplers.close(place)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _sweep_regularly(self) -> None:
        while True:
            await asyncio.sleep(self.shared.config.sweep_s)
            self.promises.sweep()
            for session_id in self.sessions.silent():
                with suppress(BackendError):  # requests that use the disk report its failure
                    await self.end_session(session_id)
