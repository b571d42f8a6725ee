"""Common parts of the servers' dialects: names, checks before asking, and completions.

Rule: an inconsistent answer is an error: fewer logprobs than tokens, fewer candidates than were
asked for, an unexpected end. Nothing is padded, cut or guessed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from local_gpu.sample.http import Deadlines, HttpAnswer, HttpClient, Refusal
from local_gpu.sample.server import ServerInfo
from tinker_claw.errors import (
    BackendError,
    ClawError,
    ContextLengthError,
    OutageError,
    RequestError,
    SamplerError,
)
from tinker_claw.types import Completion, SamplingParams, StopReason, TokenChunk, Tokens

IMPOSSIBLE: Final = -9999.0
"""Number that servers write for a logprob of minus infinity, which JSON cannot express."""
END_TOKEN: Final = "end token"
"""Value of `StreamPiece.ended` for a stop at the model's own end token, not one of the
request's."""
_IDS: Final = 2**31
"""Upper bound of token ids, whatever the model."""
_SEEDS: Final = 2**62
"""Seeds are taken modulo this: servers take 64 bits, and -1 for no seed."""


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """New tokens of one completion since the last piece."""

    index: int
    """Index of the completion, 0 to n - 1."""
    tokens: Sequence[int]
    logprobs: Sequence[float]
    candidates: Sequence[Mapping[int, float]]
    """Per token, logprobs of the likeliest ids and perhaps of the sampled one; () if not asked."""
    ended: str | None
    """Finish reason: "stop", "length", "abort", `END_TOKEN`, or a word of the server's own; None:
    it goes on."""
    cached_tokens: int | None = None
    """Prompt tokens from the cache; None: not reported with this piece."""


class HttpServer(ABC):
    """HTTP client of one server, without its dialect. Every call has a deadline.

    Rule: adapters are known by name, and a name is never loaded with other weights: these servers
    key their prefix caches on the name, and would answer from the cache of the old ones.

    Raises (all calls):
        OutageError: it does not answer, too late, or with 5xx, or lacks the adapter, as it was
            restarted: another server may do it.
        SamplerError, RequestError: it refuses what was asked, or its answer does not add up.
        ContextLengthError: prompt and reply do not fit.
    """

    constrains = False
    """Whether sampling can be constrained to a JSON schema."""
    loads: str
    unloads: str
    """Paths of its routes for adapters."""

    def __init__(
        self, url: str, *, deadlines: Deadlines | None = None, api_key: str | None = None
    ) -> None:
        self._link = HttpClient(url, deadlines or Deadlines(), api_key)
        self.url = self._link.url
        self._info: ServerInfo | None = None

    async def info(self) -> ServerInfo:
        """Ask the server for its description; also the health check."""
        body: Any = None
        for path in ("/health", "/v1/models"):
            answer = await self._link.ask(path)
            if not answer.ok:
                raise self._link.outage(answer)
            body = answer.body
        try:
            self._info = _info(body["data"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise SamplerError(f"The server {self.url} does not say what it serves.") from error
        return self._info

    async def sees(self, image_token: int) -> bool:
        """Try whether the server takes an image, and keeps this token for it."""
        return False

    async def load(self, name: str, folder: Path) -> None:
        """Load an adapter; loading a loaded name again changes nothing.

        Raises:
            BackendError: it cannot be loaded; the server goes on as before.
        """
        # Absolute: the server runs in a working directory of its own.
        body = {"lora_name": name, "lora_path": str(Path.cwd() / folder)}
        answer = await self._change(self.loads, body)
        if answer.ok or name in (await self.info()).adapters:
            return
        missing = answer.status == HTTPStatus.NOT_FOUND
        unseen = " Does it see that folder by the same path, and may it read it?" if missing else ""
        raise BackendError(
            f"The server {self.url} cannot load the adapter in {folder}: {answer.told}.{unseen}"
        )

    async def unload(self, name: str) -> None:
        """Unload an adapter; a missing one is no error."""
        answer = await self._change(self.unloads, {"lora_name": name})
        if not answer.ok and name in (await self.info()).adapters:
            raise BackendError(f"The server {self.url} cannot unload {name!r}: {answer.told}.")

    async def stream(
        self, name: str | None, prompt: Tokens, params: SamplingParams
    ) -> AsyncGenerator[TokenChunk]:
        """Sample under an adapter, or the base (None); closing the iterator aborts it there."""
        async with aclosing(self._chunks(name, prompt, params, 1)) as chunks:
            async for _, chunk in chunks:
                yield chunk

    async def sample(
        self, name: str | None, prompt: Tokens, params: SamplingParams, n: int
    ) -> list[Completion]:
        """n completions in one request; with a seed, completion i is drawn with seed + i."""
        # At temperature 0 all are the same; servers refuse to draw it twice.
        drawn = n if params.temperature > 0 else 1
        parts: list[list[TokenChunk]] = [[] for _ in range(drawn)]
        async with aclosing(self._chunks(name, prompt, params, drawn)) as chunks:
            async for index, chunk in chunks:
                parts[index].append(chunk)
        completions = [Completion.collect(part, _nth(params, i)) for i, part in enumerate(parts)]
        return completions if drawn == n else completions * n

    async def _change(self, path: str, body: Mapping[str, object]) -> HttpAnswer:
        """Ask it to load or unload an adapter.

        The answer's status says little: vLLM answers 400 for a loaded name, and 500 for some
        damaged files. `info` tells what is loaded, and whether the server is healthy.
        """
        answer = await self._link.ask(path, body, seconds=self._link.deadlines.load_s)
        if answer.away and answer.status != HTTPStatus.INTERNAL_SERVER_ERROR:
            raise self._link.outage(answer)
        if answer.status == HTTPStatus.NOT_FOUND and answer.told == HTTPStatus.NOT_FOUND.phrase:
            raise BackendError(
                f"The server {self.url} loads no adapters: start vLLM with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
            )
        return answer

    def cut(self, why: str) -> None:
        """End every call that waits for the server at this moment as an outage."""
        self._link.cut(why)

    async def aclose(self) -> None:
        await self._link.aclose()

    @abstractmethod
    def _pieces(
        self, name: str | None, prompt: Tokens, params: SamplingParams, n: int, info: ServerInfo
    ) -> AsyncGenerator[StreamPiece]:
        """Ask for n completions and yield their pieces."""
        ...

    async def _chunks(
        self, name: str | None, prompt: Tokens, params: SamplingParams, n: int
    ) -> AsyncGenerator[tuple[int, TokenChunk]]:
        """Yield chunks with their completion's index; the last chunks come at the end, with late
        figures."""
        info = self._info or await self.info()
        readers = [_Reader(self.url, params) for _ in range(n)]
        last: dict[int, TokenChunk] = {}
        cached = 0
        try:
            async with aclosing(self._pieces(name, prompt, params, n, info)) as pieces:
                async for piece in pieces:
                    if type(piece.cached_tokens) is int:  # a malformed count is ignored
                        cached = max(0, min(piece.cached_tokens, len(prompt)))
                    if not piece.tokens and piece.ended is None:
                        continue
                    if piece.index in last or not 0 <= piece.index < n:
                        raise _Odd("goes on after the end")
                    chunk = readers[piece.index].chunk(piece)
                    if chunk.stop_reason is None:
                        yield piece.index, chunk
                    else:
                        last[piece.index] = chunk
            if len(last) < n:
                raise OutageError(f"The server {self.url} broke off a completion.")
        except Refusal as refusal:
            raise self._refused(refusal, name, prompt, params, info) from refusal
        except _Odd as odd:
            raise SamplerError(f"The server {self.url} sent a completion that {odd}.") from odd
        except (
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            AttributeError,
            OverflowError,
        ) as error:
            raise SamplerError(
                f"The server {self.url} sent a completion that cannot be read ({error!r:.200})."
            ) from error
        for index, chunk in last.items():
            yield index, replace(chunk, cached_tokens=cached)

    def _refused(
        self,
        refusal: Refusal,
        name: str | None,
        prompt: Tokens,
        params: SamplingParams,
        info: ServerInfo,
    ) -> ClawError:
        told = refusal.answer.told
        if self._means_not_loaded(refusal):
            self._info = None  # it may have been restarted
            what = f"the adapter {name!r}" if name else f"the model {info.model!r}"
            return OutageError(f"The server {self.url} does not have {what}: {told}.")
        if "context length" in told or "max_model_len" in told:
            return ContextLengthError(len(prompt), params.max_tokens, info.context_tokens)
        if "logprobs" in told and "max allowed" in told:
            told += ". It was started with too small a --max-logprobs"
        return RequestError(f"The server {self.url} refuses the request: {told}.")

    @abstractmethod
    def _means_not_loaded(self, refusal: Refusal) -> bool: ...


class _Odd(Exception):
    """A defect of a completion, as the end of a sentence."""


class _Reader:
    """Checks one completion as it arrives."""

    def __init__(self, url: str, params: SamplingParams) -> None:
        self._url = url
        self._params = params
        self._count = 0
        self._token: int | None = None
        """Last token."""

    def chunk(self, piece: StreamPiece) -> TokenChunk:
        k = self._params.student_topk
        if len(piece.logprobs) != len(piece.tokens):
            raise _Odd(f"has {len(piece.tokens)} tokens with {len(piece.logprobs)} logprobs")
        if not all(type(token) is int and 0 <= token < _IDS for token in piece.tokens):
            raise _Odd("has a token whose id is none")
        if not all(math.isfinite(x) and x > IMPOSSIBLE for x in piece.logprobs):
            raise _Odd("has a logprob that is not finite")
        if k and len(piece.candidates) != len(piece.tokens):
            raise _Odd(f"has {len(piece.tokens)} tokens with {len(piece.candidates)} candidates")
        rows = [_likeliest(row, k) for row in piece.candidates] if k else []
        self._count += len(piece.tokens)
        self._token = piece.tokens[-1] if piece.tokens else self._token
        return TokenChunk(
            tokens=tuple(piece.tokens),
            logprobs=tuple(piece.logprobs),
            topk_ids=tuple(tuple(id for id, _ in row) for row in rows),
            topk_logprobs=tuple(tuple(x for _, x in row) for row in rows),
            stop_reason=self._reason(piece.ended),
        )

    def _reason(self, ended: str | None) -> StopReason | None:
        if ended is None:
            return None
        if ended == "stop" and self._token in self._params.stop_tokens:
            return StopReason.STOP
        if ended == END_TOKEN:
            return StopReason.STOP
        if ended == "length" and self._count == self._params.max_tokens:
            return StopReason.LENGTH
        if ended == "abort":
            raise OutageError(f"The server {self._url} gave up a completion.")
        raise _Odd(f"ends ({ended}) after {self._count} tokens, where nobody asked it to")


def seed_of(params: SamplingParams) -> int | None:
    return None if params.seed is None else params.seed % _SEEDS


def _nth(params: SamplingParams, i: int) -> SamplingParams:
    return params if params.seed is None else replace(params, seed=params.seed + i)


def _likeliest(row: Mapping[int, float], k: int) -> list[tuple[int, float]]:
    if len(row) < k:
        raise _Odd(f"has {len(row)} candidates of {k} for a token")
    if not all(type(id) is int and 0 <= id < _IDS and math.isfinite(x) for id, x in row.items()):
        raise _Odd("has a candidate that is none")
    # The sampled token stands first; it is dropped where it is not among the k.
    return sorted(row.items(), key=lambda pair: -pair[1])[:k]


def _info(cards: Sequence[Mapping[str, Any]]) -> ServerInfo:
    base, *_ = [card for card in cards if not card.get("parent")]
    return ServerInfo(
        model=str(base["id"]),
        context_tokens=int(base["max_model_len"]),
        adapters=frozenset(str(card["id"]) for card in cards if card.get("parent")),
    )
