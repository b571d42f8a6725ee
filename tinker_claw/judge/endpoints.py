"""The judge's endpoints: the backend's base model, or any OpenAI-compatible server.

Rule: all votes on one case are one request (n = m) where the endpoint allows it, so that the prompt
is computed once. An answer becomes n texts or a `JudgeError`; it is read within limits of size and
time. A text that was cut off ends in `CUT`. No answer is long, but where the model thinks: a judge
that was not asked to and does is found out by its first answer.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain
from typing import Any, Final, Protocol
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
)
from tinker_claw.judge.prompts import CUT, Schema
from tinker_claw.judge.styles import (
    REFUSALS,
    TEMPERATURE,
    VOTES,
    Text,
    address_of,
    body_of,
    refused,
    refused_field,
    response_format,
    texts_of,
)
from tinker_claw.origin import is_loopback
from tinker_claw.policy import Sampler
from tinker_claw.render.renderer import Renderer
from tinker_claw.retry import Backoff
from tinker_claw.tasks import together
from tinker_claw.telemetry import log
from tinker_claw.types import Charge, Message, SamplingParams, StopReason, uncharged

ANSWER_TOKENS: Final = 300
"""Most tokens of an answer."""
THINKING_TOKENS: Final = 4096
"""Most tokens of an answer of a judge that thinks, thinking included."""
ANSWER_S: Final = 3600.0
"""Seconds for one answer: on a processor a long question takes minutes before its first token."""
CONNECT_S: Final = 10.0
RETRIES = Backoff(first_s=0.5, longest_s=10.0, jitter=0.5, attempts=6, within_s=120.0)
"""Retries of one question when the endpoint gives no answer or asks to be called again."""
_ENVELOPE_BYTES: Final = 65_536
_TOKEN_BYTES: Final = 64
"""Bytes of an answer per token allowed: enough for escaped text and the thinking beside it."""
_SECRET: Final = re.compile(r"(?<=://)[^/]*@|\?.*")
"""Parts of a URL that may hold a key; errors and events leave them out."""


class Endpoint(Protocol):
    """Anything that answers a chat prompt several times."""

    async def answers(
        self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
    ) -> list[str]:
        """Return n independent answers.

        Args:
            schema: JSON schema of an answer, which the messages describe as well.
            charge: takes what a service bills for it.

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
        thinks: bool = False,
    ) -> None:
        """
        Args:
            context_tokens: most tokens of a question and its answer.
            thinks: whether it thinks before it answers, where its format has a switch for that.
        """
        self._sampler = sampler
        self._renderer = renderer
        can = renderer.thinking
        always = can.on is not None and can.off is None
        self._answer_tokens = THINKING_TOKENS if thinks or always else ANSWER_TOKENS
        self._context_tokens = context_tokens
        self._switches, _ = can.switches({}, decides="on" if thinks else "off")

    async def answers(
        self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
    ) -> list[str]:
        try:
            prompt = await self._renderer.prompt_aside(messages, switches=self._switches)
            room = max(1, self._context_tokens - len(prompt.tokens))
            while True:
                most = self._answer_tokens
                params = SamplingParams(
                    max_tokens=min(most, room),
                    temperature=TEMPERATURE,
                    stop_tokens=self._renderer.stop_tokens,
                )
                done = await self._sampler.sample(prompt.tokens, params, n, charge)
                read = [
                    self._renderer.parse(completion.tokens, prompt.tokens) for completion in done
                ]
                cut = [completion.stop_reason is not StopReason.STOP for completion in done]
                if most == THINKING_TOKENS or not any(
                    short and reply.reasoning is not None and not reply.text
                    for short, reply in zip(cut, read, strict=True)
                ):
                    break
                self._answer_tokens = THINKING_TOKENS
        except OutageError:
            raise
        except GoneError as error:  # no question is to blame
            raise OutageError(str(error)) from error
        except (AlignmentError, BackendError, RequestError) as error:
            raise JudgeError(f"the base model could not judge: {error}") from error
        # Without their thinking; empty where that never ended.
        return [reply.text + (CUT if short else "") for reply, short in zip(read, cut, strict=True)]


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
        temperature: float = TEMPERATURE,
        retries: Backoff = RETRIES,
    ) -> None:
        key = settings.judge_api_key
        headers = httpx.Headers({"accept-encoding": "identity"})
        if key is not None:
            headers["authorization"] = f"Bearer {key.get_secret_value()}"
        # Last, so that they can replace the key's header.
        headers.update({n: value.get_secret_value() for n, value in settings.headers.items()})
        thinks = settings.judge_thinking
        self._fields: dict[str, Any] = {
            "model": settings.asked_model,
            "temperature": temperature,
            "chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks},
        }
        self._answer_s = answer_s
        self._answer_tokens = THINKING_TOKENS if thinks else ANSWER_TOKENS
        self._asked_at = address_of(url)
        self._url = _SECRET.sub("", self._asked_at)
        self._dropped = frozenset[str]()
        """Fields that it has refused, and answered the same question without."""
        if transport is None and is_loopback(urlsplit(url).hostname or ""):
            transport = httpx.AsyncHTTPTransport()  # given one, httpx looks for no proxies
        limits = httpx.Timeout(answer_s, connect=CONNECT_S)
        self._client = httpx.AsyncClient(transport=transport, timeout=limits, headers=headers)
        self._retries = retries

    async def answers(
        self, messages: Sequence[Message], n: int, schema: Schema, charge: Charge = uncharged
    ) -> list[str]:
        answers: list[str] = []
        while (left := n - len(answers)) > 0:  # a server may honour n in part, or not at all
            sizes = [1] * left if VOTES in self._dropped else [left]
            most = self._answer_tokens
            fields = self._fields | {
                "messages": messages,
                "max_tokens": most,
                "response_format": response_format(schema),
            }
            batches = await together(self._insist(fields, size) for size in sizes)
            texts = [*chain.from_iterable(batches)]
            if most < THINKING_TOKENS and any(text.cut_thinking for text in texts):
                self._answer_tokens = THINKING_TOKENS
                log.info("judge.thinks", url=self._url)
                continue
            answers += [text.text for text in texts]
        return answers[:n]

    async def _insist(self, fields: Mapping[str, Any], n: int) -> list[Text]:
        try:
            return await self._retries.call(lambda: self._ask(fields, n), _Again)
        except _Again as error:
            raise JudgeError(f"the judge at {self._url} does not answer: {error}") from error

    async def _ask(self, fields: Mapping[str, Any], n: int) -> list[Text]:
        """Ask once for n answers; after a refusal without a field, and from then on if that
        succeeds. One without votes gets one answer."""
        dropped = self._dropped
        shows = any(isinstance(message["content"], list) for message in fields["messages"])
        while True:
            status, content = await self._post(fields, n, dropped)
            if status not in REFUSALS:
                break
            error = content.decode(errors="replace")
            if (field := refused_field(error, dropped, shows=shows)) is None:
                break
            dropped |= {field}
        if not 200 <= status < 300:
            raise JudgeError(refused(status, content, self._url))
        try:
            texts = texts_of(json.loads(content))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            # Without the error's message, which may quote the answer.
            raise JudgeError(
                f"the judge at {self._url} sent no chat completion ({type(error).__name__})"
            ) from error
        if not texts:
            raise JudgeError(f"the judge at {self._url} sent no choices")
        if more := dropped - self._dropped:
            self._dropped |= dropped
            log.info("judge.adapted", url=self._url, dropped=sorted(more))
        return texts

    async def _post(
        self, fields: Mapping[str, Any], n: int, dropped: frozenset[str]
    ) -> tuple[int, bytes]:
        most = _ENVELOPE_BYTES + n * THINKING_TOKENS * _TOKEN_BYTES
        try:
            # httpx's own timeouts restart with every chunk of an answer.
            async with (
                asyncio.timeout(self._answer_s),
                self._client.stream(
                    "POST", self._asked_at, json=body_of(fields, n, dropped)
                ) as answer,
            ):
                if answer.status_code in (408, 429) or answer.status_code >= 500:
                    raise _Again(f"HTTP {answer.status_code}")
                content = bytearray()
                async for piece in answer.aiter_bytes():
                    content += piece
                    if len(content) > most:
                        raise JudgeError(
                            f"the judge at {self._url} sent more than the {most} bytes that "
                            f"{THINKING_TOKENS} tokens a vote can have"
                        )
                return answer.status_code, bytes(content)
        except TimeoutError as error:
            raise _Again(f"no whole answer within {self._answer_s:g} s") from error
        except httpx.HTTPError as error:
            raise _Again(f"{type(error).__name__} {error}".strip()) from error

    async def __aexit__(self, *failed: object) -> None:
        await self._client.aclose()
