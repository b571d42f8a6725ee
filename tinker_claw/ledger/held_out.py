"""First turns of sessions that are kept from training, and on which new versions are tested.

Rule: the beginning of one session in sixteen is held out, up to the first reply that its user
accepted, and never more than a few turns: most of a user's words are for learning, and a session
that lasts for weeks loses only its beginning. Private and forgotten turns are never used.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from tinker_claw.ledger.database import Database
from tinker_claw.ledger.turns import TurnTable
from tinker_claw.types import Images, StopReason, Tokens

HELD_OUT = "held out: the gate asks new versions for it (--gate)"
"""Reason why such a turn is not trained."""
ONE_IN = 16
"""Sessions of which one is held out. It costs a sixteenth of the samples where sessions are short,
and less elsewhere."""
FIRST = 8
"""Most turns held out of a session."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The beginning of a session."""

    turn_id: int
    """Id of the session's first turn."""
    prompt: Tokens
    accepted: Tokens
    """Tokens of the first reply that the user accepted."""
    accepted_id: int
    """Turn id of the accepted reply."""
    images: Images = ()
    """Images in the prompt."""


def is_drawn(session_id: int) -> bool:
    """Return whether the beginning of this session is held out, the same after a restart.

    It is one of every sixteen in a row, chosen by a hash, so that users or agents who take turns
    are all held out at times. The prefix keeps the choice independent of which of two versions
    answers (`PolicyHolder`).
    """
    row, place = divmod(session_id - 1, ONE_IN)
    return sha256(f"held out {row}".encode()).digest()[0] % ONE_IN == place


class HeldOutTable:
    """Read-only table of held-out turns, which are marked by their reason for not being trained."""

    def __init__(self, database: Database, turns: TurnTable) -> None:
        self._db = database
        self._turns = turns

    def picks(self, turn_id: int) -> bool:
        """Return whether this turn is to be held out. Episodes are trained whole, or not at all."""
        row = self._db.row(
            "SELECT session_id FROM turns JOIN sessions ON sessions.id = session_id "
            "WHERE turns.id = ? AND episode = 0 AND group_id IS NULL "
            "AND kind = 'main' AND idx < ? AND NOT EXISTS (SELECT 1 FROM turns AS earlier "
            "JOIN verdicts ON verdicts.turn_id = earlier.id AND value = 1 "
            "WHERE earlier.session_id = turns.session_id AND earlier.kind = 'main' "
            "AND earlier.idx < turns.idx)",
            turn_id,
            FIRST,
        )
        return row is not None and is_drawn(row["session_id"])

    def newest(self, most: int) -> list[HeldOut]:
        """Return up to `most` beginnings that led to an accepted reply, newest first, alternating
        between users."""
        usable = "untrained_because = ?1 AND blanked IS NULL"
        found = self._db.rows(
            "SELECT first, (SELECT turns.id FROM turns JOIN verdicts ON turn_id = turns.id "
            "WHERE session_id = session AND kind = 'main' AND value = 1 AND stop_reason = ?2 "
            f"AND LENGTH(tokens) > 1 AND {usable} ORDER BY idx LIMIT 1) AS accepted "
            "FROM (SELECT turns.id AS first, session_id AS session, ROW_NUMBER() OVER "
            "(PARTITION BY user ORDER BY turns.id DESC) AS nth FROM turns "
            "JOIN sessions ON sessions.id = session_id "
            f"WHERE kind = 'main' AND idx = 0 AND private = 0 AND {usable}) "
            "WHERE accepted IS NOT NULL ORDER BY nth, first DESC LIMIT ?3",
            HELD_OUT,
            StopReason.STOP,
            most,
        )
        turns = ((self._turns.get(row["first"]), self._turns.get(row["accepted"])) for row in found)
        return [
            HeldOut(first.id, first.prompt, then.completion.tokens, then.id, first.images)
            for first, then in turns
        ]
