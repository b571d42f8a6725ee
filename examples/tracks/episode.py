"""Requests of one episode: asked of the gateway, recorded, and not asked again after a kill.

Rule: recorded answers are returned in order while the episode repeats its requests; from the first
different request on, the gateway is asked. So an episode is restarted from its answers alone,
whoever plays it.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from examples.tracks.client import Answer, Gateway, Place, Reply
from examples.tracks.state import Kept, State

_REPLIES = frozenset(
    {"chat/completions", "messages", "messages/count_tokens", "responses", "responses/input_tokens"}
)
"""Routes that an episode may call; its outcome is not reported by who plays it."""


@dataclass(slots=True)
class Seen:
    """Facts that a run has learned from its gateway's answers."""

    version: int = 0
    """Newest policy version."""
    tokens: int = 0
    """Tokens sampled since this process began."""


@dataclass(slots=True)
class Episode:
    """An attempt at a task; an exam where a version is named."""

    gateway: Gateway
    state: State
    place: Place
    seen: Seen
    version: int | None = None
    seed: int | None = None
    keeps: bool = False
    """Whether answers are recorded though it does not train."""
    _kept: list[Kept] = field(default_factory=list[Kept])
    _again: deque[Kept] = field(default_factory=deque[Kept])
    """Recorded answers that the episode has not asked for again."""

    def __post_init__(self) -> None:
        self.keeps |= self.trains
        if self.keeps:
            self._kept = self.state.kept(self.place.session)
        self.rewind()

    @property
    def trains(self) -> bool:
        return self.place.group is not None

    def beside(self, role: str) -> Episode:
        """Return the same attempt for another role, which asks the newest version by its name. Its
        requests are not trained, and leave slots for people."""
        place = replace(self.place, session=f"{self.place.session}-{role}", group=None)
        return Episode(
            self.gateway, self.state, place, self.seen, self.version, self.seed, self.keeps
        )

    def rewind(self) -> None:
        """Start again, because the world that it acts in was lost."""
        self._again = deque(self._kept)

    async def reply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Reply:
        """Return the model's reply to a conversation.

        Raises:
            TrackError: it was refused, or the gateway was away for too long.
        """
        body = self.gateway.completion(messages, tools, version=self.version, seed=self.seed)
        return Reply.of(await self.ask("chat/completions", body))

    async def ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Send a request in any of the gateway's dialects; refusals are returned as answers.

        Raises:
            TrackError: the gateway was away for too long.
        """
        if path not in _REPLIES:
            return Answer(404, "text/plain", "An episode asks for replies alone.")
        digest = hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).hexdigest()
        if self._again and self._again[0][0] == digest:
            return self._again.popleft()[1]
        self._again.clear()
        if not self.trains and body.get("model") == self.gateway.model(None):
            body = {**body, "model": self.gateway.model(self.seen.version)}
        answer = await self.gateway.ask(self.place, path, body)
        if answer.status < 400:
            self._kept.append((digest, answer))
            self.seen.tokens += answer.tokens
            if self.keeps:
                self.seen.version = max(self.seen.version, answer.version or 0)
                self.state.keep(self.place.session, (digest, answer), self.seen.version)
        return answer
