"""Which session and turn a request belongs to, and what it says about the turn before.

Rule: pure functions of the request. Every decision carries a reason that a person can read.
"""

from tinker_claw.sessions.calls import Call
from tinker_claw.sessions.history import (
    closest,
    conversation,
    digest,
    digests,
    ends,
    next_state,
    readings,
    reply_digest,
    reply_index,
    same,
    without_queued,
)
from tinker_claw.sessions.identity import Identity, flagged, identify
from tinker_claw.sessions.openclaw import (
    last_user_index,
    last_user_words,
    queued,
    sayings,
    summary_index,
    without_volatile,
    words,
)

__all__ = [
    "Call",
    "Identity",
    "closest",
    "conversation",
    "digest",
    "digests",
    "ends",
    "flagged",
    "identify",
    "last_user_index",
    "last_user_words",
    "next_state",
    "queued",
    "readings",
    "reply_digest",
    "reply_index",
    "same",
    "sayings",
    "summary_index",
    "without_queued",
    "without_volatile",
    "words",
]
