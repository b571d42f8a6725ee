"""Serving inside this process: requests, an engine per version, samplers.

A job is a request in flight, between the event loop and one generation thread. Rule: it gets
exactly one terminal event, a chunk with a stop reason or an error, so that no consumer waits for
ever. Jobs are entered, ended and fed in the event loop; the thread reads them and posts what it has
drawn, once per forward pass.

An engine samples from one version: it starts with its first request, and restarts when it has died.
Rule: immutable weights. An engine never sees another version's tensors, so a request keeps its own
version's logprobs whatever is published meanwhile.

A sampler streams from its version's engine, and the trainer scores for it. All engines share one
set of base tensors. Rule: adapters come from published folders, as any server's would.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from torch import Tensor

from local_gpu.halves import BASE_REF, Facts, Score, TrainerScores, check_request
from local_gpu.model.files import read_adapter
from local_gpu.model.load import own_stream
from local_gpu.model.lora import BaseModel, for_sampling, with_lora
from local_gpu.model.vision import Vision
from local_gpu.room import Room
from local_gpu.sample.batching import Batcher, Scheduled, salted_id
from local_gpu.sample.drawing import Drawn, Recipe, draw
from local_gpu.sample.routing import Prefix, RecentPrompts, keys_of
from local_gpu.sample.seeing import stream
from local_gpu.tasks import together
from tinker_claw.errors import (
    BackendError,
    ConfigError,
    RequestError,
    SamplerError,
)
from tinker_claw.policy import Sampler
from tinker_claw.types import (
    Completion,
    SamplingParams,
    StopReason,
    TokenChunk,
    Tokens,
)

_WARM_PREFIXES: Final = 4
_WARM_S: Final = 20.0
"""Seconds for warming up a new version before it serves."""
_NOT_FINITE: Final = "The model's logits are not finite."
_ABANDONED: Final = Recipe(temperature=0, top_p=1, top_k=None, uniform=0, student_topk=0)
"""Recipe for a row whose request was cancelled while it was in the batch."""


@dataclass(eq=False, slots=True)
class SampleJob:
    """One request."""

    prompt: Tokens
    params: SamplingParams
    random: Random
    """Random numbers seeded by the request; without a seed, by the operating system."""
    events: asyncio.Queue[TokenChunk | SamplerError] = field(
        default_factory=asyncio.Queue[TokenChunk | SamplerError]
    )
    done: bool = False
    """Whether the terminal event is in the queue."""
    generated: int = 0
    prefilled: int = 0
    """Number of prompt tokens that were computed; the others came from shared blocks."""

    def put(self, event: TokenChunk | SamplerError) -> None:
        """In the event loop: hand over an event, unless the terminal one has passed."""
        if not self.done:
            self.done = isinstance(event, SamplerError) or event.stop_reason is not None
            self.events.put_nowait(event)

    def recipe(self) -> Recipe:
        p = self.params
        return Recipe(p.temperature, p.top_p, p.top_k, self.random.random(), p.student_topk)

    def draw(self, logits: Tensor) -> Drawn:
        """Draw the next token from logits [1, V], outside of a batch.

        Raises:
            SamplerError: the logits are not finite.
        """
        (drawn,) = draw(logits, [self.recipe()])
        if drawn is None:
            raise SamplerError(_NOT_FINITE)
        return drawn

    def chunk(self, drawn: Drawn) -> TokenChunk:
        """In the thread: count a token and wrap it. The scheduler stops by the same rules."""
        self.generated += 1
        stop: StopReason | None = None
        if drawn.token in self.params.stop_tokens:
            stop = StopReason.STOP
        elif self.generated == self.params.max_tokens:
            stop = StopReason.LENGTH
        asked = self.params.student_topk > 0
        return TokenChunk(
            tokens=(drawn.token,),
            logprobs=(drawn.logprob,),
            topk_ids=(drawn.topk_ids,) if asked else (),
            topk_logprobs=(drawn.topk_logprobs,) if asked else (),
            stop_reason=stop,
            cached_tokens=max(0, len(self.prompt) - self.prefilled) if stop else 0,
        )


class Feed:
    """The jobs of one generation thread."""

    def __init__(self, cancel: Callable[[str], None], room: Room) -> None:
        self._loop = asyncio.get_running_loop()
        self._cancel = cancel
        self._room = room
        self._jobs: dict[str, SampleJob] = {}

    # In the event loop.

    def enter(self, request_id: str, job: SampleJob) -> None:
        self._jobs[request_id] = job
        if job.params.person:
            self._room.enter(job, self)

    def leave(self, request_id: str) -> None:
        """The consumer has gone; a request that is not finished is cancelled."""
        job = self._jobs.pop(request_id)
        self._room.leave(job)
        if not job.done:
            self._cancel(request_id)

    def __len__(self) -> int:
        return len(self._jobs)

    # In the generation thread. None of these may raise.

    def of_person(self, request_id: str) -> bool:
        """Whether a person waits for the request."""
        job = self._jobs.get(request_id)
        return job is not None and job.params.person

    def take_turn(self) -> None:
        """Wait until this engine may compute a pass: one at a time, people first."""
        self._room.take_turn(self)

    def end_turn(self, others_s: float) -> None:
        """Note the end of a pass of `others_s` seconds if it was for no person, or that there is
        nothing to compute."""
        self._room.end_turn(others_s)

    def on_logits(self, batch: Sequence[Scheduled], logits: Tensor) -> list[int]:
        """Choose a token for each row [R, V] of the requests with `has_new_token`, in order."""
        ids: list[str] = []
        for part in batch:
            request_id: str = part.state.request_id
            job = self._jobs.get(request_id)
            if job is None:
                # Cancelled before it reached the scheduler, or while it was in this batch.
                self._cancel(request_id)
            elif job.generated == 0:
                job.prefilled += part.query_length
            if part.has_new_token:
                ids.append(request_id)
        if not ids:
            return []
        jobs = [self._jobs.get(request_id) for request_id in ids]
        recipes = [job.recipe() if job else _ABANDONED for job in jobs]
        drawn = draw(logits[: len(ids)], recipes)
        events: list[tuple[SampleJob, TokenChunk | SamplerError]] = []
        for request_id, job, token in zip(ids, jobs, drawn, strict=True):
            if job is not None and token is not None:
                events.append((job, job.chunk(token)))
                self._room.begin(job)
            elif job is not None:
                self._cancel(request_id)
                events.append((job, SamplerError(_NOT_FINITE)))
        self._post(partial(_put_all, events))
        return [token.token if token else 0 for token in drawn]

    def on_failure(self, request_id: str, reason: str) -> None:
        if job := self._jobs.get(request_id):
            self._post(partial(job.put, SamplerError(f"The sampler failed: {reason}")))

    def on_exit(self, reason: str) -> None:
        """The thread has ended; nothing more will come for any request."""
        self._post(partial(self._fail_all, f"The sampler ended: {reason}."))

    def _fail_all(self, sentence: str) -> None:
        for job in self._jobs.values():
            job.put(SamplerError(sentence))

    def _post(self, call: Callable[[], None]) -> None:
        # The thread outlives a loop that was closed without `aclose`; nobody is listening then.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)


def _put_all(events: Sequence[tuple[SampleJob, TokenChunk | SamplerError]]) -> None:
    for job, event in events:
        job.put(event)


@dataclass(frozen=True, slots=True)
class EngineSize:
    vocabulary: int
    context_tokens: int
    """Longest prompt and reply together; never more than the cache holds."""
    kv_cache_tokens: int
    max_batch_tokens: int
    """Tokens per forward pass, which bounds how long a long prompt delays other requests."""

    @classmethod
    def fit(
        cls,
        base: BaseModel,
        *,
        context_tokens: int | None,
        kv_cache_tokens: int | None,
        max_batch_tokens: int,
    ) -> EngineSize:
        """Choose the sizes. None: the model's own context, and a cache of one and a half contexts.

        Raises:
            ConfigError: this sampler would compute the model wrongly.
        """
        if base.obstacle is not None:
            raise ConfigError(
                f"The sampler in this process cannot serve {base.source!r}, which {base.obstacle}. "
                "It learns and is scored here all the same, while vLLM samples it: tinker-claw "
                "with --sampler-urls http://HOST:PORT."
            )
        context = min(base.context_tokens, context_tokens or base.context_tokens)
        cache = kv_cache_tokens or context * 3 // 2
        return cls(base.vocabulary, min(context, cache), cache, max_batch_tokens)


class Engine:
    """Samples from one module."""

    def __init__(
        self, module: Any, size: EngineSize, room: Room, vision: Vision | None = None
    ) -> None:
        """Set up an engine.

        Args:
            room: shared by everything that computes in this process.
            vision: the vision half of the model; None: it reads text only.
        """
        self._module = module
        self._vision = vision
        self._size = size
        self._room = room
        self._ids = count()
        self._running: Batcher | None = None
        self._retired = False

    async def stream(self, prompt: Tokens, params: SamplingParams) -> AsyncGenerator[TokenChunk]:
        """Yield a chunk per token; closing the generator frees the request.

        Raises:
            RequestError: the request cannot be served as asked.
            SamplerError: the generation failed.
        """
        size = self._size
        check_request(
            prompt, params, context_tokens=size.context_tokens, vocabulary=size.vocabulary
        )
        if params.images:
            async with aclosing(self._seeing(prompt, params)) as seen:
                async for chunk in seen:
                    yield chunk
            return
        running = self._start()
        request_id = salted_id(next(self._ids), params.cache_salt)
        job = SampleJob(prompt, params, Random(params.seed))
        # Entered before it is submitted: if the thread dies in between, `on_exit` still fails it.
        running.events.enter(request_id, job)
        try:
            running.submit(request_id, prompt, params.max_tokens, params.stop_tokens)
            while not (job.done and job.events.empty()):
                event = await job.events.get()
                if isinstance(event, SamplerError):
                    raise event
                yield event
        finally:
            running.events.leave(request_id)
            if self._retired and running is self._running and len(running.events) == 0:
                await self._stop()

    async def _seeing(self, prompt: Tokens, params: SamplingParams) -> AsyncGenerator[TokenChunk]:
        if self._vision is None:
            raise RequestError("The prompt has an image, and this model reads text only.")
        job = SampleJob(prompt, params, Random(params.seed), prefilled=len(prompt))
        replies = stream(self._vision, self._module, prompt, params.images, job.draw)
        async with aclosing(replies) as drawn:
            async for token in drawn:
                yield (chunk := job.chunk(token))
                if chunk.stop_reason is not None:
                    return

    async def sample(self, prompt: Tokens, params: SamplingParams, n: int) -> list[Completion]:
        """Draw n completions at once; with a seed, completion i is drawn with seed + i.

        The others start when the first has its first token, and share its prompt's blocks.
        """
        first = self.stream(prompt, params)
        others = [
            params if params.seed is None else replace(params, seed=params.seed + i)
            for i in range(1, n)
        ]
        async with aclosing(first):
            head = await anext(first)
            return await together(
                [
                    _collect(first, params, head),
                    *(_collect(self.stream(prompt, p), p) for p in others),
                ]
            )

    async def aclose(self) -> None:
        """End the thread when its requests have ended.

        A later request, by a caller that took this version just before a swap, is still served: it
        restarts the thread, which then ends with it.
        """
        self._retired = True
        await self._stop()

    def _start(self) -> Batcher:
        if self._running is None or not self._running.accepts:
            size = self._size
            self._running = Batcher(
                self._module,
                kv_cache_tokens=size.kv_cache_tokens,
                max_batch_tokens=size.max_batch_tokens,
            )
            self._running.start_with(Feed(self._running.cancel_request, self._room))
        return self._running

    async def _stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await asyncio.to_thread(running.drain)


async def _collect(
    stream: AsyncGenerator[TokenChunk], params: SamplingParams, *head: TokenChunk
) -> Completion:
    async with aclosing(stream):
        return Completion.collect([*head, *[chunk async for chunk in stream]], params)


class LocalSampler(TrainerScores):
    """Implements `tinker_claw.policy.Sampler` on this machine."""

    def __init__(
        self,
        ref: str,
        engine: Engine,
        facts: Facts,
        score: Score,
        recent: RecentPrompts,
        closed: Callable[[LocalSampler], None],
    ) -> None:
        super().__init__(ref, facts, score)
        self._recent = recent
        self._closed = closed
        self._engine = engine

    async def warm(self) -> None:
        """Compute recent prompts before a request needs them.

        Errors are ignored here: a later request raises them.
        """
        with suppress(TimeoutError, SamplerError, RequestError):
            async with asyncio.timeout(_WARM_S):
                for prefix in self._recent.prefixes(_WARM_PREFIXES) or [Prefix((0,))]:
                    # With one token, transformers would forget the blocks of its pass.
                    params = SamplingParams(max_tokens=2, cache_salt=prefix.salt)
                    await self._engine.sample(prefix.tokens, params, 1)

    def stream(self, prompt: Tokens, params: SamplingParams) -> AsyncGenerator[TokenChunk]:
        if not params.images:  # placeholders alone are no prefix
            self._recent.note(prompt, keys_of(prompt, params.cache_salt), params.cache_salt)
        return self._engine.stream(prompt, params)

    async def sample(self, prompt: Tokens, params: SamplingParams, n: int = 1) -> list[Completion]:
        return await self._engine.sample(prompt, params, n)

    async def aclose(self) -> None:
        self._closed(self)
        await self._engine.aclose()


Run = Callable[[Callable[[], object]], Awaitable[object]]


class EmbeddedServing:
    """Implements `local_gpu.halves.Serving`."""

    constrains = False

    def __init__(
        self,
        base: BaseModel,
        size: EngineSize,
        room: Room,
        score: Score,
        run: Run,
        vision: Vision | None,
    ) -> None:
        """Serve a base.

        Args:
            run: runs a call in a thread that no training step blocks, and turns errors into ours.
            vision: the vision half of the base.
        """
        self._base = base
        self._size = size
        self._room = room
        self._score = score
        self._run = run
        self._recent = RecentPrompts()
        self._open: set[LocalSampler] = set()
        self.vision = vision
        self.sees = vision is not None
        self.context_tokens = size.context_tokens
        # The cache is filled in other chunks than a trainer's row, and bfloat16 rounds differently.
        self.rounds_otherwise = base.dtype != torch.float32

    async def open(self, ref: str, folder: Path) -> Sampler:
        module = await self._run(lambda: self._read(folder))
        sampler = self._sampler(ref, module, self._recent)
        try:
            await sampler.warm()
        except BaseException:
            await sampler.aclose()
            raise
        return sampler

    async def base(self) -> Sampler:
        return self._sampler(BASE_REF, self._base.module, RecentPrompts())

    def live(self) -> frozenset[str]:
        # Called in another thread: the copy is atomic, while samplers open and close.
        return frozenset([sampler.ref for sampler in tuple(self._open)])

    def forget(self) -> None:
        self._recent.clear()

    async def aclose(self) -> None:
        for sampler in list(self._open):
            await sampler.aclose()

    def _read(self, folder: Path) -> object:
        saved = read_adapter(folder, self._base)
        try:
            with own_stream(self._base.device):
                return for_sampling(with_lora(self._base, saved.shape, saved.tensors))
        except ConfigError as error:
            raise BackendError(str(error)) from error

    def _sampler(self, ref: str, module: object, recent: RecentPrompts) -> LocalSampler:
        facts = Facts(self._base.fingerprint, self._size.vocabulary, self._size.context_tokens)
        engine = Engine(module, self._size, self._room, self.vision)
        sampler = LocalSampler(ref, engine, facts, self._score, recent, self._open.discard)
        self._open.add(sampler)
        return sampler
