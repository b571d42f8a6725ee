"""Who is asked: the backend's base model, or any OpenAI-compatible endpoint.

Rule: all votes on one case are one request (n = m), so that the prompt is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

import httpx
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential_jitter,
)

from tinker_claw.config import Judge as JudgeSettings
from tinker_claw.errors import (
    AlignmentError,
    BackendError,
    JudgeError,
    OutageError,
    RequestError,
)
from tinker_claw.policy import Sampler
from tinker_claw.render import Renderer
from tinker_claw.types import Message, SamplingParams

MAX_ATTEMPTS = 6
MAX_RETRY_S = 120.0


class Endpoint(Protocol):
    """Anything that answers a chat prompt several times."""

    async def answers(self, messages: Sequence[Message], n: int) -> list[str]:
        """n independent answers.

        Raises:
            JudgeError: it could not be asked, after all retries.
            OutageError: the service that has the judging model is away.
        """
        ...

    async def aclose(self) -> None: ...


class SamplerEndpoint:
    """The frozen base model of the backend as the judge."""

    def __init__(self, sampler: Sampler, renderer: Renderer, settings: JudgeSettings) -> None:
        self._sampler = sampler
        self._renderer = renderer
        self._settings = settings

    async def answers(self, messages: Sequence[Message], n: int) -> list[str]:
        params = SamplingParams(
            max_tokens=self._settings.prm_max_tokens,
            temperature=self._settings.prm_temperature,
            stop_tokens=self._renderer.stop_tokens,
        )
        try:
            prompt = self._renderer.prompt(messages, None).tokens
            completions = await self._sampler.sample(prompt, params, n)
        except OutageError:
            raise
        except (AlignmentError, BackendError, RequestError) as error:
            raise JudgeError(f"the base model could not judge: {error}") from error
        return [self._renderer.parse(done.tokens, prompt).text for done in completions]

    async def aclose(self) -> None:
        """Nothing to free: the sampler belongs to the trainer."""


class _Again(Exception):
    """The endpoint may answer if it is asked again."""


class HttpEndpoint:
    """An OpenAI-compatible server as the judge."""

    def __init__(
        self,
        url: str,
        settings: JudgeSettings,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        longest_wait_s: float = 10.0,
    ) -> None:
        key = settings.judge_api_key
        self._settings = settings
        self._url = url.rstrip("/") + "/chat/completions"
        self._client = httpx.AsyncClient(
            transport=transport,
            timeout=settings.judge_timeout_s,
            headers={"Authorization": f"Bearer {key.get_secret_value()}"} if key else None,
        )
        self._retry = AsyncRetrying(
            retry=retry_if_exception_type(_Again),
            wait=wait_exponential_jitter(
                multiplier=0.2, max=longest_wait_s, jitter=min(1.0, longest_wait_s)
            ),
            stop=stop_after_attempt(MAX_ATTEMPTS) | stop_after_delay(MAX_RETRY_S),
            reraise=True,
        )

    async def answers(self, messages: Sequence[Message], n: int) -> list[str]:
        answers: list[str] = []
        while len(answers) < n:  # a server may honour n only in part, or not at all
            try:
                # Copied, because a Retrying keeps the state of the one call it is in.
                answers += await self._retry.copy()(self._ask, messages, n - len(answers))
            except _Again as error:
                raise JudgeError(f"the judge at {self._url} does not answer: {error}") from error
        return answers[:n]

    async def _ask(self, messages: Sequence[Message], n: int) -> list[str]:
        body = {
            "model": self._settings.judge_model,
            "messages": list(messages),
            "n": n,
            "temperature": self._settings.prm_temperature,
            "max_tokens": self._settings.prm_max_tokens,
        }
        try:
            response = await self._client.post(self._url, json=body)
        except httpx.TransportError as error:
            raise _Again(f"{type(error).__name__} {error}".strip()) from error
        if response.status_code in (408, 429) or response.status_code >= 500:
            raise _Again(f"HTTP {response.status_code}")
        if not response.is_success:
            raise JudgeError(_refusal(response, self._url))
        return _texts(response, self._url)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> HttpEndpoint:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def _refusal(response: httpx.Response, url: str) -> str:
    """Why, where that is about key, address or model; other answers may repeat a user's words."""
    told = f": {response.text[:200]}" if response.status_code in (401, 403, 404) else ""
    return f"the judge at {url} refuses (HTTP {response.status_code}){told}"


def _texts(response: httpx.Response, url: str) -> list[str]:
    try:
        choices: list[dict[str, Any]] = response.json()["choices"]
        texts = [str(choice["message"]["content"] or "") for choice in choices]
    except (ValueError, KeyError, TypeError) as error:
        raise JudgeError(f"the judge at {url} sent no chat completion: {error!r}") from error
    if not texts:
        raise JudgeError(f"the judge at {url} sent no choices")
    return texts
