"""The judge's endpoints: the backend's base model, or any OpenAI-compatible server.

Rule: all votes on one case are one request (n = m) where the endpoint allows it, so that the prompt
is computed once. An answer becomes n texts or a `JudgeError`; it is read within limits of size and
time. A text that was cut off ends in `CUT`.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol
from urllib.parse import urlsplit

import httpx

from tinker_claw.config.settings import JudgeSettings
from tinker_claw.errors import (
    AlignmentError,
    BackendError,
    GoneError,
    JudgeError,
    OutageError,
    RequestError,
    first_cause,
)
from tinker_claw.judge.prompts import CUT
from tinker_claw.judge.styles import (
    REFUSALS,
    TEMPERATURE,
    address_of,
    body_of,
    refused,
    texts_of,
)
from tinker_claw.origin import is_loopback
from tinker_claw.policy import Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.retry import Backoff
from tinker_claw.telemetry import log
from tinker_claw.types import Completion, Message, SamplingParams, StopReason, Tokens

ANSWER_TOKENS: Final = 4096
"""Most tokens of an answer, thinking included."""
ANSWER_S: Final = 120.0
"""Seconds for one answer of an endpoint: room for thousands of thinking tokens and for queueing."""
RETRIES = Backoff(first_s=0.5, longest_s=10.0, jitter=0.5, attempts=6, within_s=120.0)
"""Retries of one question when the endpoint gives no answer or asks to be called again."""
_ENVELOPE_BYTES: Final = 65_536
_TOKEN_BYTES: Final = 64
"""Bytes of an answer per token allowed: enough for escaped text and the thinking beside it."""
_SECRET: Final = re.compile(r"(?<=://)[^/]*@|\?.*")
"""Parts of a URL that may hold a key; errors and events leave them out."""


class Endpoint(Protocol):
    """Anything that answers a chat prompt several times."""

    async def answers(self, messages: Sequence[Message], n: int) -> list[str]:
        """Return n independent answers.

        Raises:
            JudgeError: it could not be asked, or did not answer any retry.
            OutageError: the service that has the judging model is away.
        """
        ...


class SamplerEndpoint:
    """The frozen base model of the backend as the judge."""

    def __init__(
        self,
        sampler: Sampler,
        renderer: Renderer,
        context_tokens: int = sys.maxsize,
        *,
        answer_tokens: int = ANSWER_TOKENS,
    ) -> None:
        """`context_tokens`: most tokens of a question and its answer."""
        self._sampler = sampler
        self._renderer = renderer
        self._answer_tokens = answer_tokens
        self._context_tokens = context_tokens

    async def answers(self, messages: Sequence[Message], n: int) -> list[str]:
        try:
            prompt = (await self._renderer.prompt_aside(messages)).tokens
            room = max(1, self._context_tokens - len(prompt))
            params = SamplingParams(
                max_tokens=min(self._answer_tokens, room),
                temperature=TEMPERATURE,
                stop_tokens=self._renderer.stop_tokens,
            )
            completions = await self._sampler.sample(prompt, params, n)
        except OutageError:
            raise
        except GoneError as error:  # no question is to blame
            raise OutageError(str(error)) from error
        except (AlignmentError, BackendError, RequestError) as error:
            raise JudgeError(f"the base model could not judge: {error}") from error
        return [self._text(done, prompt) for done in completions]

    def _text(self, done: Completion, prompt: Tokens) -> str:
        """Return the answer without its thinking; empty where the thinking never ended."""
        text = self._renderer.parse(done.tokens, prompt).text
        return text if done.stop_reason is StopReason.STOP else text + CUT


class _Again(Exception):
    """Raised when a retry may succeed."""


class HttpEndpoint(AbstractAsyncContextManager["HttpEndpoint"]):
    """An OpenAI-compatible server as the judge."""

    def __init__(
        self,
        url: str,
        settings: JudgeSettings,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        answer_s: float = ANSWER_S,
        answer_tokens: int = ANSWER_TOKENS,
        retries: Backoff = RETRIES,
    ) -> None:
        key = settings.judge_api_key
        headers = httpx.Headers({"accept-encoding": "identity"})
        if key is not None:
            headers["authorization"] = f"Bearer {key.get_secret_value()}"
        # Last, so that they can replace the key's header.
        headers.update({n: value.get_secret_value() for n, value in settings.headers.items()})
        self._model = settings.asked_model
        self._answer_s, self._answer_tokens = answer_s, answer_tokens
        self._asked_at = address_of(url)
        self._url = _SECRET.sub("", self._asked_at)
        self._minimal = False
        """Whether it has refused the full body, and answered the same question without."""
        if transport is None and is_loopback(urlsplit(url).hostname or ""):
            transport = httpx.AsyncHTTPTransport()  # given one, httpx looks for no proxies
        self._client = httpx.AsyncClient(transport=transport, timeout=answer_s, headers=headers)
        self._retries = retries

    async def answers(self, messages: Sequence[Message], n: int) -> list[str]:
        answers: list[str] = []
        while (left := n - len(answers)) > 0:  # a server may honour n in part, or not at all
            sizes = [1] * left if self._minimal else [left]
            try:
                async with asyncio.TaskGroup() as group:
                    asked = [group.create_task(self._insist(messages, size)) for size in sizes]
            except ExceptionGroup as failed:
                raise first_cause(failed) from failed
            answers += [text for one in asked for text in one.result()]
        return answers[:n]

    async def _insist(self, messages: Sequence[Message], n: int) -> list[str]:
        try:
            return await self._retries.call(lambda: self._ask(messages, n), _Again)
        except _Again as error:
            raise JudgeError(f"the judge at {self._url} does not answer: {error}") from error

    async def _ask(self, messages: Sequence[Message], n: int) -> list[str]:
        """Ask once for n answers; for one, with the minimal body, after a refusal of the full one,
        and from then on if that succeeds."""
        minimal = self._minimal
        status, content = await self._post(messages, n, minimal=minimal)
        if status in REFUSALS and not minimal:
            minimal = True
            status, content = await self._post(messages, n, minimal=True)
        if not 200 <= status < 300:
            raise JudgeError(refused(status, content, self._url))
        texts = self._read(content)
        if minimal and not self._minimal:
            self._minimal = True
            log.info("judge.adapted", url=self._url)
        return texts

    async def _post(
        self, messages: Sequence[Message], n: int, *, minimal: bool
    ) -> tuple[int, bytes]:
        body = body_of(self._model, messages, n, self._answer_tokens, minimal=minimal)
        most = _ENVELOPE_BYTES + n * self._answer_tokens * _TOKEN_BYTES
        try:
            # httpx's own timeouts restart with every chunk of an answer.
            async with (
                asyncio.timeout(self._answer_s),
                self._client.stream("POST", self._asked_at, json=body) as response,
            ):
                if response.status_code in (408, 429) or response.status_code >= 500:
                    raise _Again(f"HTTP {response.status_code}")
                return response.status_code, await self._content(response, most)
        except TimeoutError as error:
            raise _Again(f"no whole answer within {self._answer_s:g} s") from error
        except httpx.HTTPError as error:
            raise _Again(f"{type(error).__name__} {error}".strip()) from error

    def _read(self, content: bytes) -> list[str]:
        try:
            texts = texts_of(json.loads(content))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            # Without the error's message, which may quote the answer.
            raise JudgeError(
                f"the judge at {self._url} sent no chat completion ({type(error).__name__})"
            ) from error
        if not texts:
            raise JudgeError(f"the judge at {self._url} sent no choices")
        return texts

    async def _content(self, response: httpx.Response, most: int) -> bytes:
        """Read at most `most` bytes of the body; a longer one is an error."""
        content = bytearray()
        async for piece in response.aiter_bytes():
            content += piece
            if len(content) > most:
                raise JudgeError(
                    f"the judge at {self._url} sent more than the {most} bytes that "
                    f"{self._answer_tokens} tokens a vote can have"
                )
        return bytes(content)

    async def __aexit__(self, *failed: object) -> None:
        await self._client.aclose()
