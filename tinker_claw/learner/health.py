"""What /healthz says: whether the parts of the loop work, and if not, why and since when."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tinker_claw.errors import OutageError
from tinker_claw.learner.meaning import meaning
from tinker_claw.outages import Outages
from tinker_claw.telemetry import log


@dataclass(slots=True)
class Part:
    """One part of the loop."""

    state: str = "ok"
    error: str | None = None
    since: float = field(default_factory=time.time)

    def enter(self, state: str, error: str | None = None) -> None:
        if state != self.state:
            self.since = time.time()
        self.state, self.error = state, error


class Health:
    """Written by judging, learner and gateway, read by the gateway.

    A part is `stalled` while it waits for the service: it goes on by itself. `agreement` is between
    sampler and trainer, as far as anything has shown: `ok` or `alarm`. `servers`, where others than
    this process sample: `ok`, or `away` for those that are out of the rotation.
    """

    def __init__(self) -> None:
        self.learner = Part("waiting")
        self.judge = Part()
        self.agreement = Part()
        self.servers = Part()
        self.backend = Outages()
        self.last_error: str | None = None
        self._next_try: float | None = None

    def judge_works(self) -> None:
        self.judge.enter("ok")

    def judge_fails(self, error: Exception) -> None:
        if isinstance(error, OutageError):  # `backend` has logged it
            self.judge.enter("stalled", str(error))
        else:
            if self.judge.state != "failing":
                log.error("judge.failing", error=str(error))
            self.judge.enter("failing", str(error))
        self.last_error = str(error)

    def learner_is(self, state: str, error: str | None = None) -> None:
        self.learner.enter(state, error)
        self.last_error = error or self.last_error
        self._next_try = None

    def agreement_is(self, state: Literal["ok", "alarm"], error: str | None = None) -> None:
        self.agreement.enter(state, error)
        self.last_error = error or self.last_error

    def servers_away(self, sentences: Sequence[str]) -> None:
        """Which inference servers are not asked, and why; () when all are."""
        self.servers.enter("away" if sentences else "ok", " ".join(sentences) or None)

    def learner_stalls(self, error: OutageError, next_try_s: float) -> None:
        """The service is away; the learner asks again in so many seconds."""
        self.learner_is("stalled", str(error))
        self._next_try = time.monotonic() + next_try_s

    def snapshot(self, *, version: int, waiting: int, batch_size: int) -> dict[str, Any]:
        """The JSON of /healthz. `status` is about serving and learning together."""
        away = self.backend.away
        well = self.learner.state in ("waiting", "training", "observing", "finished")
        well = well and all(p.state == "ok" for p in (self.judge, self.agreement, self.servers))
        well = well and not away
        left = self._next_try - time.monotonic() if self._next_try is not None else None
        return {
            "status": "ok" if well else "degraded",
            "meaning": meaning(
                version=version,
                waiting=waiting,
                batch_size=batch_size,
                away=away,
                learner=self.learner.state,
                judge=self.judge.state,
                agreement=self.agreement.state,
                servers=self.servers.state,
            ),
            "policy_version": version,
            "backend": "away" if away else "ok",
            "backend_since": self.backend.since,
            "backend_error": self.backend.error,
            "learner": self.learner.state,
            "learner_since": self.learner.since,
            "learner_error": self.learner.error,
            "learner_attempts": self.backend.attempts("learning"),
            "learner_next_try_s": None if left is None else round(max(0.0, left), 1),
            "judge": self.judge.state,
            "judge_since": self.judge.since,
            "judge_error": self.judge.error,
            "agreement": self.agreement.state,
            "agreement_since": self.agreement.since,
            "agreement_error": self.agreement.error,
            "servers": self.servers.state,
            "servers_since": self.servers.since,
            "servers_error": self.servers.error,
            "samples_waiting": waiting,
            "batch_size": batch_size,
            "last_error": self.last_error,
        }
