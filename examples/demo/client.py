"""Client of the gateway for the demo: chat requests, /healthz and /metrics.

Rule: answers are checked here, once; any fault in them is a `DemoError`. Nothing is retried,
because the gateway does that.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

import httpx
from prometheus_client.parser import text_string_to_metric_families

from examples.demo import DemoError

MODEL = "demo"
MAX_TOKENS = 128
"""Most tokens of a reply of the demo's model."""
ANSWER_S = 900.0
"""Seconds until a request for a reply is given up; a real model on two busy cores has taken over
300 s."""
_VERDICTS = {"1": "+1", "0": "0", "-1": "-1", "none": "none"}


@dataclass(frozen=True, slots=True)
class Request:
    """One chat request, as an agent sends it."""

    messages: tuple[Mapping[str, str], ...]
    session: str
    kind: Literal["main", "side"] = "main"
    version: int | None = None
    """Number of the version that answers; None: the one that serves."""
    last: bool = False
    """Whether no request of this session follows."""
    stream: bool = False
    seed: int | None = None
    """Seed for sampling at temperature 1, so that the reply can be reproduced; None: not set."""

    def headers(self) -> dict[str, str]:
        done = {"X-Session-Done": "1"} if self.last else {}
        return {"X-Session-Id": self.session, "X-Turn-Type": self.kind, **done}

    def body(self, model: str, max_tokens: int) -> dict[str, Any]:
        seeded = {} if self.seed is None else {"seed": self.seed, "temperature": 1.0}
        return {
            "model": model if self.version is None else f"{model}@v{self.version}",
            "messages": list(self.messages),
            "max_tokens": max_tokens,
            "stream": self.stream,
            **seeded,
        }


@dataclass(frozen=True, slots=True)
class Health:
    """Answer of /healthz."""

    status: str
    policy_version: int
    """Version that serves; in a run that began fresh this is also the number of optimizer steps."""
    samples_waiting: int
    batch_size: int
    learner: str
    last_error: str | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures from /metrics, counted since the server started."""

    verdicts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of turns by verdict: `+1`, `0`, `-1`, and `none` for no valid vote."""
    hints: int = 0
    """Number of turns with a hint."""
    steps: int = 0
    """Number of optimizer steps that were committed."""
    usd: float = 0.0
    """Dollars billed by a service; 0 where none is used."""


def figures_from(exposition: str) -> Figures:
    """Read the figures that the demo shows; a missing one is 0."""
    samples = [
        sample
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if isfinite(sample.value)  # a gauge without a figure is NaN
    ]

    def total(name: str, **labels: str) -> float:
        """Sum the samples with these labels, whatever others they have."""
        return sum(
            sample.value
            for sample in samples
            if sample.name == f"tinker_claw_{name}_total"
            and labels.items() <= sample.labels.items()
        )

    return Figures(
        verdicts={label: int(total("verdicts", value=value)) for value, label in _VERDICTS.items()},
        hints=int(total("hints")),
        steps=int(total("steps", status="committed")),
        usd=total("spent_usd"),
    )


@asynccontextmanager
async def connected(
    url: str,
    key: str | None = None,
    model: str = MODEL,
    max_tokens: int = MAX_TOKENS,
) -> AsyncGenerator[Client]:
    """Make a client with this key for the gateway at this address, which does not end in /v1."""
    http = httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(ANSWER_S),
        trust_env=False,
        headers={} if key is None else {"Authorization": f"Bearer {key}"},
    )
    async with http:
        yield Client(http, model, max_tokens)


class Client:
    """Client of the gateway. Raises `DemoError` for anything but a proper answer."""

    def __init__(
        self, http: httpx.AsyncClient, model: str = MODEL, max_tokens: int = MAX_TOKENS
    ) -> None:
        self._http = http
        self._model, self._max_tokens = model, max_tokens

    async def ask(self, request: Request) -> str:
        """Send a chat request and return the text of the reply."""
        return await (self._streamed(request) if request.stream else self._whole(request))

    async def health(self) -> Health:
        answer = await self._get("/healthz")
        try:
            fields = answer.json()
            return Health(**{name: fields[name] for name in Health.__dataclass_fields__})
        except (ValueError, KeyError, TypeError) as error:
            raise DemoError(f"/healthz said something else: {_short(answer.text)}") from error

    async def figures(self) -> Figures:
        return figures_from((await self._get("/metrics")).text)

    async def _get(self, path: str) -> httpx.Response:
        with _mapped(path):
            answer = await self._http.get(path)
        return _good(answer, answer.text)

    async def _whole(self, request: Request) -> str:
        with _mapped("chat"):
            answer = await self._http.post(
                "/v1/chat/completions", json=self._body(request), headers=request.headers()
            )
        _good(answer, answer.text)
        return _content(answer.text, "message")

    async def _streamed(self, request: Request) -> str:
        parts: list[str] = []
        finished = False
        async with self._stream(request) as answer:
            async for line in answer.aiter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                finished = finished or data == "[DONE]"
                if data and data != "[DONE]":
                    parts.append(_content(data, "delta"))
        if not finished:
            raise DemoError("a streamed reply broke off before its end")
        return "".join(parts)

    def _body(self, request: Request) -> dict[str, Any]:
        return request.body(self._model, self._max_tokens)

    @asynccontextmanager
    async def _stream(self, request: Request) -> AsyncGenerator[httpx.Response]:
        with _mapped("chat"):
            async with self._http.stream(
                "POST", "/v1/chat/completions", json=self._body(request), headers=request.headers()
            ) as answer:
                if not answer.is_success:
                    _good(answer, (await answer.aread()).decode(errors="replace"))
                yield answer


@contextmanager
def _mapped(what: str) -> Generator[None]:
    """Turn httpx's errors into the demo's."""
    try:
        yield
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise DemoError(f"the gateway did not answer a {what} request: {reason}") from error


def _good(answer: httpx.Response, text: str) -> httpx.Response:
    if not answer.is_success:
        path = answer.request.url.path
        raise DemoError(f"the gateway answered {path} with {answer.status_code}: {_short(text)}")
    return answer


def _content(data: str, part: Literal["message", "delta"]) -> str:
    """Text of a completion or of one chunk of it; "" if a chunk has none."""
    try:
        choices = json.loads(data)["choices"]
        return str(choices[0][part].get("content") or "") if choices else ""
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DemoError(f"the gateway sent no completion: {_short(data)}") from error


def _short(text: str) -> str:
    return " ".join(text.split())[:300] or "(nothing)"
