"""Sampling from the base and from saved adapters.

Rule: an open adapter never changes: a path that is overwritten is opened anew by the next request.
A few adapters are open, each with a cache; one that serves a request is never closed under it, and
who needs one more waits. The base is always there.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from local_gpu.model.files import read_adapter
from local_gpu.model.lora import with_lora
from local_gpu.sample.embedded import Engine
from local_gpu.tinker.futures import Answer, Room
from local_gpu.tinker.requests import Params, PromptBody, SampleAsk
from local_gpu.tinker.scoring import PromptAsk, score
from local_gpu.tinker.store import Place
from local_gpu.tinker.training import Workshop
from local_gpu.tinker.wire import PromptScores, sample_response
from tinker_claw.errors import ConfigError, ContextLengthError, RequestError
from tinker_claw.types import SamplingParams

_STOPS = 1024


@dataclass(slots=True)
class _Open:
    engine: Engine
    module: Any
    users: int = 0
    closing: bool = False
    """Off the shelf; its last user closes it."""


@dataclass(slots=True)
class _Shelf:
    """Open adapters, least recently used first. Who takes one waits for those who came before, so
    that nobody who waits for a place is overtaken for ever."""

    open: dict[Place, _Open] = field(default_factory=dict[Place, _Open])
    taking: asyncio.Lock = field(default_factory=asyncio.Lock)
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    closing: int = 0
    """Off the shelf, and still in use."""


class Samplers:
    def __init__(self, shop: Workshop) -> None:
        self._shop = shop
        self._base = _Open(Engine(shop.base.module, shop.size), shop.base.module)
        self._stop_tokens = _stop_tokens(shop.base.module)
        self._shelf = _Shelf()
        self._drawn = Room(shop.config.drawn_cells)

    async def sample(self, ask: SampleAsk, place: Place | None) -> Answer:
        """Score the prompt as asked, and draw `num_samples` completions.

        Raises:
            RequestError: naming what cannot be served.
        """
        prompt = _tokens(ask.prompt)
        size, limits = self._shop.size, self._shop.config
        asked = PromptAsk.of(ask, len(prompt), size.vocabulary, limits.table_cells)
        params = self._params(ask, len(prompt))
        # The one token that compute_logprobs must ask for comes out of the scoring pass.
        at_once = asked.anything and params.max_tokens == 1 and ask.num_samples == 1
        self._check(prompt, params, room=0 if at_once else params.max_tokens)
        cells = ask.num_samples * params.max_tokens * (1 + params.student_topk)
        if cells > limits.drawn_cells:
            raise RequestError(
                f"{ask.num_samples} samples of {params.max_tokens} tokens with "
                f"{params.student_topk} candidates each are {cells} logprobs; this server draws "
                f"{limits.drawn_cells} at once: ask for fewer samples, tokens or candidates."
            )
        async with self._drawn.room(cells), self._lease(place) as held:
            scores = PromptScores()
            if asked.anything:
                call = partial(score, self._shop.body, held.module, prompt, asked, params)
                scores, completion = await self._shop.torch.run(call)
                if at_once:
                    return sample_response([completion], scores)
            completions = await held.engine.sample(tuple(prompt), params, ask.num_samples)
        return sample_response(completions, scores)

    async def close(self, place: Place) -> None:
        """Take an adapter off the shelf; what it serves at the moment it serves to the end."""
        held = self._shelf.open.pop(place, None)
        if held is not None:
            held.closing = True
            if held.users == 0:
                await held.engine.aclose()
            else:
                self._shelf.closing += 1

    async def aclose(self) -> None:
        for held in (self._base, *self._shelf.open.values()):
            await held.engine.aclose()

    @property
    def open_count(self) -> int:
        """Adapters that hold memory, without the base."""
        return len(self._shelf.open) + self._shelf.closing

    @property
    def held_requests(self) -> int:
        """Requests that hold cache or wait for it."""
        every = (self._base, *self._shelf.open.values())
        return sum(held.engine.held_requests for held in every)

    @asynccontextmanager
    async def _lease(self, place: Place | None) -> AsyncGenerator[_Open]:
        held = self._base if place is None else await self._take(place)
        try:
            yield held
        finally:
            held.users -= place is not None
            if held.closing and held.users == 0:
                await held.engine.aclose()
                self._shelf.closing -= 1
            self._shelf.freed.set()

    async def _take(self, place: Place) -> _Open:
        async with self._shelf.taking:
            held = self._shelf.open.pop(place, None)
            if held is None:
                await self._make_room()
                module = await self._shop.torch.run(partial(self._load, place))
                held = _Open(Engine(module, self._shop.size), module)
            self._shelf.open[place] = held  # the most recently used is last
            held.users += 1
        return held

    async def _make_room(self) -> None:
        """For one more: close what was not used for longest, or wait until something is idle."""
        shelf = self._shelf
        while len(shelf.open) + shelf.closing >= self._shop.config.open_samplers:
            idle = next((place for place, held in shelf.open.items() if not held.users), None)
            if idle is not None:
                await self.close(idle)
            else:
                shelf.freed.clear()
                await shelf.freed.wait()

    def _load(self, place: Place) -> Any:
        self._shop.store.read(place)
        saved = read_adapter(self._shop.store.folder(place), self._shop.base)
        try:
            return with_lora(self._shop.base, saved.shape, saved.tensors)
        except ConfigError as error:
            raise RequestError(str(error)) from error

    def _params(self, ask: SampleAsk, prompt_tokens: int) -> SamplingParams:
        params = ask.sampling_params
        if ask.prompt_alt_tokens_k:
            raise RequestError("prompt_alt_tokens_k is not served here; leave it at 0.")
        if params.unknown is not None:
            raise RequestError(
                f"sampling_params has a field {params.unknown!r}, which is not served here."
            )
        room = self._shop.size.context_tokens - prompt_tokens
        return SamplingParams(
            max_tokens=max(1, room) if params.max_tokens is None else params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=None if params.top_k == -1 else params.top_k,
            seed=params.seed,
            stop_tokens=self._stops(params),
            student_topk=min(ask.topk_sample_logprobs, self._shop.size.vocabulary),
        )

    def _stops(self, params: Params) -> tuple[int, ...]:
        if params.stop is None:
            return self._stop_tokens
        words = params.stop if isinstance(params.stop, list) else [params.stop]
        if len(words) > _STOPS:
            raise RequestError(
                f"stop has {len(words)} ids, and each token is compared with all; "
                f"give at most {_STOPS}."
            )
        ids = [word for word in words if isinstance(word, int)]
        if len(ids) < len(words):
            raise RequestError(
                "stop strings are not served here: give stop as a list of token ids "
                "(tokenizer.encode(...)), leave it out for the model's own end, or give []."
            )
        return tuple(ids)

    def _check(self, prompt: list[int], params: SamplingParams, room: int) -> None:
        size = self._shop.size
        if not prompt:
            raise RequestError("The prompt is empty; it needs at least one token.")
        if len(prompt) + room > size.context_tokens:
            raise ContextLengthError(len(prompt), params.max_tokens, size.context_tokens)
        if min(prompt) < 0 or max(prompt) >= size.vocabulary:
            raise RequestError(f"The prompt has a token outside 0..{size.vocabulary - 1}.")
        rules = (
            (params.max_tokens >= 1, f"max_tokens is {params.max_tokens}, not at least 1."),
            (
                0 <= params.temperature < math.inf,
                f"temperature is {params.temperature:g}, not in [0, inf).",
            ),
            (0 < params.top_p <= 1, f"top_p is {params.top_p:g}, not in (0, 1]."),
            (
                params.top_k is None or params.top_k >= 1,
                f"top_k is {params.top_k}, neither -1 nor at least 1.",
            ),
        )
        for kept, sentence in rules:
            if not kept:
                raise RequestError(sentence)


def _tokens(prompt: PromptBody) -> list[int]:
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text":
            raise RequestError(
                f"The prompt has a chunk of {chunk.type}; only tokens are read here."
            )
    return [token for chunk in prompt.chunks for token in chunk.tokens]


def _stop_tokens(module: Any) -> tuple[int, ...]:
    """The model's own end: one id, several or none in its configuration."""
    ids = module.generation_config.eos_token_id
    if ids is None:
        ids = module.config.get_text_config().eos_token_id
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (int(ids),)
