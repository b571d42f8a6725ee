"""First judged turns: what shares of accepted replies are counted of.

The first judged turn of a session is the first that its owner accepted or rejected, by their next
message or by a rating: in an agent usually the reply after the tools. What tools, other people and
programs say of a turn is not the owner's, and a neutral verdict does not tell. Episodes have an
outcome instead, and the replies of a stand-in are no version's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from tinker_claw.evidence import Rate
from tinker_claw.ledger.database import Rows

OWNERS = (
    "value <> 0 AND (verdicts.source = 'user' OR (verdicts.source = 'judge' AND role = 'user'))"
)
"""SQL on a verdict and its turn's next state: the owner has accepted or rejected the reply."""
FIRSTS = f"""
sessions CROSS JOIN turns ON turns.id = (SELECT one.id FROM turns AS one
    CROSS JOIN verdicts ON verdicts.turn_id = one.id
    LEFT JOIN next_states ON next_states.turn_id = one.id
  WHERE one.session_id = sessions.id AND one.kind = 'main' AND {OWNERS} ORDER BY one.idx LIMIT 1)
  AND fallback IS NULL AND episode = 0
CROSS JOIN verdicts ON verdicts.turn_id = turns.id
"""
"""SQL of sessions with their first judged turn and its verdict, +1 or -1."""
ACCEPTED = "value > 0"
"""SQL on a row of `FIRSTS`."""


class First(NamedTuple):
    """A first judged turn. They are ordered by the versions that gave them, so that one that is
    pinned or asked for by name says nothing about the newest."""

    version: int
    turn: int
    user: str
    accepted: bool


FIRST = f"policy_version AS version, turns.id AS turn, user, {ACCEPTED} AS accepted"
"""SQL whose columns are the fields of `First`."""


def read_firsts(rows: Rows, user: str | None = None) -> list[First]:
    """Return the first judged turns in their order. `user`: only theirs; None: everybody's."""
    first_rows = rows.rows(f"SELECT {FIRST} FROM {FIRSTS} WHERE user = COALESCE(?, user)", user)
    return sorted(First(*row) for row in first_rows)


def share_of(firsts: Collection[First]) -> Rate:
    """Return the share of first judged turns accepted."""
    return Rate(sum(first.accepted for first in firsts), len(firsts))
