"""Connected clients: sessions with their models in training and their sampling sessions.

Rule: a session that has ended, or has been silent for too long, holds no memory. A later request
for it is answered 410, and one for an unknown session 404: the SDK retries neither.
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
"""Ended sessions that are told apart from unknown ones; sample requests that may be re-sent."""


@dataclass(slots=True)
class SamplingSession:
    id: str
    session_id: str
    model_path: str | None
    """None samples from the base."""
    requests: FIFOCache[int, tuple[str, list[str]]] = field(
        default_factory=lambda: FIFOCache(_REMEMBERED)
    )
    """seq_id: the request id and sequence ids that a re-sent request gets again."""


@dataclass(slots=True)
class Session:
    id: str
    seen_at: float
    """Time of the last request, on the monotonic clock."""
    runs: dict[int, TrainingRun] = field(default_factory=dict[int, TrainingRun])
    """Models in training, by model_seq_id."""
    samplers: dict[int, SamplingSession] = field(default_factory=dict[int, SamplingSession])
    """Sampling sessions, by sampling_session_seq_id."""

    def add_sampler(self, number: int, path: str | None) -> SamplingSession:
        sampler = SamplingSession(f"{self.id}:sample:{number}", self.id, path)
        self.samplers[number] = sampler
        return sampler


class Sessions:
    def __init__(self, silence_s: float, most: int) -> None:
        self._silence_s = silence_s
        self._most = most
        self._open: dict[str, Session] = {}
        self._ended = FIFOCache[str, str](_REMEMBERED)

    def create(self) -> Session:
        """Raises RequestError: there are too many."""
        self.check_room(len(self._open), "sessions, which end when they are silent")
        session = Session(str(uuid4()), time.monotonic())
        self._open[session.id] = session
        return session

    def get(self, session_id: str) -> Session:
        """Return a session, and note that it is alive.

        Raises:
            RequestError: 410 if it has ended, 404 if it is unknown.
        """
        if (session := self._open.get(session_id)) is not None:
            session.seen_at = time.monotonic()
            return session
        if (why := self._ended.get(session_id)) is not None:
            raise RequestError(
                f"Session {session_id} {why}; open a new ServiceClient and load a checkpoint.",
                status=HTTPStatus.GONE,
            )
        raise RequestError(
            f"There is no session {session_id} on this server, which may have been restarted; "
            "open a new ServiceClient and load a checkpoint.",
            status=HTTPStatus.NOT_FOUND,
        )

    def check_room(self, there: int, of_what: str) -> None:
        """Raises RequestError if there cannot be one more."""
        if there >= self._most:
            raise RequestError(
                f"There are {there} {of_what}; close what is not used, and try again.",
                status=HTTPStatus.UNPROCESSABLE_ENTITY,
            )

    def run(self, model_id: str) -> TrainingRun:
        session_id, _, number = model_id.partition(":train:")
        return _known(self.get(session_id).runs, number, f"model {model_id}")

    def sampler(self, sampler_id: str) -> SamplingSession:
        session_id, _, number = sampler_id.partition(":sample:")
        return _known(self.get(session_id).samplers, number, f"sampler {sampler_id}")

    def end(self, session_id: str, why: str) -> Session | None:
        """Remove and return a session; None if it was not open."""
        session = self._open.pop(session_id, None)
        if session is not None:
            self._ended[session_id] = why
        return session

    def silent(self) -> list[str]:
        limit = time.monotonic() - self._silence_s
        return [session.id for session in self._open.values() if session.seen_at < limit]

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))


def _known(those: Mapping[int, T], number: str, what: str) -> T:
    """Raises RequestError if there is none of that number."""
    found = those.get(int(number)) if number.isdecimal() and len(number) < 20 else None
    if found is None:
        raise RequestError(f"There is no {what}.", status=HTTPStatus.NOT_FOUND)
    return found
