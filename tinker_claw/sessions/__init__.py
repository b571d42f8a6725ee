"""Which session and turn a request belongs to, and what it says about the turn before.

Rule: pure functions of the request. Every decision carries a reason that a person can read.
"""

from tinker_claw.sessions.history import (
    digest,
    digests,
    extension,
    next_state,
    reply_digest,
)
from tinker_claw.sessions.identity import Identity, identify
from tinker_claw.sessions.openclaw import last_user_index, last_user_words, without_volatile

__all__ = [
    "Identity",
    "digest",
    "digests",
    "extension",
    "identify",
    "last_user_index",
    "last_user_words",
    "next_state",
    "reply_digest",
    "without_volatile",
]
