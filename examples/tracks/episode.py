"""One episode's requests: asked of the gateway, written down, and not asked again after a kill.

Rule: what was answered is given again, in its order, while the episode asks for the same; from the
first request that is another one on, the gateway is asked. So an episode is begun anew from nothing
but its answers, whoever plays it.
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
"""What an episode may ask of the gateway: its outcome is said by nobody who plays it."""


@dataclass(slots=True)
class Seen:
    """What a run has seen of its gateway."""

    version: int = 0
    """The newest of the policy."""
    tokens: int = 0
    """Sampled since this process began."""


@dataclass(slots=True)
class Episode:
    """A try at a task; an exam where a version is named."""

    gateway: Gateway
    state: State
    place: Place
    seen: Seen
    version: int | None = None
    seed: int | None = None
    keeps: bool = False
    """It is written down though it does not train."""
    _kept: list[Kept] = field(default_factory=list[Kept])
    _again: deque[Kept] = field(default_factory=deque[Kept])
    """What was answered and the episode has not asked for again."""

    def __post_init__(self) -> None:
        self.keeps |= self.trains
        if self.keeps:
            self._kept = self.state.kept(self.place.session)
        self.rewind()

    @property
    def trains(self) -> bool:
        return self.place.group is not None

    def beside(self, role: str) -> Episode:
        """Return the same try for another role, which asks the newest version by its name: what
        is asked so is not trained, and waits behind persons."""
        place = replace(self.place, session=f"{self.place.session}-{role}", group=None)
        return Episode(
            self.gateway, self.state, place, self.seen, self.version, self.seed, self.keeps
        )

    def rewind(self) -> None:
        """It begins anew, because what it acts in was lost."""
        self._again = deque(self._kept)

    async def reply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Reply:
        """What the model answers to a conversation.

        Raises:
            TrackError: it was refused, or the gateway was away for too long.
        """
        body = self.gateway.completion(messages, tools, version=self.version, seed=self.seed)
        return Reply.of(await self.ask("chat/completions", body))

    async def ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        """A request in any of the gateway's dialects; what it refuses comes back as it is.

        Raises:
            TrackError: the gateway was away for too long.
        """
        if path not in _REPLIES:
            return Answer(404, "text/plain", "An episode asks for replies alone.")
        asked = hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).hexdigest()
        if self._again and self._again[0].asked == asked:
            return self._again.popleft().answer
        self._again.clear()
        if not self.trains and body.get("model") == self.gateway.model(None):
            body = {**body, "model": self.gateway.model(self.seen.version)}
        answer = await self.gateway.ask(self.place, path, body)
        if answer.status < 400:
            self._keep(Kept(asked, answer))
        return answer

    def _keep(self, kept: Kept) -> None:
        self._kept.append(kept)
        self.seen.tokens += kept.answer.tokens
        if self.keeps:
            self.seen.version = max(self.seen.version, kept.answer.version or 0)
            self.state.keep(self.place.session, kept, self.seen.version)
