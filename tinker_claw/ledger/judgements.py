"""Votes, verdicts and hints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tinker_claw.ledger.database import Database
from tinker_claw.types import Verdict, Vote

TRIES = 3
"""In vain; then a turn is set aside."""
SET_ASIDE = "set aside: three times it could not be judged; `run.py rejudge` takes it up again"
"""Stands as the reason why such a turn is not trained."""
_LONGEST = 2000
"""Characters that are kept of what came of a try in vain."""

_SET_ASIDE = """
SELECT turns.id FROM turns JOIN next_states ON turn_id = turns.id
WHERE untrained_because = ? AND LENGTH(tokens) > 1 AND text <> '' ORDER BY turns.id
"""


@dataclass(frozen=True, slots=True)
class Ballot:
    """One answer of the judge, as written and as understood."""

    answer: str
    value: Vote | None


class JudgementTable:
    """Rows that the judge writes."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(
        self,
        turn_id: int,
        *,
        value: Vote | None,
        verdict_ballots: Sequence[Ballot],
        hint_ballots: Sequence[Ballot],
        hints: Sequence[str],
    ) -> None:
        """Write everything that the judge said of one turn, together."""
        with self._db.transaction() as tx:
            for about, ballots in (("verdict", verdict_ballots), ("hint", hint_ballots)):
                tx.executemany(
                    "INSERT INTO votes (turn_id, about, n, value, answer) VALUES (?, ?, ?, ?, ?)",
                    [(turn_id, about, n, b.value, b.answer) for n, b in enumerate(ballots)],
                )
            tx.executemany(
                "INSERT INTO hints (turn_id, rank, text) VALUES (?, ?, ?)",
                [(turn_id, rank, text) for rank, text in enumerate(hints)],
            )
            tx.execute(
                "INSERT INTO verdicts (turn_id, value, created_at) VALUES (?, ?, ?)",
                (turn_id, value, time.time()),
            )

    def add_in_vain(self, turn_id: int, answer: str) -> int:
        """A try gave no verdict, by the turn's own fault; returns how many did.

        The last one sets the turn aside. `answer`: what the judge said, or what went wrong.
        """
        with self._db.transaction() as tx:
            tries = self.in_vain(turn_id)
            tx.execute(
                "INSERT INTO votes (turn_id, about, n, value, answer) "
                "VALUES (?, 'in vain', ?, NULL, ?)",
                (turn_id, tries, answer[:_LONGEST]),
            )
            if tries + 1 >= TRIES:
                tx.execute(
                    "UPDATE turns SET settled = 1, untrained_because = ? "
                    "WHERE id = ? AND settled = 0",
                    (SET_ASIDE, turn_id),
                )
        return tries + 1

    def in_vain(self, turn_id: int) -> int:
        """How many tries were in vain."""
        row = self._db.row(
            "SELECT COUNT(*) AS n FROM votes WHERE turn_id = ? AND about = 'in vain'", turn_id
        )
        return row["n"] if row else 0

    def take_up(self, turn_ids: Sequence[int] | None) -> list[int]:
        """Turns that were set aside are to be judged again; returns which.

        Args:
            turn_ids: of these, those that can be; None: all. What has lost its text stays.
        """
        with self._db.transaction() as tx:
            found = [row["id"] for row in tx.execute(_SET_ASIDE, (SET_ASIDE,))]
            again = [one for one in found if turn_ids is None or one in turn_ids]
            for turn_id in again:
                tx.execute("DELETE FROM votes WHERE turn_id = ? AND about = 'in vain'", (turn_id,))
                tx.execute(
                    "UPDATE turns SET settled = 0, untrained_because = NULL WHERE id = ?",
                    (turn_id,),
                )
        return again

    def demonstration(self, turn_id: int) -> str | None:
        """The reply that the user accepted after this turn, if it is the first later one of the
        session that they answered and did not reject; None: there is none, or none yet."""
        row = self._db.row(
            "SELECT later.reply_text, value FROM turns JOIN turns AS later "
            "ON later.session_id = turns.session_id AND later.kind = 'main' "
            "AND later.idx > turns.idx "
            "JOIN next_states ON next_states.turn_id = later.id AND role = 'user' "
            "JOIN verdicts ON verdicts.turn_id = later.id AND value IS NOT -1 "
            "WHERE turns.id = ? ORDER BY later.idx LIMIT 1",
            turn_id,
        )
        return row["reply_text"] or None if row and row["value"] == 1 else None

    def take_up_corrected(self, accepted: int, reason: str) -> bool:
        """Rejected turns that were refused for this reason are open again, if what they lacked is a
        demonstration, and the turn `accepted` of their session has brought one. True: some are."""
        with self._db.transaction() as tx:
            found = tx.execute(
                "SELECT turns.id FROM turns JOIN turns AS later "
                "ON later.session_id = turns.session_id AND later.kind = turns.kind "
                "AND later.idx > turns.idx JOIN verdicts ON turn_id = turns.id "
                "WHERE later.id = ? AND value = -1 AND turns.untrained_because = ? "
                "AND LENGTH(turns.tokens) > 1",
                (accepted, reason),
            )
            again = [(row["id"],) for row in found if self.demonstration(row["id"])]
            tx.executemany(
                "UPDATE turns SET settled = 0, untrained_because = NULL WHERE id = ?", again
            )
        return bool(again)

    def verdict(self, turn_id: int) -> Verdict | None:
        """None: not judged yet. A verdict whose value is None: judged, no valid vote."""
        row = self._db.row("SELECT value FROM verdicts WHERE turn_id = ?", turn_id)
        if row is None:
            return None
        votes = self._db.rows(
            "SELECT value FROM votes WHERE turn_id = ? AND about = 'verdict' ORDER BY n", turn_id
        )
        return Verdict(votes=tuple(v["value"] for v in votes), value=row["value"])

    def hints(self, turn_id: int) -> tuple[str, ...]:
        rows = self._db.rows("SELECT text FROM hints WHERE turn_id = ? ORDER BY rank", turn_id)
        return tuple(row["text"] for row in rows)

    def counts(self) -> dict[str, int]:
        """How many verdicts of each value, and how many hints, so far."""
        names = {1: "good", 0: "neutral", -1: "bad", None: "none"}
        counts = dict.fromkeys([*names.values(), "hints"], 0)
        for row in self._db.rows("SELECT value, COUNT(*) AS n FROM verdicts GROUP BY value"):
            counts[names[row["value"]]] = row["n"]
        hinted = self._db.row("SELECT COUNT(DISTINCT turn_id) AS n FROM hints")
        counts["hints"] = hinted["n"] if hinted else 0
        return counts
