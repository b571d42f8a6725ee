"""Sampling from the base and from saved adapters, and scoring of prompts.

The serving half samples tokens, and the training half scores given ones.

Rule: an open adapter never changes: a path that is overwritten is opened again by the next request.
A few adapters are open; one in use is never closed, and a request for one more waits. The base is
always open.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from tinker.proto import tinker_public_pb2 as pb
from transformers import AutoConfig, GenerationConfig

from local_gpu.halves import ScoreAsk, check_request
from local_gpu.sample.drawing import Draws, draw
from local_gpu.tasks import together
from local_gpu.tinker.futures import Answer
from local_gpu.tinker.requests import Params, PromptBody, SampleRequest, TensorField
from local_gpu.tinker.store import Place
from local_gpu.tinker.training import Shared
from local_gpu.tinker.wire import (
    NOT_SCORED,
    densify,
    fill_topk,
    place_image,
    sample_response,
)
from tinker_claw.errors import RequestError, SamplerError
from tinker_claw.policy import Sampler
from tinker_claw.types import (
    Completion,
    Images,
    PlacedImage,
    SamplingParams,
    TokenLogprobs,
)

_STOPS: Final = 1024


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts from the base model's files."""

    arch: str
    stop_tokens: tuple[int, ...]
    """End tokens of the model: one id, several or none."""

    @classmethod
    def read(cls, source: str) -> ModelCard:
        """Read the files of a model. Blocking."""
        config: Any = AutoConfig.from_pretrained(source)
        try:
            ids: Any = GenerationConfig.from_pretrained(source).eos_token_id
        except OSError:  # it has no such file
            ids = None
        if ids is None:
            ids = config.get_text_config().eos_token_id
        stops = () if ids is None else tuple(ids) if isinstance(ids, list) else (int(ids),)
        return cls(config.model_type, stops)


@dataclass(eq=False, slots=True)
class _Open:
    sampler: Sampler
    users: int = 0


class Samplers:
    """The base and the open adapters, for sampling and scoring."""

    def __init__(self, shared: Shared, card: ModelCard, base: Sampler) -> None:
        self._shared = shared
        self._stop_tokens = card.stop_tokens
        self._base = base
        self._open: set[_Open] = set()
        """Adapters that hold memory."""
        self._offered: dict[Place, _Open] = {}
        """Those of them that requests get, least recently used first; the last user closes any
        other."""
        self._taking = asyncio.Lock()
        """Held while an adapter is taken, so that requests get one in order of arrival."""
        self._loading: Place | None = None
        """The adapter that is being opened; None: it was closed before it was open."""
        self._freed = asyncio.Event()

    async def sample(self, ask: SampleRequest, place: Place | None) -> Answer:
        """Score the prompt as asked, and draw `num_samples` completions.

        Raises:
            RequestError: naming what cannot be served.
        """
        prompt, images = await self._prompt(ask.prompt)
        most = self._shared.config.most_logprobs
        asked = PromptScoring.of(ask, len(prompt), self._vocabulary, most)
        params = replace(self._params(ask, len(prompt)), images=images)
        # The one token that compute_logprobs must ask for comes out of the scoring pass.
        at_once = asked.anything and params.max_tokens == 1 and ask.num_samples == 1
        self._check(prompt, params, at_once=at_once)
        cells = ask.num_samples * params.max_tokens * (1 + params.student_topk)
        if cells > most:
            raise RequestError(
                f"{ask.num_samples} samples of {params.max_tokens} tokens with "
                f"{params.student_topk} candidates each are {cells} logprobs; this server draws "
                f"{most} at once: ask for fewer samples, tokens or candidates."
            )
        async with self._lease(place) as sampler:
            table = asked.table()
            asks = asked.asks(prompt, table, images)
            # This works for a prompt that fills the context, too: the last token is never read.
            last = ScoreAsk((*prompt, 0), len(prompt), None, self._vocabulary, images)
            after = [last] * at_once
            score = self._shared.backend.score
            told = await together(score(sampler.ref, one) for one in (*asks, *after))
            scores = asked.scores(table, told[: len(asks)])
            if at_once:
                return sample_response([_next(told[-1], self._vocabulary, params)], scores)
            completions = await sampler.sample(tuple(prompt), params, ask.num_samples)
        return sample_response(completions, scores)

    async def _prompt(self, prompt: PromptBody) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Return the tokens of a prompt, with placeholders for its images, and the images."""
        backend, ids, images = self._shared.backend, list[int](), list[PlacedImage]()
        vision = backend.serving.vision
        for chunk in prompt.chunks:
            if chunk.type == "encoded_text":
                ids += chunk.tokens
            elif chunk.type != "image" or vision is None:
                raise RequestError(
                    f"The prompt has a chunk of {chunk.type!r}, which this model does not read."
                )
            else:
                image = await backend.aside(partial(place_image, vision, len(ids), chunk))
                images.append(image)
                ids += [vision.placeholder] * image.tokens
        return ids, tuple(images)

    async def close(self, place: Place) -> None:
        """Unload an adapter; replies in progress finish."""
        if self._loading == place:
            self._loading = None
        held = self._offered.pop(place, None)
        if held is not None and not held.users:
            await self._close(held)

    async def aclose(self) -> None:
        await self._base.aclose()
        for held in tuple(self._open):
            await self._close(held)

    @property
    def open_count(self) -> int:
        """Adapters that hold memory, without the base."""
        return len(self._open)

    @asynccontextmanager
    async def _lease(self, place: Place | None) -> AsyncGenerator[Sampler]:
        if place is None:
            yield self._base
            return
        held = await self._take(place)
        try:
            yield held.sampler
        finally:
            held.users -= 1
            if not held.users and self._offered.get(place) is not held:
                await self._close(held)
            self._freed.set()

    async def _take(self, place: Place) -> _Open:
        async with self._taking:
            held = self._offered.pop(place, None)
            if held is None:
                await self._make_room()
            self._loading = place
            held = held or await self._load(place)
            if self._loading == place:  # otherwise the path has other weights by now, or none
                self._offered[place] = held  # the most recently used is last
            held.users += 1
        return held

    async def _make_room(self) -> None:
        """Make room for one more adapter: close the least recently used, or wait until one is
        idle."""
        while self.open_count >= self._shared.config.open_samplers:
            idle = next((place for place, held in self._offered.items() if not held.users), None)
            if idle is not None:
                await self.close(idle)
            else:
                self._freed.clear()
                await self._freed.wait()

    async def _load(self, place: Place) -> _Open:
        backend, store = self._shared.backend, self._shared.store
        ref = await backend.aside(partial(store.serve, place))
        try:
            held = _Open(await backend.serving.open(ref, store.serving(ref)))
        except BaseException:
            await backend.aside(partial(store.serve_no_more, ref))
            raise
        self._open.add(held)
        return held

    async def _close(self, held: _Open) -> None:
        self._open.discard(held)
        await held.sampler.aclose()
        no_more = partial(self._shared.store.serve_no_more, held.sampler.ref)
        await self._shared.backend.aside(no_more)

    @property
    def _vocabulary(self) -> int:
        return self._shared.backend.learning.facts.vocabulary

    @property
    def _context_tokens(self) -> int:
        return self._shared.backend.serving.context_tokens

    def _params(self, ask: SampleRequest, prompt_tokens: int) -> SamplingParams:
        params = ask.sampling_params
        if ask.prompt_alt_tokens_k:
            raise RequestError("prompt_alt_tokens_k is not served here; leave it at 0.")
        if params.unknown is not None:
            raise RequestError(
                f"sampling_params has a field {params.unknown!r}, which is not served here."
            )
        room = self._context_tokens - prompt_tokens
        return SamplingParams(
            max_tokens=max(1, room) if params.max_tokens is None else params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=None if params.top_k == -1 else params.top_k,
            seed=params.seed,
            stop_tokens=self._stops(params),
            student_topk=min(ask.topk_sample_logprobs, self._vocabulary),
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

    def _check(self, prompt: list[int], params: SamplingParams, *, at_once: bool) -> None:
        vocabulary = self._vocabulary
        if prompt and (min(prompt) < 0 or max(prompt) >= vocabulary):
            raise RequestError(f"The prompt has a token outside 0..{vocabulary - 1}.")
        size = self._context_tokens + at_once  # that token is never read
        check_request(tuple(prompt), params, context_tokens=size, vocabulary=vocabulary)


def _next(told: TokenLogprobs, vocabulary: int, params: SamplingParams) -> Completion:
    """Draw the token that follows a prompt from the logprobs of the whole vocabulary."""
    logprobs = torch.full((1, vocabulary), -math.inf)
    logprobs[0, torch.tensor(told.topk_ids[0])] = torch.tensor(told.topk_logprobs[0])
    draws = Draws(params)
    (drawn,) = draw(logprobs, [draws.recipe()])
    if drawn is None:
        raise SamplerError("The model's logits are not finite.")
    return Completion.collect([draws.chunk(drawn)], params)


@dataclass(frozen=True, slots=True)
class Targets:
    """Ids to score at every position but the first."""

    ask: TensorField
    ids: NDArray[np.int64]
    """(N - 1, K); -1 asks for nothing."""

    @classmethod
    def of(cls, ask: TensorField, vocabulary: int) -> Targets:
        """Unfold a table whose shape was checked, only when it is used."""
        values = np.array(ask.data, np.int64)
        try:
            if ask.sparse_crow_indices is None:
                ids = values.reshape(ask.shape)
            else:
                crow = np.array(ask.sparse_crow_indices, np.int64)
                col = np.array(ask.sparse_col_indices or [], np.int64)
                ids = densify(values, crow, col, ask.shape, pad=-1)
        except (ValueError, OverflowError) as error:
            raise RequestError(
                f"target_prompt_logprobs does not fill its shape {ask.shape}."
            ) from error
        if ids.size and (int(ids.min()) < -1 or int(ids.max()) >= vocabulary):
            raise RequestError(f"target_prompt_logprobs has an id outside -1..{vocabulary - 1}.")
        return cls(ask, ids)

    def first(self) -> int:
        """The first prompt position that is asked about; N if none is."""
        rows = np.flatnonzero((self.ids >= 0).any(axis=1))
        return int(rows[0]) + 1 if len(rows) else len(self.ids) + 1

    def filled(self, scored: NDArray[np.float32]) -> pb.Tensor:
        """The scores (N - 1, K) in the layout of the request; 0 where nothing was asked."""
        dense = np.where(self.ids >= 0, scored, np.float32(0)).astype(np.float32)
        tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=self.ask.shape)
        if self.ask.sparse_crow_indices is None:
            tensor.dense = dense.tobytes()
            return tensor
        crow = np.array(self.ask.sparse_crow_indices, np.int64)
        col = np.array(self.ask.sparse_col_indices or [], np.int64)
        rows = np.repeat(np.arange(len(crow) - 1), np.diff(crow))
        tensor.sparse_csr.values = dense[rows, col].tobytes()
        tensor.sparse_csr.crow_indices = crow.tobytes()
        tensor.sparse_csr.col_indices = col.tobytes()
        return tensor


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Scores asked for of a prompt."""

    tokens: int
    """Length of the prompt."""
    logprobs: bool
    logprobs_from: int
    """Positions before it get no logprobs and no candidates."""
    top_k: int
    targets: TensorField | None
    """Target tokens, of a shape that fits; their values are not checked yet."""
    vocabulary: int

    @classmethod
    def of(
        cls, ask: SampleRequest, prompt_tokens: int, vocabulary: int, most_cells: int
    ) -> PromptScoring:
        """Raises RequestError naming what does not fit."""
        last_n = ask.prompt_logprobs_last_n
        if last_n is not None and not ask.prompt_logprobs:
            raise RequestError("prompt_logprobs_last_n needs prompt_logprobs.")
        if last_n is not None and not 1 <= last_n <= prompt_tokens - 1:
            raise RequestError(
                f"prompt_logprobs_last_n is {last_n}, not in 1..{prompt_tokens - 1}."
            )
        if ask.topk_prompt_logprobs > vocabulary:
            raise RequestError(f"topk_prompt_logprobs is above the vocabulary of {vocabulary}.")
        wanted, width = ask.target_prompt_logprobs, 0
        if wanted is not None:
            shape = wanted.shape[:3]  # more dimensions are wrong whatever follows
            if len(shape) != 2 or shape[0] != prompt_tokens - 1 or shape[1] < 1:
                raise RequestError(
                    f"target_prompt_logprobs has shape {shape}; a prompt of {prompt_tokens} tokens "
                    f"takes [{prompt_tokens - 1}, K]."
                )
            if (width := shape[1]) > vocabulary:
                raise RequestError(
                    f"target_prompt_logprobs has K = {width}, and the vocabulary is {vocabulary}."
                )
        asked = cls(
            tokens=prompt_tokens,
            logprobs=bool(ask.prompt_logprobs),
            logprobs_from=1 if last_n is None else prompt_tokens - last_n,
            top_k=ask.topk_prompt_logprobs,
            targets=wanted,
            vocabulary=vocabulary,
        )
        if asked.cells > most_cells:
            raise RequestError(
                f"{prompt_tokens} prompt tokens with {asked.cells // prompt_tokens} logprobs each "
                f"are {asked.cells}; this server gives {most_cells} at once: ask for fewer "
                "candidates."
            )
        return asked

    @property
    def anything(self) -> bool:
        return self.logprobs or self.top_k > 0 or self.targets is not None

    @property
    def cells(self) -> int:
        """Logprobs that the answer holds, at most."""
        width = self.targets.shape[1] if self.targets else 0
        return self.tokens * (1 + self.top_k + width) if self.anything else 0

    def table(self) -> Targets | None:
        """Raises RequestError for a table that does not fill its shape."""
        return None if self.targets is None else Targets.of(self.targets, self.vocabulary)

    def first(self, table: Targets | None) -> int:
        """The first position that must be scored; the prompt's length where none is."""
        plain = self.logprobs_from if self.logprobs or self.top_k else self.tokens
        return min(plain, table.first() if table else self.tokens)

    def asks(self, prompt: list[int], table: Targets | None, images: Images) -> list[ScoreAsk]:
        """Requests to the trainer for these scores: one pass, or none."""
        if (first := self.first(table)) == self.tokens:
            return []
        ids = table and tuple(map(tuple, table.ids[first - 1 :].clip(min=0).tolist()))
        return [ScoreAsk(tuple(prompt), first, ids, self.top_k, images)]

    def scores(self, table: Targets | None, told: Sequence[TokenLogprobs]) -> pb.SampleResponse:
        """Convert the answers to `asks` to the wire's shapes; completions are added later."""
        n, first, since = self.tokens, self.first(table), self.logprobs_from
        own = np.full(n, np.nan, np.float32)
        top_ids = np.zeros((n, self.top_k), np.int32)
        top = np.full((n, self.top_k), NOT_SCORED, np.float32)
        full = np.zeros((0, 0) if table is None else table.ids.shape, np.float32)
        for read in told:
            if self.logprobs or self.top_k:
                own[since:] = read.logprobs[since - first :]
                top_ids[since:] = read.topk_ids[since - first :]
                top[since:] = read.topk_logprobs[since - first :]
            if table is not None:
                full[first - 1 :] = read.targets
        out = pb.SampleResponse()
        if self.logprobs:
            out.prompt_logprobs = own.tobytes()
        if self.top_k:
            fill_topk(out.topk_prompt_logprobs, top_ids, top)
        if table is not None:
            out.target_prompt_logprobs.CopyFrom(table.filled(full))
        return out
