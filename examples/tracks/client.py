"""Gateway client of a track: replies, outcomes, and health.

Rule: a request that the gateway cannot take now is sent again, unchanged, when it says so or after
a growing pause, also while it does not answer: it may be restarting. A refusal ends the run with
the gateway's message.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from examples.tracks import TooLongError, TrackError
from examples.tracks.track import Track

REPLY_S = 1800.0
"""Seconds for a reply; it may wait long for a slot."""
GIVE_UP_S = 900.0
"""Seconds of nothing but refusals and broken connections after which a request is given up."""
_LATER = frozenset({408, 429, 500, 502, 503, 504})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 30.0
_VERSION = re.compile(r'"system_fingerprint": ?"v(\d+)"')
_TOKENS = re.compile(r'"(?:completion|output)_tokens": ?(\d+)')


@dataclass(frozen=True, slots=True)
class Place:
    """Task and attempt that a request belongs to."""

    session: str
    task: str
    group: str | None = None
    """Group of the episode; None: it is not trained."""
    size: int = 1
    turn_type: str = "episode"
    """Turn type. Requests of episodes, and of exams of a named version, leave slots for people."""

    def headers(self) -> dict[str, str]:
        named = {"X-Session-Id": self.session, "X-Turn-Type": self.turn_type}
        if self.group is None:
            return named
        return named | {
            "X-Task-Id": self.task,
            "X-Group-Id": self.group,
            "X-Group-Size": str(self.size),
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a request in any dialect: JSON, or a stream that has ended."""

    status: int
    kind: str
    """Content-Type of the body."""
    text: str

    @property
    def version(self) -> int | None:
        """Policy version that answered; None: the answer does not say."""
        match = _VERSION.search(self.text)
        return None if match is None else int(match[1])

    @property
    def tokens(self) -> int:
        """Number of sampled tokens; 0: the answer does not say."""
        return int((_TOKENS.findall(self.text) or (0,))[-1])


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of the model, as a chat completion."""

    message: Mapping[str, Any]
    """Message as OpenAI's clients have it; it goes into the next request unchanged."""
    version: int
    """Policy version that answered."""
    name: str
    """The gateway's, by which the reply is scored."""

    @classmethod
    def of(cls, answer: Answer) -> Reply:
        """Read a reply from an answer.

        Raises:
            TooLongError: the conversation is longer than the model's context.
            TrackError: the gateway refused, or this is no completion.
        """
        if answer.status == 400 and '"context_length_exceeded"' in answer.text:
            raise TooLongError(f"The gateway refuses a reply: {answer.text[:500]}")
        if answer.status >= 400:
            raise TrackError(f"The gateway refuses a reply: {answer.status}: {answer.text[:500]}")
        try:
            completion = json.loads(answer.text)
            message = {
                name: value
                for name, value in completion["choices"][0]["message"].items()
                if name in ("role", "content", "reasoning_content", "tool_calls")
            }
            return cls(
                message=message,
                version=int(completion["system_fingerprint"].removeprefix("v")),
                name=completion["id"],
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise TrackError(f"The gateway sent no completion: {answer.text[:300]}") from error

    @property
    def text(self) -> str:
        return self.message.get("content") or ""

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        return self.message.get("tool_calls") or ()


class Gateway:
    """Client of one gateway for one model."""

    def __init__(self, http: httpx.AsyncClient, track: Track) -> None:
        self._http = http
        self._track = track
        self._root = track.url.rstrip("/").removesuffix("/v1")
        self._away = False

    def completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        version: int | None = None,
        seed: int | None = None,
    ) -> dict[str, Any]:
        """Body of a request for a chat completion at temperature 1, of a fixed version where one is
        named."""
        body: dict[str, Any] = {
            "model": self.model(version),
            "messages": list(messages),
            "temperature": 1.0,
            "max_tokens": self._track.max_tokens,
        }
        body |= {"tools": list(tools)} if tools else {}
        return body | ({} if seed is None else {"seed": seed})

    def model(self, version: int | None) -> str:
        """Model name of the newest version, or of a fixed one."""
        return self._track.model if version is None else f"{self._track.model}@v{version}"

    async def ask(self, place: Place, path: str, body: Mapping[str, Any]) -> Answer:
        """Send a request for a reply; final refusals are returned as answers.

        Raises:
            TrackError: the gateway was away, or busy, for too long.
        """
        answer = await self._post(path, body, place.headers())
        return Answer(answer.status_code, answer.headers.get("content-type", ""), answer.text)

    async def outcome(self, session: str, score: float) -> str | None:
        """Report an episode's outcome, from -1 to 1; return why it does not count, or None.

        Repeating it changes nothing.

        Raises:
            TrackError: as for a reply.
        """
        return await self._feedback(session, {"session": session, "final": True}, score)

    async def step(self, reply: Reply, score: float) -> str | None:
        """Report how good one reply of an episode was; as `outcome`."""
        return await self._feedback(reply.name, {"response_id": reply.name}, score)

    async def _feedback(self, key: str, about: Mapping[str, Any], score: float) -> str | None:
        body = {**about, "score": score, "source": "client"}
        answer = await self._post("feedback", body, {"Idempotency-Key": key})
        if answer.status_code == 404:
            return "the gateway has no reply of it"
        if not answer.is_success:
            why = f"{answer.status_code}: {answer.text[:500]}"
            raise TrackError(f"The gateway refuses an outcome: {why}")
        return _json(answer).get("because")

    async def health(self) -> Mapping[str, Any]:
        """Answer of /healthz: little without an admin's key, and empty while the gateway is
        away."""
        try:
            health = (await self._http.get(f"{self._root}/healthz")).json()
        except (httpx.HTTPError, ValueError):
            return {}
        return health if isinstance(health, dict) else {}

    async def _post(self, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
        """POST until the request is accepted, or finally refused."""
        url, pause = f"{self._root}/v1/{path}", _FIRST_PAUSE_S
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            try:
                answer = await self._http.post(url, json=body, headers=headers)
            except httpx.TransportError as error:
                why, wait = str(error) or type(error).__name__, pause
                if not self._away:  # said once, not by every episode
                    self._away = True
                    print(f"{self._root} does not answer ({why}), and is asked again.", flush=True)
            else:
                self._away = False
                if answer.status_code not in _LATER:
                    return answer
                why = f"{answer.status_code}: {answer.text[:500]}"
                wait = max(pause, _seconds(answer.headers.get("retry-after", "")))
            if time.monotonic() + wait > deadline:
                raise TrackError(f"{url} takes no request any more: {why}")
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


@asynccontextmanager
async def connected(track: Track) -> AsyncGenerator[Gateway]:
    """Open a gateway client with as many connections as episodes."""
    headers = {} if track.key is None else {"Authorization": f"Bearer {track.key}"}
    # Given a transport, httpx does not look for proxies in the environment.
    transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=track.concurrency + 4))
    async with httpx.AsyncClient(
        headers=headers, timeout=httpx.Timeout(REPLY_S, connect=30.0), transport=transport
    ) as http:
        yield Gateway(http, track)


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        return answer.json()
    except ValueError as error:
        raise TrackError(f"The gateway sent no JSON: {answer.text[:300]}") from error


def _seconds(value: str) -> float:
    """Seconds of a Retry-After header; a date counts as none."""
    return float(value) if value.isascii() and value.isdigit() else 0.0
