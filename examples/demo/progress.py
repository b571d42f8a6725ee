"""Progress of a run: sessions, versions and scores.

Rule: everything the view, the table and the curve show is read from here. Written by the tasks of
one event loop; it does no I/O.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from examples.demo.client import Figures, Health
from examples.demo.options import Options
from examples.demo.scoring import Score
from examples.demo.user import Outcome

IDLE_SESSIONS = 200
"""Sessions without a step after which the run waits for none: learning is paused, or nothing is
left to learn. A step takes longest from hints alone, with a pleased user: above 100 sessions."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Moment at which a version was first seen."""

    version: int
    """Its number, which is that of its step."""
    sessions: int
    """Sessions that had ended."""
    seconds: float
    """Seconds since the user began to talk."""


Point = tuple[Moment, Score]
"""A scored version of the curve."""


@dataclass(slots=True)
class Progress:
    """The state of a run of the demo."""

    options: Options
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    """Outcomes of the sessions that ended, in that order."""
    last: int | None = None
    """Newest version when all sessions were over; a step from samples that were left makes one
    more, which is no part of the run. None: they are not over."""
    health: Health | None = None
    figures: Figures = field(default_factory=Figures)
    births: dict[int, Moment] = field(default_factory=dict[int, Moment])
    """Moment at which each version began to serve."""
    scores: dict[int, Score] = field(default_factory=dict[int, Score])
    """Scores by version, in the order in which they were made."""

    @property
    def sessions(self) -> int:
        """Number of sessions that ended."""
        return len(self.outcomes)

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.started

    @property
    def version(self) -> int:
        """Newest version seen; its number is the number of steps."""
        return max(self.births, default=0)

    @property
    def enough(self) -> bool:
        """Return whether no further session needs to begin."""
        if self.held:
            return True
        if self.sessions < self.options.sessions:
            return False
        return self.version >= self.options.steps or self.idle >= IDLE_SESSIONS

    @property
    def trains(self) -> bool:
        """Return whether a step is running: a user who comes back another day does not meet one."""
        return self.health is not None and self.health.learner == "training"

    @property
    def behind(self) -> bool:
        """Return whether a step has all its samples and is running.

        A learner that is `waiting` with a full batch needs other users' samples, so sessions go on.
        """
        return (
            self.health is not None
            and self.health.learner not in ("held", "failed", "waiting")
            and self.health.samples_waiting >= self.health.batch_size
        )

    @property
    def held(self) -> bool:
        """Return whether the server takes no further step until its owner says so."""
        return self.health is not None and self.health.learner == "held"

    @property
    def idle(self) -> int:
        """Number of sessions that ended since the newest version was first seen."""
        newest = self.births.get(self.version)
        return self.sessions - (newest.sessions if newest else 0)

    def saw(self, health: Health) -> list[int]:
        """Record an answer of /healthz; return the versions that are new."""
        self.health = health
        first = self.version + 1 if self.births else 0
        new = list(range(first, health.policy_version + 1))
        for version in new:
            self.births[version] = Moment(version, self.sessions, self.seconds)
        return new

    def state(self) -> dict[str, Any]:
        """State from which another run can continue, as JSON holds it."""
        return {
            "seconds": self.seconds,
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
            "births": [asdict(moment) for moment in self.births.values()],
            "scores": {str(version): asdict(score) for version, score in self.scores.items()},
        }

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state`. Sessions that were in flight do not count as ended."""
        self.started = time.monotonic() - state["seconds"]
        self.outcomes = [Outcome(**outcome) for outcome in state["outcomes"]]
        self.births = {moment["version"]: Moment(**moment) for moment in state["births"]}
        self.scores = {int(at): Score(**score) for at, score in state["scores"].items()}

    def curve(self) -> list[Point]:
        """Every scored point, by step."""
        last = self.version if self.last is None else self.last
        return [
            (moment, self.scores[step])
            for step, moment in sorted(self.births.items())
            if step in self.scores and (step == last or self.options.scores(step))
        ]
