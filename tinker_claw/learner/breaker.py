"""Circuit breakers of the services that judging asks: the judge, the teacher, the ledger."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tinker_claw.errors import JudgeError, LedgerError, OutageError
from tinker_claw.retry import Backoff

LATELY = 8
"""Number of latest tries that show whether the judge works."""
UNREADABLE = (
    "most of the judge's latest answers could not be read: it does not answer in the form it is "
    "asked for, refuses, or is cut off"
)


class UnreadError(JudgeError):
    """Raised when the judge answered, and nothing can be read."""


@dataclass(slots=True, eq=False)
class Breaker:
    """Latest answers of a service. While it fails as a whole, one turn at a time asks it."""

    waits: Backoff
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=LATELY))
    """Readable share of each of the latest answers, but those for which a turn is to blame."""
    error: Exception | None = None
    """Why the last try got no answer; None: it got one, or its turn is to blame."""
    succeeded: bool = False
    """Whether the last try succeeded."""
    failures: int = 0
    """Failures in a row that blame no turn; those under way at the same time count once."""
    asks_at: float = 0.0
    """When the next turn may ask while it fails, in seconds since 1970."""

    @property
    def trouble(self) -> str | None:
        """Reason why it fails as a whole; None: it works, as far as known."""
        if self.error is not None:
            return str(self.error)
        return UNREADABLE if 2 * sum(self.shares) < len(self.shares) else None

    def lets(self, now: float, asking: int) -> bool:
        """Return whether one more turn may ask beside `asking` others."""
        return self.trouble is None or (now >= self.asks_at and not asking)

    def answered(self, share: float = 1.0) -> None:
        """Record an answer of which this share can be read."""
        self.shares.append(share)
        self.error, self.succeeded, self.failures, self.asks_at = None, True, 0, 0.0

    def failed(self, error: Exception, now: float) -> bool:
        """Record a failed try; return whether its turn is to blame: the service works, and another
        turn has succeeded since the last failure."""
        away = isinstance(error, OutageError | LedgerError)
        blamed = self.succeeded and self.trouble is None and not away
        self.succeeded = False
        if not blamed:
            self.error = None if isinstance(error, UnreadError) else error
            if not away:
                self.shares.append(0.0)
            if now >= self.asks_at:
                self.failures += 1
                self.asks_at = now + self.waits.after(self.failures)
        return blamed

    def end_outage(self) -> bool:
        """Return whether it was away, and take it for well: no turn waits for it any more."""
        away = isinstance(self.error, OutageError | LedgerError)
        if away:
            self.error, self.failures, self.asks_at = None, 0, 0.0
        return away
