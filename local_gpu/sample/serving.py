"""Serving by servers over HTTP, and the exams that check them.

The trainer makes exams once for all servers: on the base and on a random adapter at the start, and
one on each version.

Rule: `open` returns when every server in rotation has the version, has computed the prefixes of its
first requests, and has answered as the trainer does. Until then the version before serves, and no
request is routed to a server that lacks the new one.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from safetensors import SafetensorError, safe_open

from local_gpu.halves import BASE_REF, Facts, Score
from local_gpu.sample.exam import POSITIONS, Exam, rms_difference, rounding, table
from local_gpu.sample.member import Adapter, Member, PoolOptions, Probe
from local_gpu.sample.pool import Pool
from local_gpu.sample.sampler import PoolSampler
from local_gpu.sample.vllm import NEVER_LOADED, VllmServer
from tinker_claw.errors import BackendError, ConfigError, GoneError, OutageError, RequestError
from tinker_claw.tasks import together
from tinker_claw.types import Tokens

if TYPE_CHECKING:  # it needs torch
    from local_gpu.model.vision import Vision

_TEXT_TOKENS: Final = 512 + POSITIONS
"""Tokens of the text: some blocks of any server's prefix cache, which are of 16 to 128 tokens."""
_LEAST_TOLERANCE: Final = 0.1
"""Mean |d| that is always accepted, in nats: a server may compute in bfloat16, which makes about
0.04, where the trainer does in float32. Another base model makes several."""
_SELF_FACTOR: Final = 4.0
"""Mean |d| that is accepted as a multiple of what the trainer differs from itself."""
_OTHER_MODEL: Final = (
    "Is it another base model than the trainer's, or quantised where the trainer is not?"
)
_NOT_APPLIED: Final = (
    "Was the adapter not applied, or with another alpha, or does the server answer from a prefix "
    "cache of older weights?"
)
_NONE_APPLIED: Final = (
    "It loads adapters and applies them wrongly or not at all: its log at level DEBUG says which "
    "layers it passed over. Take another release of it, or another model."
)
_SIZES: Final = (0.05, 0.2, 0.8)
"""Sizes of random adapters, which are tried in this order."""
_DECISIVE_CHANGE: Final = 0.4
"""Nats by which one must move logprobs, as a root mean square: far beyond any rounding."""
_MIN_CHANGE: Final = 1e-3

WriteProbe = Callable[[float], Awaitable[tuple[str, Path]]]
"""Writes an adapter of that size (see `Learning.write_probe`); returns its ref, for scoring, and
folder."""


class Examiner:
    """Writes the exams for servers. Made by `start`."""

    def __init__(self, facts: Facts, score: Score, options: PoolOptions, base: Exam) -> None:
        self.facts = facts
        self.score = score
        self.base = base
        self._options = options

    @classmethod
    async def start(
        cls, facts: Facts, score: Score, options: PoolOptions, text: Tokens
    ) -> Examiner:
        """Make an exam on the base, and measure how far the trainer is from itself."""
        text = tuple(text[: min(_TEXT_TOKENS, facts.context_tokens // 2)])
        rows = await table(score, facts, BASE_REF, text)
        own = await rounding(score, facts, text, rows)
        tolerance = max(_LEAST_TOLERANCE, _SELF_FACTOR * own)
        base = Exam(
            BASE_REF,
            text,
            rows,
            None,
            tolerance,
            _OTHER_MODEL,
            student_topk=options.student_topk,
        )
        return cls(facts, score, options, base)

    async def probe(self, write: WriteProbe) -> Probe:
        """Make an exam on a random adapter, large enough to be told from the base.

        A model whose output stays nearly uniform is moved as far as it can be, and the exam is not
        decisive.

        Raises:
            BackendError: no adapter moves it, or the trainer cannot write or score.
        """
        for size in _SIZES:
            ref, folder = await write(size)
            right = await table(self.score, self.facts, ref, self.base.text)
            by = rms_difference(right, self.base.right)
            if by >= (_MIN_CHANGE if size == _SIZES[-1] else _DECISIVE_CHANGE):
                exam = replace(
                    self.base,
                    ref=ref,
                    right=right,
                    base=self.base.right,
                    tolerance=math.inf,  # so large an adapter also magnifies the rounding
                    advice=_NONE_APPLIED,
                    decisive=by >= _DECISIVE_CHANGE,
                )
                return Probe(folder, exam)
        raise BackendError("Adapters change nothing of what the trainer's model answers.")

    async def adapter(self, ref: str) -> Exam | None:
        """Make an exam on a version.

        None: the trainer has had no time, or is away. Serving waits for no step and no trainer.

        Raises:
            BackendError: the trainer cannot score under it.
        """
        try:
            if self._options.steps():
                raise TimeoutError
            async with asyncio.timeout(self._options.score_s):
                right = await table(self.score, self.facts, ref, self.base.text)
        except (TimeoutError, OutageError) as error:  # which is the trainer's, not a server's
            why = str(error) or "the trainer is busy."
            self._options.say(f"{ref} serves without being compared: {why}")
            return None
        base, advice = self.base.right, _NOT_APPLIED
        return replace(self.base, ref=ref, right=right, base=base, advice=advice, student_topk=0)


class PoolServing(Pool):
    """Implements `local_gpu.halves.Serving`. Made by `start`."""

    rounds_otherwise = True
    """Servers have other kernels, whatever the number format."""
    vision: Vision | None = None
    """The vision half is in the servers."""

    def __init__(
        self,
        members: Sequence[Member],
        options: PoolOptions,
        served: tuple[str, int],
        examiner: Examiner,
    ) -> None:
        """`served`: see `_in_common`."""
        super().__init__(members, options, *served)
        self._examiner = examiner

    @classmethod
    async def start(
        cls,
        servers: Sequence[VllmServer],
        facts: Facts,
        score: Score,
        text: Tokens,
        options: PoolOptions | None = None,
        write_probe: WriteProbe | None = None,
    ) -> PoolServing:
        """Ask every server for its description, and compare its base model with the trainer's on a
        text.

        With `write_probe` each must also answer with an adapter as the trainer does: one that
        applies none is found before training starts.

        One that does not answer yet is asked again later, unless none does. The servers are closed
        with the pool, or here if it does not start.

        Raises:
            ConfigError: the servers differ, serve another model, or do not take adapters.
            OutageError: none answers.
        """
        options = options or PoolOptions()
        try:
            examiner = await Examiner.start(facts, score, options, text)
            probe = write_probe and await examiner.probe(write_probe)
            members = [
                Member(i, server, facts, examiner.base, options, probe)
                for i, server in enumerate(servers)
            ]
            await together(_admit(member) for member in members)
            served = _in_common(members, facts)
        except BaseException:
            await together(server.aclose() for server in servers)
            raise
        return cls(members, options, served, examiner)

    async def open(self, ref: str, folder: Path) -> PoolSampler:
        """Open a sampler. Raises OutageError where no server answers, besides what `Serving`
        says."""
        if not await asyncio.to_thread((folder / "adapter_config.json").is_file):
            raise GoneError(f"There is no adapter named {ref!r} in {folder.parent}.")
        if await asyncio.to_thread(_adapts_head, folder):
            # From vLLM's sources: with a tied head it silently loads only the rest.
            raise BackendError(
                f"The adapter {ref!r} is on the head, too, which inference servers apply for some "
                "models and pass over for others. Create the model with train_unembed=False."
            )
        adapter = self.use(ref, lambda: Adapter(ref, folder, lambda: self._examiner.adapter(ref)))
        try:
            await self.bring(adapter)
        except BaseException:
            self.release(adapter)
            raise
        return self._sampler(adapter)

    async def base(self) -> PoolSampler:
        return self._sampler(None)

    def _sampler(self, adapter: Adapter | None) -> PoolSampler:
        return PoolSampler(self, adapter, self._examiner.facts, self._examiner.score)


async def _admit(member: Member) -> None:
    try:
        await member.check()
        await member.server.unload(NEVER_LOADED)
    except OutageError as error:
        member.leave(str(error))
    except (BackendError, RequestError) as error:
        raise ConfigError(str(error)) from error


def _in_common(members: Sequence[Member], facts: Facts) -> tuple[str, int]:
    """Return the base model's name and the shortest context of all servers.

    Raises:
        ConfigError: they serve several models.
        OutageError: none has answered.
    """
    infos = {member.url: member.info for member in members if member.info and not member.away}
    if not infos:
        raise OutageError("; ".join(f"{m.url}: {m.away.error}" for m in members if m.away))
    models = {info.model for info in infos.values()}
    if len(models) > 1:
        listing = ", ".join(f"{url} serves {info.model!r}" for url, info in infos.items())
        raise ConfigError(f"All servers must serve one model under one name; {listing}.")
    shortest = min(info.context_tokens for info in infos.values())
    return models.pop(), min(shortest, facts.context_tokens)


def _adapts_head(folder: Path) -> bool:
    """Return whether an adapter is on a layer outside all numbered ones: the output embedding."""
    with (
        suppress(OSError, SafetensorError),  # the servers report what is wrong with it
        safe_open(folder / "adapter_model.safetensors", framework="np") as file,
    ):
        return not all(re.search(r"\.\d+\.", name) for name in file.keys())  # noqa: SIM118
    return False
