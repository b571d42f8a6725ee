"""Connected clients: sessions with their models in training and their sampling sessions.

Rule: a session that has ended, or has been silent for too long, holds no memory. A later request
for it is answered 410, which the SDK does not retry, and which ends its heartbeats.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeVar
from uuid import uuid4

from cachetools import FIFOCache

from local_gpu.tinker.training import TrainingRun
from tinker_claw.errors import RequestError

T = TypeVar("T")

_REMEMBERED = 10_000
"""Newest samplers of a session that are known, since no client can close one and a long run makes
one a step; sample requests of a sampler that may be re-sent."""


@dataclass(slots=True)
class SamplingSession:
    id: str
    session_id: str
    model_path: str | None
    """None samples from the base."""
    requests: FIFOCache[int, str] = field(default_factory=lambda: FIFOCache(_REMEMBERED))
    """seq_id: the request id that a re-sent request gets again."""


@dataclass(slots=True)
class Session:
    id: str
    seen_at: float
    """Time of the last request, on the monotonic clock."""
    runs: dict[str, TrainingRun] = field(default_factory=dict[str, TrainingRun])
    """Models in training, by id."""
    samplers: FIFOCache[str, SamplingSession] = field(
        default_factory=lambda: FIFOCache(_REMEMBERED)
    )
    """Sampling sessions, by id."""

    def add_sampler(self, number: int, path: str | None) -> SamplingSession:
        sampler = SamplingSession(f"{self.id}:sample:{number}", self.id, path)
        self.samplers[sampler.id] = sampler
        return sampler


class Sessions:
    def __init__(self, silence_s: float, most: int) -> None:
        self._silence_s = silence_s
        self._most = most
        self._open: dict[str, Session] = {}

    def create(self) -> Session:
        """Raises RequestError: there are too many."""
        self.check_room(len(self._open), "sessions, which end when they are silent")
        session = Session(str(uuid4()), time.monotonic())
        self._open[session.id] = session
        return session

    def get(self, session_id: str) -> Session:
        """Return a session, and note that it is alive.

        Raises:
            RequestError: 410, there is none of that id.
        """
        if (session := self._open.get(session_id)) is None:
            raise RequestError(
                f"There is no session {session_id}: it has finished, or was silent for "
                f"{self._silence_s:.0f} s, or the server was restarted; open a new ServiceClient "
                "and load a checkpoint.",
                status=HTTPStatus.GONE,
            )
        session.seen_at = time.monotonic()
        return session

    def check_room(self, there: int, of_what: str) -> None:
        """Raises RequestError if there cannot be one more."""
        if there >= self._most:
            raise RequestError(
                f"There are {there} {of_what}; close what is not used, and try again.",
                status=HTTPStatus.UNPROCESSABLE_ENTITY,
            )

    def run(self, model_id: str) -> TrainingRun:
        return _known(self.get(model_id.partition(":train:")[0]).runs, model_id, "model")

    def sampler(self, sampler_id: str) -> SamplingSession:
        return _known(self.get(sampler_id.partition(":sample:")[0]).samplers, sampler_id, "sampler")

    def end(self, session_id: str) -> Session | None:
        """Remove and return a session; None if it was not open."""
        return self._open.pop(session_id, None)

    def silent(self) -> list[str]:
        limit = time.monotonic() - self._silence_s
        return [session.id for session in self._open.values() if session.seen_at < limit]

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._open

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))


def _known(those: Mapping[str, T], id: str, what: str) -> T:
    """Raises RequestError if there is none of that id."""
    if id not in those:
        raise RequestError(f"There is no {what} {id}.", status=HTTPStatus.NOT_FOUND)
    return those[id]
