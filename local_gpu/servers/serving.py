"""The half that serves, by servers over HTTP: opened together, examined, and served as one.

Rule: `open` returns when every server of the rotation has the version, has computed what its first
requests will start with, and has answered as the trainer does. So whoever swaps to it routes to no
server that lacks it, and the version before serves until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from local_gpu.parts import Facts, Score
from local_gpu.servers.examiner import Examiner
from local_gpu.servers.member import Adapter, Member, PoolOptions
from local_gpu.servers.pool import Pool
from local_gpu.servers.probe import Agreement
from local_gpu.servers.sampler import PoolSampler
from local_gpu.servers.server import NEVER_LOADED, Server
from local_gpu.together import together
from tinker_claw.errors import BackendError, ConfigError, OutageError, RequestError


class PoolServing:
    """Implements `local_gpu.parts.Serving`. Made by `start`."""

    def __init__(self, pool: Pool, examiner: Examiner, facts: Facts, score: Score) -> None:
        self._pool = pool
        self._examiner = examiner
        self._facts = facts
        self._score = score

    @classmethod
    async def start(
        cls,
        servers: Sequence[Server],
        facts: Facts,
        score: Score,
        options: PoolOptions | None = None,
    ) -> PoolServing:
        """Ask every server what it is, and compare its base model with the trainer's.

        One that does not answer yet is asked again later, unless none does. The servers are closed
        with the pool, or here if it does not start.

        Raises:
            ConfigError: the servers differ, serve another model, or do not take adapters.
            OutageError: none answers.
        """
        options = options or PoolOptions()
        examiner = Examiner(facts, score, options)
        try:
            exams = await examiner.base()
            members = [Member(i, server, exams, options) for i, server in enumerate(servers)]
            await together(_admit(member) for member in members)
            model, context_tokens = _in_common(members, facts)
        except BaseException:
            await together(server.aclose() for server in servers)
            raise
        return cls(Pool(members, options, model, context_tokens), examiner, facts, score)

    @property
    def context_tokens(self) -> int:
        return self._pool.context_tokens

    @property
    def rounds_otherwise(self) -> bool:
        """Other kernels, whatever the number format."""
        return True

    async def open(self, ref: str, folder: Path) -> PoolSampler:
        """Raises OutageError where no server answers, besides what `Serving` says."""
        if not await asyncio.to_thread((folder / "adapter_config.json").is_file):
            raise BackendError(f"There is no adapter named {ref!r} in {folder.parent}.")
        before, hot = self._pool.newest(but=ref), self._pool.hot.hottest(1)
        texts = [prefix.tokens for prefix in hot]
        adapter = self._pool.use(
            ref, lambda: Adapter(ref, folder, lambda: self._examiner.adapter(ref, texts, before))
        )
        try:
            await self._pool.open(adapter)
        except BaseException:
            self._pool.release(adapter)
            raise
        return self._sampler(adapter)

    async def base(self) -> PoolSampler:
        return self._sampler(None)

    def live(self) -> frozenset[str]:
        """A reply that goes on keeps its version's folder as well: servers may read it again."""
        return self._pool.wanted()

    def away(self) -> tuple[tuple[str, str], ...]:
        """(url, why) of the servers that are not asked at present."""
        return self._pool.away()

    def agreements(self, ref: str) -> tuple[Agreement, ...]:
        """How the servers agreed with the trainer when last examined on a ref; () if none was."""
        return self._pool.agreements(ref)

    async def aclose(self) -> None:
        await self._pool.aclose()

    def _sampler(self, adapter: Adapter | None) -> PoolSampler:
        return PoolSampler(self._pool, adapter, self._facts, self._score)


async def _admit(member: Member) -> None:
    try:
        await member.check()
        await member.server.unload(NEVER_LOADED)
    except OutageError as error:
        member.leave(str(error))
    except (BackendError, RequestError) as error:
        raise ConfigError(str(error)) from error


def _in_common(members: Sequence[Member], facts: Facts) -> tuple[str, int]:
    """The base model's name, and the shortest context.

    Raises:
        ConfigError: they serve several models.
        OutageError: none has answered.
    """
    infos = {member.url: member.info for member in members if member.info and not member.away}
    if not infos:
        raise OutageError("; ".join(f"{m.url}: {m.away.error}" for m in members if m.away))
    models = {info.model for info in infos.values()}
    if len(models) > 1:
        said = ", ".join(f"{url} serves {info.model!r}" for url, info in infos.items())
        raise ConfigError(f"All servers must serve one model under one name; {said}.")
    shortest = min(info.context_tokens for info in infos.values())
    return models.pop(), min(shortest, facts.context_tokens)
