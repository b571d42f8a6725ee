"""Client of the gateway: chat requests by the openai SDK, /healthz and /metrics.

Rule: answers are checked here, once; any fault in them is a `DemoError`. Nothing is retried,
because the gateway does that.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError
from prometheus_client.parser import text_string_to_metric_families

from examples.demo import DemoError

MODEL = "demo"
MAX_TOKENS = 128
"""Most tokens of a reply of the demo's model."""
ANSWER_S = 1800.0
"""Seconds until a request is given up: a real model on two busy cores has taken over 300 s, and a
reply may wait for a step."""
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
    max_tokens: int | None = None
    """Most tokens of the reply; None: the client's."""


class Reply(NamedTuple):
    """A reply, and whether the model ended it by itself."""

    text: str
    ended: bool


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


def figures_from(exposition: str) -> Figures:
    """Read the figures that the demo shows; a missing one is 0."""
    verdicts, hints = dict.fromkeys(_VERDICTS.values(), 0), 0
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == "tinker_claw_verdicts_total":
                verdicts[_VERDICTS[sample.labels["value"]]] += int(sample.value)
            elif sample.name == "tinker_claw_hints_total":
                hints += int(sample.value)
    return Figures(verdicts, hints)


@asynccontextmanager
async def connected(
    url: str,
    key: str | None = None,
    model: str = MODEL,
    max_tokens: int = MAX_TOKENS,
) -> AsyncGenerator[Client]:
    """Make a client with this key for the gateway at this address, which does not end in /v1."""
    http = DefaultAsyncHttpxClient(trust_env=False)
    async with AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key=key or "none",
        timeout=ANSWER_S,
        max_retries=0,
        http_client=http,
    ) as sdk:
        yield Client(sdk, model, max_tokens)


class Client:
    """Client of the gateway. Raises `DemoError` for anything but a proper answer."""

    def __init__(self, sdk: AsyncOpenAI, model: str = MODEL, max_tokens: int = MAX_TOKENS) -> None:
        self._sdk = sdk
        self._model, self._max_tokens = model, max_tokens

    async def ask(self, request: Request) -> Reply:
        """Send a chat request and return the reply."""
        model, version = self._model, request.version
        fields: dict[str, Any] = {
            "model": model if version is None else f"{model}@v{version}",
            "messages": request.messages,
            "max_tokens": request.max_tokens or self._max_tokens,
            "stream": request.stream,
            "extra_headers": {"X-Session-Id": request.session, "X-Turn-Type": request.kind},
        }
        if request.last:
            fields["extra_headers"]["X-Session-Done"] = "1"
        if request.seed is not None:
            fields |= {"seed": request.seed, "temperature": 1.0}
        try:
            answer: Any = await self._sdk.chat.completions.create(**fields)
            return await _streamed(answer) if request.stream else _whole(answer)
        except APIStatusError as error:
            answered = f"{error.status_code}: {error.response.text[:300]}"
            raise DemoError(f"the gateway answered with {answered}") from error
        except (OpenAIError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise DemoError(f"the gateway gave no reply: {error}") from error

    async def health(self) -> Health:
        fields = await self._get("/healthz", object)
        try:
            return Health(**{name: fields[name] for name in Health.__dataclass_fields__})
        except (KeyError, TypeError) as error:
            raise DemoError(f"/healthz said something else: {fields}") from error

    async def figures(self) -> Figures:
        return figures_from(await self._get("/metrics", str))

    async def _get(self, path: str, kind: type[Any]) -> Any:
        try:
            return await self._sdk.get(str(self._sdk.base_url.join(path)), cast_to=kind)
        except OpenAIError as error:
            raise DemoError(f"the gateway did not answer {path}: {error}") from error


def _whole(answer: Any) -> Reply:
    choice = answer.choices[0]
    return Reply(choice.message.content or "", choice.finish_reason == "stop")


async def _streamed(answer: Any) -> Reply:
    parts, reason = list[str](), None
    async for chunk in answer:
        for choice in chunk.choices:
            parts.append(choice.delta.content or "")
            reason = choice.finish_reason or reason
    if reason is None:
        raise DemoError("a streamed reply broke off before its end")
    return Reply("".join(parts), reason == "stop")
