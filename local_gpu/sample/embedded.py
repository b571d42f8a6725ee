"""Serving inside this process, on the CPU: an engine per version, and samplers.

An engine samples from one version: its requests share passes, one token each, and later requests
join them. What a prompt shares with a sequence that was computed before, under the same salt, is
copied, not computed again.

Rule: immutable weights. An engine never sees another version's tensors, so a request keeps its own
version's logprobs whatever is published meanwhile. All engines share one set of base tensors.
Adapters come from published folders, as any server's would.

Rule: a pass runs in the one thread of all engines, and nothing else touches rows. The event loop
only adds requests, marks those that nobody reads any more, and hands over what was drawn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from local_gpu.halves import BASE_REF, Facts, Score, TrainerScores, check_request
from local_gpu.model.files import read_adapter
from local_gpu.model.lora import BaseModel, for_sampling, with_lora
from local_gpu.model.vision import Vision
from local_gpu.sample.cached import Row, hidden, prefill_with_images
from local_gpu.sample.drawing import Drawn, Draws, draw
from local_gpu.sample.routing import RecentPrompts, keys_of
from tinker_claw.errors import ClawError, ConfigError, RequestError, SamplerError
from tinker_claw.policy import Sampler
from tinker_claw.tasks import together
from tinker_claw.types import Charge, Completion, SamplingParams, TokenChunk, Tokens, uncharged

_WARM_PREFIXES: Final = 4
_WARM_S: Final = 20.0
"""Seconds for warming up a new version before it serves."""
_MAX_ROWS: Final = 64
"""Requests of one pass, and rows of requests that have ended."""
_HEADROOM_TOKENS: Final = 32
"""Tokens that every request must have room for before another one begins."""
_MIN_KEPT_TOKENS: Final = 32
"""Tokens that are sooner computed again than kept."""
_THREAD: Final = ThreadPoolExecutor(1, thread_name_prefix="tinker-claw-sampler")
"""Computes the passes of all engines of the process, one at a time."""


@dataclass(frozen=True, slots=True)
class EngineSize:
    vocabulary: int
    context_tokens: int
    """Longest prompt and reply together."""
    kv_cache_tokens: int
    """Tokens whose keys and values an engine keeps: at least one context."""
    max_batch_tokens: int = 512
    """Tokens per forward pass, which bounds how long a long prompt delays other requests."""

    @classmethod
    def fit(cls, base: BaseModel, context_tokens: int | None) -> EngineSize:
        """Choose the sizes: a cache of one and a half contexts. None: the model's own context.

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
        return cls(base.vocabulary, context, context * 3 // 2)


@dataclass(eq=False, slots=True)
class _Request:
    """One request of an engine."""

    prompt: Tokens
    params: SamplingParams
    draws: Draws
    salt: object
    """Rows are shared by requests of one salt."""
    tokens: list[int]
    """Prompt and reply so far."""
    events: asyncio.Queue[TokenChunk | SamplerError] = field(
        default_factory=asyncio.Queue[TokenChunk | SamplerError]
    )
    ended: bool = False
    """Whether it has ended, or nobody reads it any more."""
    row: Row | None = None
    """None: it waits for room."""
    cached: int | None = None
    """Prompt tokens that were not computed; None: it has not begun."""
    shift: int = 0
    """How far positions are from the numbers of tokens, behind images."""

    @property
    def pending_tokens(self) -> int:
        """Tokens to compute before the next can be drawn."""
        return len(self.tokens) - len(self.row or ())

    @property
    def awaits_images(self) -> bool:
        """Return whether images have yet to be computed, all at once with the prompt."""
        return bool(self.params.images) and not self.row


_Event = tuple[_Request, TokenChunk | SamplerError]


class Engine:
    """Samples from one module."""

    def __init__(self, module: Any, size: EngineSize, vision: Vision | None = None) -> None:
        """`vision`: the vision half of the model; None: it reads text only."""
        self._module = module
        self._vision = vision
        self._size = size
        self._arrived = deque[_Request]()
        self._requests: list[_Request] = []
        """In order of arrival."""
        self._kept: list[tuple[object, Row]] = []
        """Rows of requests that have ended, each with its salt; the oldest first."""
        self._working: asyncio.Task[None] | None = None
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
        if params.images and self._vision is None:
            raise RequestError("The prompt has an image, and this model reads text only.")
        # Placeholders say nothing about their images: such a row is nobody else's.
        salt = object() if params.images else params.cache_salt
        request = _Request(prompt, params, Draws(params), salt, list(prompt))
        self._arrived.append(request)
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        try:
            while True:
                event = await request.events.get()
                if isinstance(event, SamplerError):
                    raise event
                yield event
                if event.stop_reason is not None:
                    return
        finally:
            request.ended = True

    async def sample(self, prompt: Tokens, params: SamplingParams, n: int) -> list[Completion]:
        """Draw n completions at once; with a seed, completion i is drawn with seed + i.

        The others start when the first has its first token, and share its prompt.
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
        """Free the cache once the requests in flight have ended; returns at once where there are
        any. A later request, by a caller that took this version just before a swap, is served."""
        self._retired = True
        in_flight = any(not request.ended for request in (*self._requests, *self._arrived))
        if self._working is not None and not in_flight:
            await asyncio.wait((self._working,))
        if self._working is None:
            self._kept.clear()

    async def _work(self) -> None:
        """Compute passes while there are requests."""
        loop = asyncio.get_running_loop()
        try:
            while self._arrived or self._requests:
                for request, event in await loop.run_in_executor(_THREAD, self._pass):
                    request.events.put_nowait(event)
        except BaseException as error:  # nobody may wait for ever
            for request in (*self._requests, *self._arrived):
                request.events.put_nowait(SamplerError(f"The sampler ended: {error!r}"))
            self._requests.clear()
            self._arrived.clear()
            raise
        finally:
            self._working = None
            if self._retired:
                self._kept.clear()

    # In the thread.

    def _pass(self) -> list[_Event]:
        """Compute one pass; return what was drawn, and what failed."""
        while self._arrived:
            self._requests.append(self._arrived.popleft())
        for request in self._requests:
            if request.ended and request.row and not request.params.images:
                self._keep(request.salt, request.row)
        self._requests = [request for request in self._requests if not request.ended]
        chosen = [(request, 0) for request in self._requests]
        try:
            chosen = self._choose()
            return self._compute(chosen)
        except (RuntimeError, ValueError, ClawError) as error:
            failed = error if isinstance(error, SamplerError) else None
            failed = failed or SamplerError(f"The sampler failed: {error}")
            for request, _ in chosen:
                request.row, request.ended = None, True
            return [(request, failed) for request, _ in chosen]

    def _keep(self, salt: object, row: Row) -> None:
        """Keep a row, in place of those of its salt that have little more than it has."""

        def little(other: Row) -> bool:
            return len(other) - _common(other.tokens, row.tokens) < _MIN_KEPT_TOKENS

        others = [(s, other) for s, other in self._kept if s != salt or not little(other)]
        self._kept = [*others, (salt, row)][-_MAX_ROWS:]

    def _choose(self) -> list[tuple[_Request, int]]:
        """Choose the requests of the next pass, each with its number of tokens: all that are
        decoding, then the shortest prompts."""
        for request in self._requests:
            if request.row is None and self._has_room(request):
                request.row = self._start_row(request)
        running = sorted(self._running(), key=lambda request: request.pending_tokens)
        blind = next((request for request in running if request.awaits_images), None)
        if blind is not None:
            return self._make_room([(blind, len(blind.prompt))])
        chosen, free = list[tuple[_Request, int]](), self._size.max_batch_tokens
        for request in running[:_MAX_ROWS]:
            if count := min(request.pending_tokens, free):
                chosen.append((request, count))
                free -= count
        return self._make_room(chosen)

    def _running(self) -> list[_Request]:
        return [request for request in self._requests if request.row is not None]

    def _has_room(self, request: _Request) -> bool:
        running = self._running()
        used = sum(len(active.tokens) + _HEADROOM_TOKENS for active in (*running, request))
        return not running or used <= self._size.kv_cache_tokens

    def _start_row(self, request: _Request) -> Row:
        """Make a request's row, from the one that has most of its tokens already."""
        others = [(other.salt, other.row) for other in self._running() if other.row is not None]
        rows = [row for salt, row in (*self._kept, *others) if salt == request.salt]
        wanted = request.tokens[:-1]  # the last one's logits are needed
        best = max(rows, key=lambda row: _common(row.tokens, wanted), default=Row())
        count = _common(best.tokens, wanted)
        if request.cached is None:
            request.cached = count
        at = next((i for i, (_, row) in enumerate(self._kept) if row is best), None)
        if at is not None and count == len(best):
            return self._kept.pop(at)[1]
        return best.prefix(count) if count else Row()

    def _make_room(self, chosen: list[tuple[_Request, int]]) -> list[tuple[_Request, int]]:
        """Make room for a pass: the oldest rows that nobody uses go first, then the newest requests
        wait, and are computed again later."""
        while True:
            rows = [
                *(row for _, row in self._kept),
                *(request.row or () for request in self._requests),
            ]
            new = sum(count for _, count in chosen)
            if sum(map(len, rows)) + new <= self._size.kv_cache_tokens:
                return chosen
            if self._kept:
                self._kept.pop(0)
            elif len(running := self._running()) > 1:
                running[-1].row = None
                chosen = [
                    (request, count) for request, count in chosen if request is not running[-1]
                ]
            else:
                return chosen

    @torch.inference_mode()
    def _compute(self, chosen: Sequence[tuple[_Request, int]]) -> list[_Event]:
        if not chosen:
            return []
        states = self._states(chosen)
        whole = [i for i, (request, _) in enumerate(chosen) if request.pending_tokens == 0]
        drawing = [chosen[i][0] for i in whole]
        if not drawing:
            return []
        logits = self._module.get_output_embeddings()(states[whole]).float()
        drawn = draw(logits, [request.draws.recipe() for request in drawing])
        return [self._event(request, d) for request, d in zip(drawing, drawn, strict=True)]

    def _states(self, chosen: Sequence[tuple[_Request, int]]) -> Tensor:
        """Last hidden states (R, hidden), of the last token that each request has in this pass."""
        (first, _), *_ = chosen
        if first.awaits_images:
            assert self._vision is not None
            assert first.row is not None
            state, first.shift = prefill_with_images(
                self._vision, self._module, first.row, first.prompt, first.params.images
            )
            return state
        parts: list[tuple[Row, Sequence[int], int]] = []
        for request, count in chosen:
            assert request.row is not None
            done = len(request.row)
            parts.append((request.row, request.tokens[done : done + count], request.shift))
        return hidden(self._module, parts)

    def _event(self, request: _Request, drawn: Drawn | None) -> _Event:
        if drawn is None:
            request.row, request.ended = None, True
            return request, SamplerError("The model's logits are not finite.")
        request.tokens.append(drawn.token)
        chunk = request.draws.chunk(drawn, cached_tokens=request.cached or 0)
        request.ended = request.ended or chunk.stop_reason is not None
        return request, chunk


def _common(a: list[int], b: list[int]) -> int:
    """Number of tokens that two sequences have in common at their beginnings."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


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
                for prefix in self._recent.prefixes(_WARM_PREFIXES):
                    params = SamplingParams(max_tokens=1, cache_salt=prefix.salt)
                    await self._engine.sample(prefix.tokens, params, 1)

    def stream(
        self, prompt: Tokens, params: SamplingParams, charge: Charge = uncharged
    ) -> AsyncGenerator[TokenChunk]:
        if not params.images:  # placeholders alone are no prefix
            self._recent.note(prompt, keys_of(prompt, params.cache_salt), params.cache_salt)
        return self._engine.stream(prompt, params)

    async def sample(
        self, prompt: Tokens, params: SamplingParams, n: int = 1, charge: Charge = uncharged
    ) -> list[Completion]:
        return await self._engine.sample(prompt, params, n)

    async def aclose(self) -> None:
        self._closed(self)
        await self._engine.aclose()


Run = Callable[[Callable[[], object]], Awaitable[object]]


class EmbeddedServing:
    """Implements `local_gpu.halves.Serving`."""

    def __init__(
        self, base: BaseModel, size: EngineSize, score: Score, run: Run, vision: Vision | None
    ) -> None:
        """Serve a base.

        Args:
            run: runs a call in a thread that no training step blocks, and turns errors into ours.
            vision: the vision half of the base.
        """
        self._base = base
        self._size = size
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
        return for_sampling(with_lora(self._base, saved.shape, saved.tensors))

    def _sampler(self, ref: str, module: object, recent: RecentPrompts) -> LocalSampler:
        facts = Facts(self._size.vocabulary, self._size.context_tokens)
        engine = Engine(module, self._size, self.vision)
        sampler = LocalSampler(ref, engine, facts, self._score, recent, self._open.discard)
        self._open.add(sampler)
        return sampler
