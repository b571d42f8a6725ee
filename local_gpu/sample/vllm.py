"""Client of vLLM servers (0.32): `/v1/completions` with token ids in and out.

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-loras 4 \
        --max-lora-rank 32 --logprobs-mode processed_logprobs --generation-config vllm \
        --enable-prompt-tokens-details --scheduling-policy priority --enable-scale-out

A prompt with images goes to `/inference/v1/generate`, which `--enable-scale-out` opens: with one
placeholder token for each image, and the images beside it. The server expands each one and returns
the whole prompt; other tokens than ours are an error.

Without `processed_logprobs`, logprobs at other temperatures than 1 are not those of the
distribution that was sampled. Without `enable-prompt-tokens-details`, no cached tokens are
reported. Without the policy `priority`, people wait behind episodes. At temperature 0 they are
untempered; temperatures between 0 and 0.01 are taken as 0.01. An adapter that is unloaded while in
use goes on serving the requests in flight, and its folder may be read again for them. One engine
per address: of several data-parallel ones, only one would load it.

Rule: every request states every setting that affects sampling, so that no default of the model or
of the server's command line leaks in.

Rule: an inconsistent answer is an error: fewer logprobs than tokens, fewer candidates than were
asked for, an unexpected end. Nothing is padded, cut or guessed.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from local_gpu.sample.http import CompletionRefusal, Deadlines, HttpAnswer, HttpClient
from tinker_claw.errors import (
    BackendError,
    ClawError,
    ConfigError,
    ContextLengthError,
    OutageError,
    RequestError,
    SamplerError,
)
from tinker_claw.tasks import together
from tinker_claw.types import (
    Completion,
    PlacedImage,
    SamplingParams,
    StopReason,
    TokenChunk,
    Tokens,
)

NEVER_LOADED: Final = "tinker-claw-never-loaded"
"""Name for a trial unload: a server that takes no adapters while it runs refuses it."""
_TOKEN_ID_PREFIX: Final = "token_id:"
"""Prefix of a token id that stands in place of the token's text."""
_GENERATE_PATH: Final = "/inference/v1/generate"
_WHITE_PNG: Final = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQAAAACCEkxzAAAAFElEQVR42mP8zwABTAyjjFEGyQwAzx8Bf7QK4E8A"
    "AAAASUVORK5CYII="
)
"""A white square of 64 pixels, as PNG."""
_NO_LOGPROBS: Final[Mapping[str, Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
_MINUS_INFINITY: Final = -9999.0
"""Number that servers write for a logprob of minus infinity, which JSON cannot express."""
_MAX_TOKEN_ID: Final = 2**31
"""Upper bound of token ids, whatever the model."""
_SEED_MODULUS: Final = 2**62
"""Seeds are taken modulo this: servers take 64 bits, and -1 for no seed."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Description of a server by itself."""

    model: str
    """Base model's name, for requests without an adapter."""
    context_tokens: int
    """Longest prompt and reply together, in tokens."""
    adapters: frozenset[str]
    """Names of the loaded adapters."""


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
    """Finish reason: "stop", "length", "abort", or a word of the server's own; None: it goes on."""
    cached_tokens: int | None = None
    """Prompt tokens from the cache; None: not reported with this piece."""


class VllmServer:
    """HTTP client of one server. Every call has a deadline.

    Rule: adapters are known by name, and a name is never loaded with other weights: vLLM keys its
    prefix cache on the name, and would answer from the cache of the old ones.

    Raises (all calls):
        OutageError: it does not answer, too late, or with 5xx, or lacks the adapter, as it was
            restarted: another server may do it.
        SamplerError, RequestError: it refuses what was asked, or its answer does not add up.
        ContextLengthError: prompt and reply do not fit.
    """

    def __init__(
        self, url: str, *, deadlines: Deadlines | None = None, api_key: str | None = None
    ) -> None:
        self._link = HttpClient(url, deadlines or Deadlines(), api_key)
        self.url = self._link.url
        self._info: ServerInfo | None = None

    async def identify(self) -> None:
        """Check that this is vLLM, by its list of models.

        Raises:
            ConfigError: it is something else.
        """
        answer = await self._link.ask("/v1/models")
        if answer.away:
            raise self._link.outage(answer)
        body: Any = answer.body
        try:
            owner: str | None = body["data"][0]["owned_by"]
        except (KeyError, TypeError, IndexError):
            owner = None
        if owner == "tinker-claw":
            raise ConfigError(f"{self.url} is a gateway of this project; give vLLM's address.")
        if owner != "vllm":
            raise ConfigError(
                f"{self.url} is not vLLM, as far as /v1/models says: check the address."
            )

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
        image = PlacedImage(0, 1, _WHITE_PNG, "png")
        params = SamplingParams(max_tokens=1, images=(image,))
        body = _request((await self.info()).model, (image_token,), params, 1)
        answer = await self._link.ask(
            _GENERATE_PATH, body | {"stream": False}, seconds=self._link.deadlines.first_token_s
        )
        computed = answer.body.get("prompt_token_ids") if isinstance(answer.body, dict) else None
        return answer.ok and bool(computed) and set(computed) == {image_token}

    async def load(self, name: str, folder: Path) -> None:
        """Load an adapter; loading a loaded name again changes nothing.

        Raises:
            BackendError: it cannot be loaded; the server goes on as before.
        """
        # Absolute: the server runs in a working directory of its own.
        body = {"lora_name": name, "lora_path": str(Path.cwd() / folder)}
        answer = await self._change("/v1/load_lora_adapter", body)
        if answer.ok or name in (await self.info()).adapters:
            return
        missing = answer.status == HTTPStatus.NOT_FOUND
        unseen = " Does it see that folder by the same path, and may it read it?" if missing else ""
        raise BackendError(
            f"The server {self.url} cannot load the adapter in {folder}: {answer.message}.{unseen}"
        )

    async def unload(self, name: str) -> None:
        """Unload an adapter; a missing one is no error."""
        answer = await self._change("/v1/unload_lora_adapter", {"lora_name": name})
        if not answer.ok and name in (await self.info()).adapters:
            raise BackendError(f"The server {self.url} cannot unload {name!r}: {answer.message}.")

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
        """Sample n completions in one request; with a seed, completion i is drawn with seed + i."""
        # At temperature 0 all are the same; servers refuse to draw it twice.
        drawn = n if params.temperature > 0 else 1
        parts: list[list[TokenChunk]] = [[] for _ in range(drawn)]
        async with aclosing(self._chunks(name, prompt, params, drawn)) as chunks:
            async for index, chunk in chunks:
                parts[index].append(chunk)
        completions = [
            Completion.collect(part, _nth_params(params, i)) for i, part in enumerate(parts)
        ]
        return completions if drawn == n else completions * n

    async def _change(self, path: str, body: Mapping[str, object]) -> HttpAnswer:
        """Ask it to load or unload an adapter.

        The answer's status says little: vLLM answers 400 for a loaded name, and 500 for some
        damaged files. `info` tells what is loaded, and whether the server is healthy.
        """
        answer = await self._link.ask(path, body, seconds=self._link.deadlines.load_s)
        if answer.away and answer.status != HTTPStatus.INTERNAL_SERVER_ERROR:
            raise self._link.outage(answer)
        if answer.status == HTTPStatus.NOT_FOUND and answer.message == HTTPStatus.NOT_FOUND.phrase:
            raise BackendError(
                f"The server {self.url} loads no adapters: start vLLM with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
            )
        return answer

    @property
    def last_token_at(self) -> float:
        """Time of the last token that came for anybody, on the monotonic clock."""
        return self._link.last_event_at

    async def aclose(self) -> None:
        await self._link.aclose()

    async def _pieces(
        self, name: str | None, prompt: Tokens, params: SamplingParams, n: int, info: ServerInfo
    ) -> AsyncGenerator[StreamPiece]:
        """Ask for n completions and yield their pieces."""
        model, path, read = name or info.model, "/v1/completions", _read_piece
        if params.images:
            path, read = _GENERATE_PATH, _read_generated
        body = _request(model, prompt, params, n)
        async with aclosing(self._link.events(path, body)) as events:
            async for event in events:
                if (computed := event.get("prompt_token_ids")) and tuple(computed) != prompt:
                    raise ValueError("an image takes other tokens there than here")
                for choice in event["choices"]:
                    yield read(choice)
                if usage := event.get("usage"):
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                    yield StreamPiece(0, (), (), (), None, cached_tokens=cached)

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
                        raise _Defect("goes on after the end")
                    chunk = readers[piece.index].chunk(piece)
                    if chunk.stop_reason is None:
                        yield piece.index, chunk
                    else:
                        last[piece.index] = chunk
            if len(last) < n:
                raise OutageError(f"The server {self.url} broke off a completion.")
        except CompletionRefusal as refusal:
            raise self._refused(refusal, name, prompt, params, info) from refusal
        except _Defect as defect:
            raise SamplerError(
                f"The server {self.url} sent a completion that {defect}."
            ) from defect
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
        refusal: CompletionRefusal,
        name: str | None,
        prompt: Tokens,
        params: SamplingParams,
        info: ServerInfo,
    ) -> ClawError:
        message = refusal.answer.message
        if refusal.answer.status == HTTPStatus.NOT_FOUND:
            self._info = None  # it may have been restarted
            what = f"the adapter {name!r}" if name else f"the model {info.model!r}"
            return OutageError(f"The server {self.url} does not have {what}: {message}.")
        if "context length" in message or "max_model_len" in message:
            return ContextLengthError(len(prompt), params.max_tokens, info.context_tokens)
        if "logprobs" in message and "max allowed" in message:
            message += ". It was started with too small a --max-logprobs"
        return RequestError(f"The server {self.url} refuses the request: {message}.")


async def connect(urls: Sequence[str], api_key: str | None = None) -> list[VllmServer]:
    """Connect to servers. One that is away does not keep the others from starting.

    Raises:
        ConfigError: one is not vLLM.
        OutageError: none answers.
    """

    async def away(server: VllmServer) -> OutageError | None:
        try:
            await server.identify()
        except OutageError as error:
            return error
        return None

    servers = [VllmServer(url, api_key=api_key) for url in urls]
    try:
        failures = [error for error in await together(map(away, servers)) if error]
        if failures and len(failures) == len(servers):
            raise failures[0]
    except BaseException:
        await together(server.aclose() for server in servers)
        raise
    return servers


class _Defect(Exception):
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
            raise _Defect(f"has {len(piece.tokens)} tokens with {len(piece.logprobs)} logprobs")
        if not all(type(token) is int and 0 <= token < _MAX_TOKEN_ID for token in piece.tokens):
            raise _Defect("has a token whose id is none")
        if not all(math.isfinite(x) and x > _MINUS_INFINITY for x in piece.logprobs):
            raise _Defect("has a logprob that is not finite")
        if k and len(piece.candidates) != len(piece.tokens):
            raise _Defect(f"has {len(piece.tokens)} tokens with {len(piece.candidates)} candidates")
        rows = [_top_candidates(row, k) for row in piece.candidates] if k else []
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
        if ended == "length" and self._count == self._params.max_tokens:
            return StopReason.LENGTH
        if ended == "abort":
            raise OutageError(f"The server {self._url} gave up a completion.")
        raise _Defect(f"ends ({ended}) after {self._count} tokens, where nobody asked it to")


def _nth_params(params: SamplingParams, i: int) -> SamplingParams:
    return params if params.seed is None else replace(params, seed=params.seed + i)


def _top_candidates(row: Mapping[int, float], k: int) -> list[tuple[int, float]]:
    if len(row) < k:
        raise _Defect(f"has {len(row)} candidates of {k} for a token")
    if not all(
        type(id) is int and 0 <= id < _MAX_TOKEN_ID and math.isfinite(x) for id, x in row.items()
    ):
        raise _Defect("has a candidate that is none")
    # The sampled token stands first; it is dropped where it is not among the k.
    return sorted(row.items(), key=lambda pair: -pair[1])[:k]


def _info(cards: Sequence[Mapping[str, Any]]) -> ServerInfo:
    base, *_ = [card for card in cards if not card.get("parent")]
    return ServerInfo(
        model=str(base["id"]),
        context_tokens=int(base["max_model_len"]),
        adapters=frozenset(str(card["id"]) for card in cards if card.get("parent")),
    )


def _request(model: str, prompt: Tokens, params: SamplingParams, n: int) -> dict[str, object]:
    """Body of a request to `/v1/completions`, or with images to `/inference/v1/generate`."""
    drawn, k = _sampling_fields(params, n), params.student_topk
    body: dict[str, object] = {
        "model": model,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": params.cache_salt,
        "priority": 0 if params.person else 1,  # the lower goes first
    }
    if not params.images:
        return (
            drawn
            | body
            | {
                "prompt": list(prompt),
                "logprobs": k,  # and the sampled token's
                "return_tokens_as_token_ids": True,
            }
        )
    ids, done = list[int](), 0
    for image in params.images:
        ids += prompt[done : image.at + 1]
        done = image.at + image.tokens
    urls = [f"data:image/{i.format};base64,{b64encode(i.data).decode()}" for i in params.images]
    # It returns as many of the likeliest as are asked for, the sampled one among them.
    return body | {
        "token_ids": [*ids, *prompt[done:]],
        "content_parts": [{"type": "image_url", "url": url} for url in urls],
        "sampling_params": drawn | {"logprobs": k and k + 1},
    }


def _sampling_fields(params: SamplingParams, n: int) -> dict[str, object]:
    return {
        "n": n,
        "max_tokens": params.max_tokens,
        "min_tokens": 0,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or 0,  # 0 means all
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None if params.seed is None else params.seed % _SEED_MODULUS,
        "ignore_eos": True,  # the model's own end tokens are among ours, or are none
        "stop_token_ids": list(params.stop_tokens),
        "skip_special_tokens": False,
    }


def _read_piece(choice: Mapping[str, Any]) -> StreamPiece:
    tokens: list[int] = choice["token_ids"] or []
    scores: Mapping[str, Any] = choice["logprobs"] or _NO_LOGPROBS
    if [_token_id(name) for name in scores["tokens"]] != tokens:
        raise ValueError("logprobs of other tokens")
    return StreamPiece(
        index=choice["index"],
        tokens=tokens,
        logprobs=scores["token_logprobs"],
        candidates=[
            {_token_id(name): logprob for name, logprob in row.items()}
            for row in scores["top_logprobs"]
        ],
        ended=choice["finish_reason"],
    )


def _read_generated(choice: Mapping[str, Any]) -> StreamPiece:
    """Read a choice of `/inference/v1/generate`."""
    tokens: list[int] = choice["token_ids"] or []
    rows: list[Any] = (choice["logprobs"] or {}).get("content") or []
    if [row["token_id"] for row in rows] != tokens:
        raise ValueError("logprobs of other tokens")
    return StreamPiece(
        index=choice["index"],
        tokens=tokens,
        logprobs=[row["logprob"] for row in rows],
        candidates=[
            {likely["token_id"]: likely["logprob"] for likely in row["top_logprobs"]}
            for row in rows
        ],
        ended=choice["finish_reason"],
    )


def _token_id(name: str) -> int:
    return int(name.removeprefix(_TOKEN_ID_PREFIX))
