"""State of a turn, and the reason why a turn is not trained.

Rule: `TurnTable.add` writes a turn's first state, and `ledger.turns.set_state` every later one, in
the transaction that changes it; readers only read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TurnState(StrEnum):
    """Stage of a turn on its way to a version, as the ledger keeps it."""

    WAITING = "waiting"
    """For the message that judges it."""
    JUDGING = "judging"
    """It has what the judge needs, or a rating, or the outcome of its episode."""
    HELD = "held"
    """Its sample waits for the outcomes of its episode's group."""
    QUEUED = "queued"
    """Its sample waits for a step."""
    TRAINED = "trained"
    REFUSED = "refused"
    FORGOTTEN = "forgotten"
    """It was trained, and forgotten later: its texts and tokens are gone."""

    @property
    def is_final(self) -> bool:
        return self in (TurnState.TRAINED, TurnState.REFUSED, TurnState.FORGOTTEN)


class Reason(StrEnum):
    """Reasons why a turn is not trained, by which turns are counted. A method adds its own."""

    # The request, or its reply
    SIDE = "side turn"
    RATING = "reply to a rating"
    SESSION_DONE = "last turn of its session (X-Session-Done)"
    AFTER_PRIVATE = "private text in the prompt"
    HOLDS = "private data"
    IMAGES = "image, with --images serve"
    OTHERS_IMAGE = "image of somebody else"
    SAMPLING = "sampling parameters"
    HUNG_UP = "client hung up"
    STOPPED = "gateway stopped during the reply"
    BROKE_OFF = "reply broke off"
    STOP_STRING = "cut at a stop string"
    ONE_CALL = "cut before a second call"
    EMPTY = "empty reply"
    TWO_POLICIES = "tokens of two policies"
    BASE_MODEL = "base model answered"
    # What followed
    EPISODE_OVER = "episode was over"
    UNCLEAR = "unclear who wrote the next message"
    UNJUDGED = "could not be judged"
    UNFOLLOWED = "no next message"
    UNFOLLOWED_SECRET = "secret in the prompt and no next message"
    NOT_CONTINUED = "episode went on without it"
    UNSCORED = "teacher failed"
    UNFIT_HINT = "hint does not fit"
    UNFOLLOWED_HINTS = "hints of this user are not followed"
    ENDLESS_HINT = "teacher would not end the reply there"
    # Its sample
    TOO_OLD = "too old"
    NOTHING_BETTER = "nothing better in its batches"
    STEPS_FAILED = "steps with it failed"
    LEFT_BEHIND = "its version was rolled back"
    NO_OUTCOME = "no outcome in time"
    EQUAL_REWARDS = "equal rewards in its group"
    LARGE_GROUP = "group larger than a step"
    BROKEN_GROUP = "group lost a sample"
    # What was forgotten
    FORGOTTEN_LESSON = "lesson in the prompt was forgotten"
    FORGOTTEN_NEXT = "next message was forgotten"


@dataclass(frozen=True, slots=True)
class TurnRefusal:
    """Reason why a turn is not trained, and a detail."""

    reason: str
    """A `Reason`, or a method's own words: turns are counted by it."""
    detail: str = ""
    """More about the reason, only shown."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason
