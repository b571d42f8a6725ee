"""Serving by servers over HTTP, and the exams that check them.

The trainer makes exams once for all servers. Rule: a version is examined on two prompts: a fixed
one, which servers have cached under the version before, so that a cache not keyed on the version
shows, and the beginning of a recent one, where an adapter's change shows best.

Rule: `open` returns when every server in rotation has the version, has computed the prefixes of its
first requests, and has answered as the trainer does. Until then the version before serves, and no
request is routed to a server that lacks the new one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from safetensors import SafetensorError, safe_open

from local_gpu.halves import BASE_REF, Facts, Score
from local_gpu.sample.exam import PLACES, Exam, moved, table, tempered
from local_gpu.sample.member import Adapter, Member, PoolOptions, Probe
from local_gpu.sample.pool import Pool
from local_gpu.sample.sampler import PoolSampler
from local_gpu.sample.vllm import NEVER_LOADED, VllmServer
from local_gpu.tasks import together
from tinker_claw.errors import BackendError, ConfigError, GoneError, OutageError, RequestError
from tinker_claw.types import Tokens

if TYPE_CHECKING:  # it needs torch
    from local_gpu.model.vision import Vision

_FIXED_TOKENS: Final = 512 + PLACES
"""Tokens of the fixed prompt: some blocks of any server's prefix cache, which are of 16 to 128
tokens."""
_HOT_TOKENS: Final = 1024
"""Longest recent prompt in an exam: the trainer scores it under three weights at each publish."""
_TEMPERATURE: Final = 0.7
_OTHER_MODEL: Final = (
    "Is it another base model than the trainer's, or quantised where the trainer is not?"
)
_RAW: Final = (
    "Start vLLM with --logprobs-mode processed_logprobs: training needs the logprobs that tokens "
    "were drawn with."
)
_NOT_APPLIED: Final = (
    "Was the adapter not applied, or with another alpha, or does the server answer from a prefix "
    "cache of older weights?"
)
_NONE_APPLIED: Final = (
    "It loads adapters and applies them wrongly or not at all: its log at level DEBUG says which "
    "layers it passed over. Take another release of it, or another model."
)
_MOVES: Final = 1.0
"""Nats by which the probe should move logprobs, as a root mean square: far beyond any rounding."""
_ENOUGH: Final = (0.4, 4.0)
_MORE: Final = 1.2
"""Least factor between two probes' moves; below it a larger adapter moves the model no further."""
_LEAST: Final = 1e-3
_FIRST_SIZE: Final = 0.05
_TRIES: Final = 8

WriteProbe = Callable[[float], Awaitable[tuple[str, Path]]]
"""Writes an adapter of that size (see `Learning.write_probe`); returns its ref, for scoring, and
folder."""


class Examiner:
    """Writes the exams for servers."""

    def __init__(self, facts: Facts, score: Score, options: PoolOptions) -> None:
        self.facts = facts
        self.score = score
        self._options = options

    async def base(self) -> tuple[Exam, Exam]:
        """Two exams on the base model: at temperature 1, and at another, where untempered logprobs
        would show."""
        prompts = (self._fixed(),)
        rows = await table(self.score, self.facts, BASE_REF, prompts)
        shaped = tempered(rows, _TEMPERATURE, self.facts.vocabulary)
        return (
            Exam(
                BASE_REF,
                prompts,
                rows,
                {},
                advice=_OTHER_MODEL,
                student_topk=self._options.student_topk,
            ),
            Exam(
                BASE_REF,
                prompts,
                shaped,
                {"logprobs before temperature": rows},
                advice=_RAW,
                temperature=_TEMPERATURE,
            ),
        )

    async def probe(self, write: WriteProbe, base: Exam) -> Probe:
        """Make an exam on a random adapter, large enough to be told from the base.

        A model whose output stays nearly uniform is moved as far as it can be, and the exam is
        decisive only if that is enough.

        Raises:
            BackendError: no adapter moves it, or the trainer cannot write or score.
        """
        size, before = _FIRST_SIZE, 0.0
        for left in reversed(range(_TRIES)):
            ref, folder = await write(size)
            right = await table(self.score, self.facts, ref, base.prompts)
            by = moved(right, base.right)
            enough = _ENOUGH[0] <= by <= _ENOUGH[1]
            if enough or not left or (before and before <= by < _MORE * before):
                if by < _LEAST:
                    break
                wrong = {BASE_REF: base.right}
                exam = Exam(ref, base.prompts, right, wrong, advice=_NONE_APPLIED, decisive=enough)
                return Probe(folder, exam)
            size, before = size * min(10.0, max(0.1, _MOVES / max(by, 1e-6))), by
        raise BackendError("Adapters change nothing of what the trainer's model answers.")

    async def adapter(self, ref: str, hot: Sequence[Tokens], before: str | None) -> Exam | None:
        """Make an exam on a version, against the base and, if there is one, the version before.

        None: the trainer has had no time, or is away. Serving waits for no step and no trainer.

        Raises:
            BackendError: the trainer cannot score under it.
        """
        prompts = (self._fixed(), *(tuple(prefix[:_HOT_TOKENS]) for prefix in hot))
        try:
            if self._options.steps():
                raise TimeoutError
            async with asyncio.timeout(self._options.score_s):
                right = await table(self.score, self.facts, ref, prompts)
                wrong = {BASE_REF: await table(self.score, self.facts, BASE_REF, prompts)}
                if before is not None:
                    with suppress(BackendError):  # its files may be gone
                        wrong[before] = await table(self.score, self.facts, before, prompts)
        except (TimeoutError, OutageError) as error:  # which is the trainer's, not a server's
            why = str(error) or "the trainer is busy."
            self._options.say(f"{ref} serves without being compared: {why}")
            return None
        return Exam(ref, prompts, right, wrong, advice=_NOT_APPLIED)

    def _fixed(self) -> tuple[int, ...]:
        """Fixed prompt. Any tokens will do; control tokens are mostly at a vocabulary's end."""
        length = min(_FIXED_TOKENS, self.facts.context_tokens // 2)
        half = max(2, self.facts.vocabulary // 2)
        return tuple((i * i * 7919 + i * 104_729 + 11) % half for i in range(length))


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
        options: PoolOptions | None = None,
        write_probe: WriteProbe | None = None,
    ) -> PoolServing:
        """Ask every server for its description, and compare its base model with the trainer's.

        With `write_probe` each must also answer with an adapter as the trainer does: one that
        applies none is found before training starts.

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
            probe = write_probe and await examiner.probe(write_probe, exams[0])
            members = [
                Member(i, one, exams, options, probe, facts.image_token)
                for i, one in enumerate(servers)
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
        if await asyncio.to_thread(_on_the_head, folder):
            # From vLLM's sources: with a tied head it silently loads only the rest.
            raise BackendError(
                f"The adapter {ref!r} is on the head, too, which inference servers apply for some "
                "models and pass over for others. Create the model with train_unembed=False."
            )
        before, hot = self.newest(but=ref), self.recent.prefixes(1)
        texts = [prefix.tokens for prefix in hot]
        adapter = self.use(
            ref, lambda: Adapter(ref, folder, lambda: self._examiner.adapter(ref, texts, before))
        )
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
        said = ", ".join(f"{url} serves {info.model!r}" for url, info in infos.items())
        raise ConfigError(f"All servers must serve one model under one name; {said}.")
    shortest = min(info.context_tokens for info in infos.values())
    return models.pop(), min(shortest, facts.context_tokens)


def _on_the_head(folder: Path) -> bool:
    """Whether an adapter is on a layer outside all numbered ones: the output embedding."""
    with (
        suppress(OSError, SafetensorError),  # the servers report what is wrong with it
        safe_open(folder / "adapter_model.safetensors", framework="np") as file,
    ):
        return not all(re.search(r"\.\d+\.", name) for name in file.keys())  # noqa: SIM118
    return False
