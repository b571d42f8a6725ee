"""Tell from the ledger whether users accept fewer first replies than when learning began.

A session's first reply is the first that its user judged, by the next message or by a rating; it is
accepted unless the verdict is -1. What tools and episodes say is left out. For each user the newest
replies are compared with the first ones since learning began, or since the last rollback. Learning
is held from evidence of `HOLD` to 1 until it is below `CLAIM`.

Rule: a pure function of the ledger; nothing is stored, so that a restart, a rollback and `status`
agree. A window that slides is no e-process: how often it errs was simulated (`SIZE`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tinker_claw.evidence import CLAIM, Rate, TwoRates, odds
from tinker_claw.ledger.database import Rows

HOLD = 200.0
"""Evidence from which learning is held, in odds to 1."""
SIZE = 32
"""First replies on each side. Of 2,000 users with a constant share, 500 replies each, none was
held; a fall from .9 to .4 was found after 31 replies in the median, one from .9 to .1 after 19."""
_NEWEST = 1024
"""Newest first replies that are read, over all users."""
FIRST = """turns.id = (SELECT one.id FROM turns AS one
  LEFT JOIN next_states ON next_states.turn_id = one.id
  LEFT JOIN verdicts ON verdicts.turn_id = one.id
  WHERE one.session_id = sessions.id AND one.kind = 'main' AND (role = 'user' OR score IS NOT NULL)
  ORDER BY one.idx LIMIT 1)"""
"""SQL: a turn is the first of its session that the user judged."""
_REPLIES = f"""
SELECT policy_version AS version, turns.id AS turn, user, value >= 0 AS accepted
FROM sessions CROSS JOIN turns ON {FIRST} CROSS JOIN verdicts ON verdicts.turn_id = turns.id
WHERE sessions.id >=
    (SELECT MIN(session_id) FROM turns WHERE kind = 'main' AND policy_version >= ?1)
  AND policy_version >= ?1 AND fallback IS NULL AND value IS NOT NULL AND episode = 0
"""


class Reply(NamedTuple):
    """A first reply; their order is that of the versions that gave them, so that one that is pinned
    or asked for by name says nothing about the newest."""

    version: int
    turn: int
    user: str
    accepted: bool


@dataclass(frozen=True, slots=True)
class Decline:
    """Fewer first replies of a user are accepted."""

    before: Rate
    now: Rate
    evidence: float
    version: int
    """Version that gave the last of the first replies."""

    def __str__(self) -> str:
        return (
            f"{self.now.value:.0%} of the newest {self.now.of} first replies were accepted, and "
            f"{self.before.value:.0%} of the first {self.before.of} ({odds(self.evidence)}). "
            f"Learning goes on by itself below {CLAIM:.0f} to 1. To go on from the version before: "
            f"`tinker-claw rollback v{self.version}` (`tinker-claw versions` lists all)"
        )


def decline(replies: Sequence[Reply]) -> Decline | None:
    """Return the decline for which learning is held after these replies of one user; None: it is
    not held. `replies`: oldest first."""
    first, held = replies[:SIZE], None
    before = Rate(sum(reply.accepted for reply in first), len(first))
    newest = deque[bool](maxlen=SIZE)
    for reply in replies[SIZE:]:
        newest.append(reply.accepted)
        now = Rate(sum(newest), len(newest))
        evidence = TwoRates(before, now).e_value if now.value < before.value else 0.0
        holds = evidence >= (CLAIM if held else HOLD)
        held = Decline(before, now, evidence, first[-1].version) if holds else None
    return held


def read_decline(rows: Rows) -> Decline | None:
    """Return the clearest decline of any user for which learning is held; None: it is not held."""
    begun = rows.one(
        "SELECT MAX(id) FROM versions WHERE NOT EXISTS "
        "(SELECT 1 FROM steps WHERE steps.version = versions.id)"  # the first, or a rollback's
    )
    found = rows.rows(f"{_REPLIES} ORDER BY sessions.id DESC LIMIT {_NEWEST}", begun)
    newest = [Reply(*row) for row in found]
    of = defaultdict[str, set[Reply]](set)
    for reply in newest:
        of[reply.user].add(reply)
    if len(newest) == _NEWEST:
        for user, replies in of.items():
            earliest = f"{_REPLIES} AND user = ?2 ORDER BY sessions.id LIMIT {SIZE}"
            replies |= {Reply(*row) for row in rows.rows(earliest, begun, user)}
    declines = filter(None, (decline(sorted(replies)) for replies in of.values()))
    return max(declines, key=lambda one: one.evidence, default=None)
