"""HTTP to an inference server: deadlines, events of a stream, and errors.

Rule: foreign exceptions are mapped here and nowhere else. Whatever means that the server cannot
serve at present (no answer, too late, broken off, 5xx) is an `OutageError`. Everything else is
passed on as an answer or a `CompletionRefusal`, for the caller to interpret.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, cast

import httpx

from tinker_claw.errors import ConfigError, OutageError, SamplerError


class Busy(OutageError):
    """The server has no time for a request: it is at its limit (429), or did not answer in time.
    Another may answer, or this one later; whether it hangs, `Member.ping` decides."""


_KEY_STATUSES: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_AWAY_STATUSES: Final = (
    *_KEY_STATUSES,  # the request itself may be valid
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS,
)
_IDLE_S: Final = 2.0
"""Seconds after which idle connections are dropped: these servers close them after 5 seconds, and a
request on one that is just being closed would look like an outage."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that a server may take before it counts as away."""

    connect_s: float = 5.0
    answer_s: float = 30.0
    """Deadline for a health check or the list of models."""
    load_s: float = 120.0
    """Deadline for loading or unloading an adapter."""
    first_token_s: float = 300.0
    """Deadline for the first token: a long prompt may wait behind others."""
    between_tokens_s: float = 180.0
    """Deadline for each further one: by then a server that hangs is out of the rotation
    (`PoolOptions.still_s`), and its replies go on elsewhere."""
    request_s: float = 3600.0
    """Deadline for a whole completion."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Answer of a server, whatever its status."""

    status: int
    body: object
    """Parsed JSON, or text where it is none."""

    @property
    def ok(self) -> bool:
        return self.status < HTTPStatus.BAD_REQUEST

    @property
    def away(self) -> bool:
        return self.status >= HTTPStatus.INTERNAL_SERVER_ERROR or self.status in _AWAY_STATUSES

    @property
    def message(self) -> str:
        """The server's own words in one line, shortened, without the full stop."""
        words: object = self.body
        for _ in range(2):  # {"error": {"message": ...}}
            if isinstance(words, dict):
                fields = cast(dict[str, object], words)
                names = ("error", "message", "error_message", "detail")
                words = next((fields[name] for name in names if fields.get(name)), "")
        return " ".join(str(words).split())[:300].rstrip(".")


class CompletionRefusal(Exception):
    """The server refuses a completion, or breaks it off and says why."""

    def __init__(self, answer: HttpAnswer) -> None:
        super().__init__(answer.message)
        self.answer = answer


class HttpClient:
    """The connections to one server."""

    def __init__(self, url: str, deadlines: Deadlines, api_key: str | None) -> None:
        if "@" in url:
            raise ConfigError(
                "The address of a server must not hold a name or a password: addresses are shown. "
                "A key that it wants goes into TINKER_CLAW_LOCAL__SAMPLER_API_KEY."
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self.deadlines = deadlines
        self.last_event_at = -math.inf
        """Time of the last event of any stream, on the monotonic clock."""
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not the address of a server: write http://host:port.")
        # Given a transport, httpx does not look for proxies in the environment.
        transport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_S)
        )
        self._client = httpx.AsyncClient(
            base_url=self.url,
            transport=transport,
            timeout=httpx.Timeout(None, connect=deadlines.connect_s),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        )

    async def ask(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        seconds: float | None = None,
    ) -> HttpAnswer:
        """Send GET, or POST if there is a body. `seconds`: None: the deadline of an answer."""
        self._check_open()
        seconds = seconds or self.deadlines.answer_s
        async with self._in_time(asyncio.get_running_loop().time() + seconds):
            method = "GET" if body is None else "POST"
            async with self._client.stream(method, path, json=body) as response:
                return await self._answer(response)

    async def events(
        self, path: str, body: Mapping[str, object]
    ) -> AsyncGenerator[Mapping[str, Any]]:
        """Yield the JSON of each event of a stream. Closing the iterator closes the connection.

        Raises:
            Refusal: before the first event, or instead of the next one.
        """
        self._check_open()
        now = asyncio.get_running_loop().time
        end = now() + self.deadlines.request_s
        until = min(now() + self.deadlines.first_token_s, end)
        async with self._in_time(until):
            request = self._client.build_request("POST", path, json=body)
            response = await self._client.send(request, stream=True)
        try:
            if response.status_code != HTTPStatus.OK:
                async with self._in_time(until):
                    answer = await self._answer(response)
                raise self._refusal(answer)
            rest = b""
            pieces = cast(AsyncGenerator[bytes], response.aiter_bytes())
            async with aclosing(pieces):
                while True:
                    async with self._in_time(until):
                        piece = await anext(pieces, None)
                    if piece is None:
                        raise OutageError(f"The server {self.url} broke off a completion.")
                    # Not by `aiter_lines`: it also breaks at characters that JSON may hold.
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        if line.strip() == b"data: [DONE]":
                            return
                        if line.startswith(b"data:"):
                            self.last_event_at = time.monotonic()
                            yield self._event(line)
                            until = min(now() + self.deadlines.between_tokens_s, end)
        finally:
            await response.aclose()

    def outage(self, answer: HttpAnswer) -> OutageError:
        why = f": {answer.message}" if answer.message else ""
        if answer.status in _KEY_STATUSES:
            why += " (its key goes into TINKER_CLAW_LOCAL__SAMPLER_API_KEY)"
        kind = Busy if answer.status == HTTPStatus.TOO_MANY_REQUESTS else OutageError
        return kind(f"The server {self.url} answers HTTP {answer.status}{why}.")

    async def aclose(self) -> None:
        await self._client.aclose()

    def _check_open(self) -> None:
        if self._client.is_closed:  # httpx would raise a RuntimeError
            raise OutageError(f"The connections to the server {self.url} are closed.")

    def _event(self, line: bytes) -> Mapping[str, Any]:
        event: object = None
        try:
            event = json.loads(line.removeprefix(b"data:"))
        except (ValueError, RecursionError) as error:
            raise self._unreadable() from error
        if not isinstance(event, dict):
            raise self._unreadable()
        fields = cast(dict[str, Any], event)
        if error := fields.get("error"):
            code: object = error.get("code") if isinstance(error, dict) else None
            status = code if isinstance(code, int) else HTTPStatus.INTERNAL_SERVER_ERROR
            raise self._refusal(HttpAnswer(status, fields))
        return fields

    async def _answer(self, response: httpx.Response) -> HttpAnswer:
        content = await response.aread()
        try:
            body: object = json.loads(content)
        except (ValueError, RecursionError):
            body = content.decode(errors="replace")
        return HttpAnswer(response.status_code, body)

    def _refusal(self, answer: HttpAnswer) -> Exception:
        return self.outage(answer) if answer.away else CompletionRefusal(answer)

    def _unreadable(self) -> SamplerError:
        return SamplerError(f"The server {self.url} sent what is not JSON in a completion.")

    @asynccontextmanager
    async def _in_time(self, until: float) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout_at(until):
                yield
        except TimeoutError as error:
            raise Busy(f"The server {self.url} has not answered in time.") from error
        except httpx.ConnectError as error:
            raise OutageError(f"The server {self.url} cannot be reached.") from error
        except httpx.TimeoutException as error:
            raise OutageError(f"The server {self.url} does not answer at all.") from error
        except httpx.HTTPError as error:
            raise OutageError(
                f"The connection to the server {self.url} broke ({type(error).__name__})."
            ) from error
