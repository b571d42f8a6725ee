"""Health of the loop for /healthz: whether each part works, and if not, why and since when."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tinker_claw.outages import Outages, Refused
from tinker_claw.telemetry import log


@dataclass(slots=True)
class PartHealth:
    """State of one part of the loop."""

    state: str = "ok"
    error: str | None = None
    since: float = field(default_factory=time.time)
    _next_try: float | None = None

    def enter(
        self, state: str, error: str | None = None, *, next_try_s: float | None = None
    ) -> None:
        """Enter a state. `next_try_s`: seconds until it goes on by itself; None: not known."""
        if state != self.state:
            self.since = time.time()
        self.state, self.error = state, error
        self._next_try = None if next_try_s is None else time.monotonic() + next_try_s

    @property
    def next_try_s(self) -> float | None:
        if self._next_try is None:
            return None
        return round(max(0.0, self._next_try - time.monotonic()), 1)

    @property
    def ended(self) -> bool:
        """The part has failed for good and does not restart by itself."""
        return self.state == "failed" and self._next_try is None


class Health:
    """State of all parts, written by judging, learner and gateway, read by the gateway.

    A part is `stalled` while it waits for the service: it goes on by itself. It is `failed` when it
    has ended: by an unexpected error, and then it starts again; or because going on would do harm.
    `agreement` is `ok`, or `alarm` where sampler and trainer disagree. `servers`, where other
    processes sample, is `ok`, or `away` while some are out of the rotation. `records` is the
    ledger: `failing` from a refusal until it takes a write. `serving` is `ok`, or `replaced` while
    another version answers in place of the one that should, or `refused` while none does.
    `publishing` publishes a version anew whose weights are gone. `upkeep` drops data past its
    retention.
    """

    def __init__(self) -> None:
        self.learner = PartHealth("waiting")
        self.judge = PartHealth()
        self.agreement = PartHealth()
        self.servers = PartHealth()
        self.records = PartHealth()
        self.publishing = PartHealth()
        self.upkeep = PartHealth()
        self.outages = Outages()
        self.last_error: str | None = None

    def judge_is(
        self, state: Literal["ok", "failing", "stalled"], error: str | None = None
    ) -> None:
        """Set the judge's state. `failing`: the judge itself; `stalled`: its service is away, which
        `outages` has logged."""
        if state != self.judge.state and state == "failing":
            log.error("judge.failing", error=error)
        if state != self.judge.state and self.judge.state == "failing":
            log.info("judge.recovered")
        self._enter(self.judge, state, error)

    def learner_is(
        self, state: str, error: str | None = None, next_try_s: float | None = None
    ) -> None:
        """Set the learner's state, and when it goes on by itself; None: not known."""
        self._enter(self.learner, state, error, next_try_s)

    def disagree(self, error: str) -> None:
        """Record that sampler and trainer disagree."""
        self._enter(self.agreement, "alarm", error)

    def servers_away(self, sentences: Sequence[str]) -> None:
        """Set why inference servers are out of the rotation, one sentence each; () when none is."""
        self.servers.enter("away" if sentences else "ok", " ".join(sentences) or None)

    def records_are(self, error: str | None) -> None:
        """Set the ledger's last refused write; None: it took a write."""
        if error is None and self.records.state == "ok":
            return  # as after nearly every write
        if error is None:
            log.info("ledger.recovered")
        elif self.records.state == "ok":
            log.error("ledger.failing", error=error)
        self._enter(self.records, "failing" if error else "ok", error)

    def _enter(
        self, part: PartHealth, state: str, error: str | None, next_try_s: float | None = None
    ) -> None:
        part.enter(state, error, next_try_s=next_try_s)
        self.last_error = error or self.last_error

    def snapshot(self, *, version: int, waiting: int, batch_size: int) -> dict[str, Any]:
        """Return the JSON of /healthz. `status` covers serving and learning together."""
        away, refused = self.outages.away, self._refused(version)
        wrong, states = ["backend"] * bool(away) + ["serving"] * bool(refused), dict[str, Any]()
        for name, part in vars(self).items():
            if isinstance(part, PartHealth):
                states |= {
                    name: part.state,
                    f"{name}_since": part.since,
                    f"{name}_error": part.error,
                }
                if name in ("learner", "judge", "upkeep"):
                    states[f"{name}_next_try_s"] = part.next_try_s
                if part.state not in _FINE:
                    wrong.append(name)
        return {
            "status": "degraded" if wrong else "ok",
            "wrong": wrong,
            "meaning": self._meaning(version, waiting, batch_size),
            "policy_version": version,
            "answered_by": refused.by if refused else f"v{version}",
            "serving": "ok" if refused is None else "replaced" if refused.by else "refused",
            "serving_since": refused.since if refused else self.outages.since,
            "serving_error": refused and refused.error,
            "backend": "away" if away else "ok",
            "backend_since": self.outages.since,
            "backend_error": self.outages.error,
            **states,
            "learner_attempts": self.outages.attempts("learning"),
            "samples_waiting": waiting,
            "batch_size": batch_size,
            "last_error": self.last_error,
        }

    def _refused(self, version: int) -> Refused | None:
        """Return that this version, which should answer, cannot; None: it can."""
        refused = self.outages.refused
        return refused if refused and refused.version == version else None

    def _meaning(self, version: int, waiting: int, batch_size: int) -> str:
        """Describe the state in one sentence for the user: what works, and what waits."""
        unserved, troubles = self._unserved(version), [*self._troubles()]
        served = f"Replies come from policy v{version}"
        if not (unserved or troubles):
            if self.learner.state == "finished":
                return f"{served}; learning has ended."
            return f"{served}; {waiting} of {batch_size} samples for the next step are queued."
        if self.records.state == "ok":  # else what was recorded may be gone with its folder
            queued = f"{waiting} {'sample is' if waiting == 1 else 'samples are'} queued, none"
            troubles.append(f"{queued if waiting else 'nothing'} is lost")
        return "; ".join([unserved or f"{served} as before", *troubles]) + "."

    def _unserved(self, version: int) -> str | None:
        """Describe what happens to requests that this version does not answer; None: it does."""
        if self.records.state != "ok":
            return (
                "Requests are refused until they can be recorded again: see whether the disk is "
                "full, and the data folder where it was"
            )
        if refused := self._refused(version):
            if not refused.by:
                neither = f"neither v{version} nor what stands in for it answers"
                return f"Requests get an error: {neither}"
            replaced = f"Replies come from {refused.by}, since v{version} cannot answer"
            if self.outages.gone.is_set() and not self.learner.ended:
                return f"{replaced}; it is published anew from its state"
            return replaced
        if "serving" in self.outages.away:
            return (
                "Replies wait for the service, which is asked again and again; a request that it "
                "does not answer in time gets an error"
            )
        return None

    def _troubles(self) -> Iterator[str]:
        """Yield what does not work besides replies, each as part of a sentence."""
        away, learner = self.outages.away, self.learner.state
        if self.servers.state != "ok" and "serving" not in away:
            yield "some inference servers are away, and the others do their work"
        if self.judge.state == "failed":
            yield "turns are recorded, and judged when judging has started again"
        elif self.judge.state != "ok" or away & {"judging", "teaching"}:
            yield "judging waits"
        if self.learner.ended:
            yield "learning has stopped until a restart"
        elif learner in _LEARNING or "learning" in away:
            yield _LEARNING.get(learner, "learning waits")
        if self.upkeep.state != "ok":
            yield "old turns are kept for now"


_FINE = ("ok", "waiting", "training", "finished")
"""States of a part that works."""
_LEARNING = {
    "failed": "learning starts again by itself",
    "stalled": "learning waits",
    "held": "learning is paused (`tinker-claw status` says why, and how it resumes)",
    "recovering": "a step failed, and the state before it is being loaded",
}
