"""What /healthz says: whether judging and learning work, and if not, why and since when."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

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
    """Written by judging and learner, read by the gateway."""

    def __init__(self) -> None:
        self.learner = Part("waiting")
        self.judge = Part()
        self.last_error: str | None = None

    def judge_works(self) -> None:
        self.judge.enter("ok")

    def judge_fails(self, error: Exception) -> None:
        if self.judge.state == "ok":
            log.error("judge.failing", error=str(error))
        self.judge.enter("failing", str(error))
        self.last_error = str(error)

    def learner_is(self, state: str, error: str | None = None) -> None:
        self.learner.enter(state, error)
        self.last_error = error or self.last_error

    def snapshot(self, *, version: int, waiting: int, batch_size: int) -> dict[str, Any]:
        """The JSON of /healthz. `status` is about serving and learning together."""
        well = (
            self.learner.state in ("waiting", "training", "finished") and self.judge.state == "ok"
        )
        return {
            "status": "ok" if well else "degraded",
            "policy_version": version,
            "learner": self.learner.state,
            "learner_since": self.learner.since,
            "judge": self.judge.state,
            "judge_since": self.judge.since,
            "samples_waiting": waiting,
            "batch_size": batch_size,
            "last_error": self.last_error,
        }
