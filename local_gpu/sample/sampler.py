"""Sampler of one version over a pool of servers.

Rule: when a server fails before the first token, another one answers. A reply that breaks off later
ends in an outage, after the tokens that came: the caller continues from there.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Final

from local_gpu.halves import BASE_REF, Facts, Score, TrainerScores, check_request
from local_gpu.sample.http import Busy
from local_gpu.sample.member import Adapter, Member
from local_gpu.sample.pool import Lease, Pool
from tinker_claw.errors import BackendError, OutageError, SamplerError
from tinker_claw.types import Charge, Completion, SamplingParams, TokenChunk, Tokens, uncharged

_SERVERS_PER_REQUEST: Final = 3
"""Most servers that one request may fail on, as it may itself be the cause."""


class PoolSampler(TrainerScores):
    """Implements `tinker_claw.policy.Sampler`."""

    def __init__(self, pool: Pool, adapter: Adapter | None, facts: Facts, score: Score) -> None:
        """`adapter`: in use by this sampler until it is closed. None: the base."""
        self._name = adapter.name if adapter else None
        super().__init__(self._name or BASE_REF, facts, score)
        self._pool = pool
        self._adapter = adapter
        self._closed = False

    async def stream(
        self, prompt: Tokens, params: SamplingParams, charge: Charge = uncharged
    ) -> AsyncGenerator[TokenChunk, None]:
        self._check(prompt, params)
        with self._pool.using(self._adapter) as adapter:
            tried = dict[Member, str]()
            while True:
                async with self._server(adapter, prompt, params, tried) as lease:
                    await self._load(lease.member, adapter)
                    chunks = lease.member.server.stream(self._name, prompt, params)
                    async with aclosing(chunks):  # which aborts the generation there
                        async for chunk in chunks:
                            lease.begun = lease.begun or bool(chunk.tokens)
                            yield chunk
                            if chunk.stop_reason is not None:
                                return
                    raise OutageError(f"The server {lease.member.url} broke off its reply.")

    async def sample(
        self, prompt: Tokens, params: SamplingParams, n: int = 1, charge: Charge = uncharged
    ) -> list[Completion]:
        self._check(prompt, params)
        with self._pool.using(self._adapter) as adapter:
            tried = dict[Member, str]()
            while True:
                async with self._server(adapter, prompt, params, tried) as lease:
                    await self._load(lease.member, adapter)
                    return await lease.member.server.sample(self._name, prompt, params, n)

    async def aclose(self) -> None:
        """Let the servers unload the adapter once nobody uses it; returns at once.

        A later request loads it again, is served, and releases it.
        """
        if not self._closed:
            self._closed = True
            if self._adapter is not None:
                self._pool.release(self._adapter)

    @asynccontextmanager
    async def _server(
        self,
        adapter: Adapter | None,
        prompt: Tokens,
        params: SamplingParams,
        tried: dict[Member, str],
    ) -> AsyncGenerator[Lease]:
        """Lease a server for one attempt; its failure is swallowed where another one may be
        tried."""
        text = prompt[: params.images[0].at] if params.images else prompt  # what others may share
        with self._pool.lease(adapter, text, params.cache_salt, tried) as lease:
            try:
                yield lease
            except OutageError as error:
                tried[lease.member] = str(error)
                if not isinstance(error, Busy):
                    self._pool.take_out(lease.member, error, lease.epoch)
                if lease.begun or len(tried) >= _SERVERS_PER_REQUEST:
                    raise

    async def _load(self, member: Member, adapter: Adapter | None) -> None:
        """Load the adapter again for a request that comes after `aclose`; otherwise there is
        nothing to do."""
        try:
            if adapter is not None:
                await member.prepare(adapter)
        except OutageError:
            raise
        except BackendError as error:
            raise SamplerError(f"{self.ref!r} could not be loaded again: {error}") from error

    def _check(self, prompt: Tokens, params: SamplingParams) -> None:
        check_request(
            prompt,
            params,
            context_tokens=self._pool.context_tokens,
            vocabulary=self._facts.vocabulary,
        )
