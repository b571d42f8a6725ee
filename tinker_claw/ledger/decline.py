"""Tell from the ledger whether users accept fewer first judged turns than when learning began.

For each user the newest are compared with the first ones since learning began, or since the last
rollback, or since they contradicted a lesson: what they accept has changed with them. Learning is
held from evidence of `HOLD` to 1 until it is below `CLAIM`.

Rule: a pure function of the ledger; nothing is stored, so that a restart, a rollback and `status`
agree. A window that slides is no e-process: how often it errs was simulated (`SIZE`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from tinker_claw.evidence import CLAIM, Rate, TwoRates, odds
from tinker_claw.ledger.database import Rows
from tinker_claw.ledger.firsts import FIRST, FIRSTS, First, share_of

HOLD = 200.0
"""Evidence from which learning is paused, in odds to 1."""
SIZE = 32
"""First judged turns on each side. Of 2,000 users with a constant share, 500 replies each, none was
held; a fall from .9 to .4 was found after 31 replies in the median, one from .9 to .1 after 19."""
_NEWEST = 1024
"""Newest first judged turns that are read, over all users."""
_REPLIES = f"""
SELECT {FIRST} FROM {FIRSTS} WHERE sessions.id >=
    (SELECT MIN(session_id) FROM turns WHERE kind = 'main' AND policy_version >= ?1)
  AND policy_version >= ?1 AND sessions.created_at >= COALESCE((SELECT MAX(changed_at) FROM lessons
    WHERE lessons.user = sessions.user AND state = 'aside'), 0)
"""


@dataclass(frozen=True, slots=True)
class Decline:
    """Fewer first judged turns of a user are accepted."""

    before: Rate
    now: Rate
    evidence: float
    version: int
    """Version that gave the last of those before."""
    newest: int
    """Newest version."""

    def __str__(self) -> str:
        return (
            f"{self.now.value:.0%} of the newest {self.now.of} first judged turns were accepted, "
            f"and {self.before.value:.0%} of the first {self.before.of} ({odds(self.evidence)}). "
            f"Learning goes on by itself below {CLAIM:.0f} to 1. To go on from the version before: "
            f"`tinker-claw rollback v{self.version}` (`tinker-claw versions` lists all). If you "
            f"want something else now than then: `tinker-claw rollback v{self.newest}` keeps what "
            "was learned and compares from here on"
        )


def decline(replies: Sequence[First], newest: int) -> Decline | None:
    """Return the decline for which learning is paused after these replies of one user; None: it is
    not held. `replies`: oldest first; `newest`: the newest version."""
    first, held = replies[:SIZE], None
    before, last = share_of(first), deque[First](maxlen=SIZE)
    for reply in replies[SIZE:]:
        last.append(reply)
        now = share_of(last)
        evidence = TwoRates(before, now).e_value if now.value < before.value else 0.0
        holds = evidence >= (CLAIM if held else HOLD)
        held = Decline(before, now, evidence, first[-1].version, newest) if holds else None
    return held


def read_decline(rows: Rows) -> Decline | None:
    """Return the clearest decline of any user for which learning is paused; None: it is not."""
    begun = rows.one(
        "SELECT MAX(id) FROM versions WHERE NOT EXISTS "
        "(SELECT 1 FROM steps WHERE steps.version = versions.id)"  # the first, or a rollback's
    )
    newest_rows = rows.rows(f"{_REPLIES} ORDER BY sessions.id DESC LIMIT {_NEWEST}", begun)
    newest = [First(*row) for row in newest_rows]
    of = defaultdict[str, set[First]](set)
    for reply in newest:
        of[reply.user].add(reply)
    if len(newest) == _NEWEST:
        for user, replies in of.items():
            earliest = f"{_REPLIES} AND user = ?2 ORDER BY sessions.id LIMIT {SIZE}"
            replies |= {First(*row) for row in rows.rows(earliest, begun, user)}
    newest_version = rows.one("SELECT MAX(id) FROM versions")
    declines = filter(
        None, (decline(sorted(user_replies), newest_version) for user_replies in of.values())
    )
    return max(declines, key=lambda candidate: candidate.evidence, default=None)
