"""Reasons why a turn is not trained, or not yet: the number in its row, and the words for it.

Rule: these words are written only here, and only the numbers decide anything. A new reason is a
member of `Why`, and the place that gives it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, Self


class Because(str):
    """A reason in words, with its number."""

    why: Why


class Why(IntEnum):
    """Reasons; `{}` stands for a detail of the turn. A number is never given to another reason."""

    words: str

    def __new__(cls, number: int, words: str) -> Self:
        member = int.__new__(cls, number)
        member._value_ = number
        member.words = words
        return member

    # It waits, or something was done with its sample
    NEXT = 1, "waits for a next state"
    IDLE = 2, "waits for a next state in an idle session"
    PASSED = 3, "waits for a next state, and may wait for ever"
    ENDING = 4, "waits for its outcome"
    GROUP = 5, "waits for its group"
    JUDGE = 6, "waits for the judge"
    QUEUE = 7, "waits to be queued"
    STEP = 8, "waits for its step"
    TRAINING = 9, "being trained right now"
    EXPIRED = 10, "its sample expired"
    BARE = 12, "waits for a better reply to be compared with"
    BASELINE = 13, "waits for a rejection, a hint or a rating to be compared with"
    QUARANTINED = 11, "its sample was set aside"
    # The request, or its reply
    SIDE = 20, "side turn: {}"
    VERDICT = 21, "reply to a rating; nothing to learn from"
    ENDED = 22, "X-Session-Done: the session ended with it, so nothing judges it"
    AFTER_PRIVATE = 23, "its prompt holds what was said in private"
    HOLDS = 24, "holds {}"
    PICTURED = 25, "holds an image, on which --images serve does not train"
    NOT_THEIRS = 26, "holds an image that neither an owner nor a tool has sent"
    SAMPLED_AT = 27, "sampled at {}"
    HUNG_UP = 29, "the client hung up"
    BROKE_OFF = 30, "the reply broke off: {}"
    STOP_STRING = 31, "its text was cut at a stop string of the request"
    ONE_CALL = 32, "it was ended before a second call, as the request asked"
    NOTHING = 33, "nothing was sampled"
    TWO_POLICIES = 34, "sampled by {}, which are not one policy"
    BASE = 35, "the base model answered"
    STOPPED = 36, "the gateway stopped before the reply was complete"
    # What followed
    OVER = 50, "it came after its episode had its outcome, or its group was over"
    NOT_UNDERSTOOD = 51, "what followed it may hold words of others"
    SET_ASIDE = (
        52,
        "set aside: three times it could not be judged; `tinker-claw rejudge` takes it up again",
    )
    UNFOLLOWED = 53, "nothing followed it before it was dropped for its age"
    LATER = 54, "its episode ended without going on from it"
    UNSCORED = 55, "the teacher could not score it: {}"
    UNFIT_HINT = 56, "what its teacher would be told does not fit: {}"
    METHOD = 57, "{}"
    UNFOLLOWED_HINTS = (
        58,
        "this user's hints are not followed (of the newest replies behind one at most a quarter "
        "were accepted), so they are not distilled",
    )
    UNREACHED_END = (
        79,
        "its teacher would go on where this reply ends, so its hint is not distilled: that would "
        "teach replies not to end",
    )
    NO_GRADIENT = 59, "nothing in its batch said what is better than the rest"
    # Its sample, or what was forgotten
    FORGOTTEN = 70, "forgotten"
    FORGOTTEN_LESSON = 71, "its prompt held a lesson whose source was forgotten"
    UNSAID = 72, "what followed it was forgotten"
    LEFT_BEHIND = 73, "a rollback has left the version that answered behind"
    NO_OUTCOME = 74, "no outcome of its episode came in time"
    AGREED = 75, "all episodes of its group had the same reward at this step"
    TOO_LARGE = 76, "its group has more samples than a step may take, eight times --batch-size"
    MATE_TOO_OLD = 77, "another sample of its group had grown too old"
    UNWAITED = 78, "its prompt held a secret, and nothing followed before its session was closed"

    def says(self, detail: str = "") -> Because:
        """Return the reason in words."""
        because = Because(self.words.replace("{}", detail))
        because.why = self
        return because

    @property
    def head(self) -> str:
        """Its words without a detail, by which turns are counted."""
        return self.words.partition("{}")[0].rstrip(": ")


COUNTED: Final = (Why.SIDE, Why.UNSCORED, Why.UNFIT_HINT)
"""Reasons whose details are those of one turn: turns are counted without them."""


def why_of(reason: str | None) -> Why | None:
    """Return the number of a reason; one in a method's own words is the method's."""
    return None if reason is None else reason.why if isinstance(reason, Because) else Why.METHOD


def in_words(reason: int | str) -> str:
    """Describe the ledger's record of a turn: the number of a reason, minus the step that trained
    it, or a reason with its detail."""
    if isinstance(reason, str):
        return reason
    return Why(reason).head if reason > 0 else f"trained in step {-reason}"
