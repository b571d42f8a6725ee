"""vLLM's dialect (0.32): `/v1/completions` with token ids in and out.

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
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from json import loads
from typing import Any, Final

from local_gpu.sample.dialect import HttpServer, StreamPiece, seed_of
from local_gpu.sample.http import Refusal
from local_gpu.sample.server import ServerInfo
from tinker_claw.types import PlacedImage, SamplingParams, Tokens

_ID: Final = "token_id:"
"""Prefix of a token id that stands in place of the token's text."""
_GENERATE: Final = "/inference/v1/generate"
_WHITE: Final = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQAAAACCEkxzAAAAFElEQVR42mP8zwABTAyjjFEGyQwAzx8Bf7QK4E8A"
    "AAAASUVORK5CYII="
)
"""A white square of 64 pixels, as PNG."""
_NOTHING: Final[Mapping[str, Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}


class VllmServer(HttpServer):
    """Implements `Server` over vLLM's HTTP routes."""

    constrains = True
    loads, unloads = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

    async def _pieces(
        self, name: str | None, prompt: Tokens, params: SamplingParams, n: int, info: ServerInfo
    ) -> AsyncGenerator[StreamPiece]:
        model, path, read = name or info.model, "/v1/completions", _piece
        if params.images:
            path, read = _GENERATE, _generated
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

    async def sees(self, image_token: int) -> bool:
        image = PlacedImage(0, 1, _WHITE, "png")
        params = SamplingParams(max_tokens=1, images=(image,))
        body = _request((await self.info()).model, (image_token,), params, 1)
        told = await self._link.ask(
            _GENERATE, body | {"stream": False}, seconds=self._link.deadlines.first_token_s
        )
        computed = told.body.get("prompt_token_ids") if isinstance(told.body, dict) else None
        return told.ok and bool(computed) and set(computed) == {image_token}

    def _means_not_loaded(self, refusal: Refusal) -> bool:
        return refusal.answer.status == HTTPStatus.NOT_FOUND


def _request(model: str, prompt: Tokens, params: SamplingParams, n: int) -> dict[str, object]:
    """Body of a request to `/v1/completions`, or with images to `/inference/v1/generate`."""
    drawn, k = _drawn_by(params, n), params.student_topk
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


def _drawn_by(params: SamplingParams, n: int) -> dict[str, object]:
    # Left out where it is not needed: not every release accepts null.
    fits: dict[str, object] = {}
    if params.schema is not None:
        fits["structured_outputs"] = {"json": loads(params.schema)}
    return fits | {
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
        "seed": seed_of(params),
        "ignore_eos": True,  # the model's own end tokens are among ours, or are none
        "stop_token_ids": list(params.stop_tokens),
        "skip_special_tokens": False,
    }


def _piece(choice: Mapping[str, Any]) -> StreamPiece:
    tokens: list[int] = choice["token_ids"] or []
    told: Mapping[str, Any] = choice["logprobs"] or _NOTHING
    if [_number(name) for name in told["tokens"]] != tokens:
        raise ValueError("logprobs of other tokens")
    return StreamPiece(
        index=choice["index"],
        tokens=tokens,
        logprobs=told["token_logprobs"],
        candidates=[
            {_number(name): logprob for name, logprob in row.items()}
            for row in told["top_logprobs"]
        ],
        ended=choice["finish_reason"],
    )


def _generated(choice: Mapping[str, Any]) -> StreamPiece:
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
            {one["token_id"]: one["logprob"] for one in row["top_logprobs"]} for row in rows
        ],
        ended=choice["finish_reason"],
    )


def _number(name: str) -> int:
    return int(name.removeprefix(_ID))
