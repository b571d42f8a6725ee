"""Who is asked: the backend's base model, or any OpenAI-compatible endpoint.

Rule: all votes on one case are one request (n = m), so that the prompt is computed once. Whatever
an endpoint sends is n texts or a `JudgeError`; it is read within bounds of size and time.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Protocol, cast

import httpx

from tinker_claw.config.settings import JudgeSettings
from tinker_claw.errors import AlignmentError, BackendError, JudgeError, OutageError, RequestError
from tinker_claw.policy import Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.retry import Backoff
from tinker_claw.types import Message, SamplingParams

ANSWER_S: Final = 120.0
"""How long one answer of an endpoint may take: thousands of tokens of thinking, and a wait."""
RETRIES = Backoff(first_s=0.5, longest_s=10.0, jitter=0.5, attempts=6, within_s=120.0)
"""Of one question, where the endpoint gives no answer or asks to come again."""
_ENVELOPE_BYTES: Final = 65_536
_TOKEN_BYTES: Final = 64
"""Of an answer, per token that it may have: escaped text and the thinking beside it fit."""
_GZIP_OR_ZLIB: Final = 47
"""zlib's word for either header."""


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
        answer_s: float = ANSWER_S,
        retries: Backoff = RETRIES,
    ) -> None:
        key = settings.judge_api_key
        self._settings = settings
        self._answer_s = answer_s
        self._url = url.rstrip("/") + "/chat/completions"
        self._client = httpx.AsyncClient(
            transport=transport,
            timeout=answer_s,
            headers={"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}),
        )
        self._retries = retries

    async def answers(self, messages: Sequence[Message], n: int) -> list[str]:
        answers: list[str] = []
        while len(answers) < n:  # a server may honour n only in part, or not at all
            try:
                left = n - len(answers)
                answers += await self._retries.call(
                    lambda left=left: self._ask(messages, left), _Again
                )
            except _Again as error:
                raise JudgeError(f"the judge at {self._url} does not answer: {error}") from error
        return answers[:n]

    async def _ask(self, messages: Sequence[Message], n: int) -> list[str]:
        body = {
            "model": self._settings.asked_model,
            "messages": list(messages),
            "n": n,
            "temperature": self._settings.prm_temperature,
            "max_tokens": self._settings.prm_max_tokens,
        }
        most = _ENVELOPE_BYTES + n * self._settings.prm_max_tokens * _TOKEN_BYTES
        try:
            # httpx's own limits start anew with every piece of an answer.
            async with (
                asyncio.timeout(self._answer_s),
                self._client.stream("POST", self._url, json=body) as response,
            ):
                if response.status_code in (408, 429) or response.status_code >= 500:
                    raise _Again(f"HTTP {response.status_code}")
                content = await self._content(response, most)
        except TimeoutError as error:
            raise _Again(f"no whole answer within {self._answer_s:g} s") from error
        except httpx.HTTPError as error:
            raise _Again(f"{type(error).__name__} {error}".strip()) from error
        if not response.is_success:
            raise JudgeError(_refusal(response.status_code, content, self._url))
        return _texts(content, self._url)

    async def _content(self, response: httpx.Response, most: int) -> bytes:
        """The body, plain; `most` bounds it before and after it is unpacked."""
        content = bytearray()
        # Not by `aiter_bytes`: it unpacks a piece before anybody can look how much that makes.
        async for piece in response.aiter_raw():
            content += piece
            if len(content) > most:
                raise self._too_long(most)
        packed = response.headers.get("content-encoding", "identity").strip().lower()
        if packed in ("", "identity"):
            return bytes(content)
        if packed not in ("gzip", "x-gzip", "deflate"):
            raise JudgeError(
                f"the judge at {self._url} packs its answers ({packed[:20]}) although it was asked "
                "not to"
            )
        unpacking = zlib.decompressobj(_GZIP_OR_ZLIB)
        try:
            plain = unpacking.decompress(bytes(content), most + 1)
        except zlib.error as error:
            raise JudgeError(
                f"the judge at {self._url} sent what cannot be unpacked as {packed}"
            ) from error
        if len(plain) > most:
            raise self._too_long(most)
        return plain

    def _too_long(self, most: int) -> JudgeError:
        return JudgeError(
            f"the judge at {self._url} sent more than the {most} bytes that "
            f"{self._settings.prm_max_tokens} tokens a vote can have (--prm-max-tokens)"
        )

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


def _refusal(status: int, content: bytes, url: str) -> str:
    """Why, where that is about key, address or model; other answers may repeat a user's words."""
    words = " ".join(content.decode(errors="replace").split())[:200]
    told = f": {words}" if status in (401, 403, 404) else ""
    return f"the judge at {url} refuses (HTTP {status}){told}"


def _texts(content: bytes, url: str) -> list[str]:
    try:
        choices = json.loads(content)["choices"]
        if not isinstance(choices, list):
            raise TypeError("choices are no list")
        texts = [_text(choice) for choice in cast("list[Any]", choices)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        # Not the error's own words: they may quote the answer.
        raise JudgeError(
            f"the judge at {url} sent no chat completion ({type(error).__name__})"
        ) from error
    if not texts:
        raise JudgeError(f"the judge at {url} sent no choices")
    return texts


def _text(choice: Any) -> str:
    """What a choice says; "" where it says nothing, which is a vote that cannot be read."""
    content = choice["message"]["content"]
    if content is not None and not isinstance(content, str):
        raise TypeError("content is no text")
    # Half of a surrogate pair, as an answer that is cut within an emoji ends, is no text that can
    # be kept.
    return (content or "").encode(errors="replace").decode()
