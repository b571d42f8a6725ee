"""Votes, verdicts and hints of turns.

Rule: all results of the judge for one turn are one transaction. Explicit feedback takes precedence
over it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinker_claw.ledger.database import LedgerTable
from tinker_claw.ledger.firsts import ACCEPTED, OWNERS
from tinker_claw.ledger.lessons import learn
from tinker_claw.ledger.turns import check_kept, reopen
from tinker_claw.types import Verdict, Vote, Wish

DEMONSTRATION = """
SELECT CASE given.value WHEN 1 THEN NULLIF(later.reply_text, '') END FROM turns AS later
JOIN verdicts AS given ON given.turn_id = later.id AND given.value IS NOT -1
LEFT JOIN next_states AS said ON said.turn_id = later.id
WHERE (said.role = 'user' OR given.score IS NOT NULL)
  AND later.session_id = turns.session_id AND later.kind = 'main' AND later.idx > turns.idx
ORDER BY later.idx LIMIT 1
"""
"""SQL on a row of `turns`: the reply of `JudgementTable.demonstration`."""
BEHIND_HINTS = 16
"""Newest replies behind a user's hints that show whether the model does what they ask; with fewer
than a quarter as many it is not known."""
FOLLOWED = 1 / 4
"""Share of them that the user must have accepted more than."""
_BEHIND_HINTS = f"""
SELECT {ACCEPTED} FROM hints
  CROSS JOIN turns AS hinted ON hinted.id = hints.turn_id AND hinted.kind = 'main'
  CROSS JOIN sessions ON sessions.id = hinted.session_id
  CROSS JOIN turns ON turns.id = (SELECT later.id FROM turns AS later
      CROSS JOIN verdicts ON verdicts.turn_id = later.id
      LEFT JOIN next_states ON next_states.turn_id = later.id
    WHERE later.session_id = sessions.id AND later.kind = 'main' AND later.idx > hinted.idx
      AND {OWNERS} ORDER BY later.idx LIMIT 1)
  CROSS JOIN verdicts ON verdicts.turn_id = turns.id
WHERE rank = 0
  AND user = (SELECT user FROM sessions JOIN turns ON session_id = sessions.id WHERE turns.id = ?)
ORDER BY hints.turn_id DESC LIMIT {BEHIND_HINTS}
"""


class JudgementTable(LedgerTable):
    """Table of the judge's answers."""

    def add(
        self,
        turn_id: int,
        *,
        value: Vote | None,
        weight: float = 1.0,
        ballots: Sequence[tuple[str, Vote | None]],
        hints: Sequence[str],
        prompt: str | None = None,
        wish: Wish | None = None,
        repeats: int | None = None,
        contradicts: int | None = None,
    ) -> int | None:
        """Write a judge's answers, verdict and hints for one turn; return the lesson of which the
        wish made a new candidate. Explicit feedback still takes precedence.

        Args:
            ballots: the judge's answers, each with the vote read from it.
            prompt: version of the judge prompts; None: no judge was asked.
            wish: becomes a candidate.
            repeats: id of the lesson that the owner has said again.
            contradicts: id of the one that the wish sets aside.
        """
        with self._db.transaction() as tx:
            check_kept(tx, turn_id)
            tx.executemany(
                "INSERT INTO votes (turn_id, n, value, answer) VALUES (?, ?, ?, ?)",
                [(turn_id, n, vote, answer) for n, (answer, vote) in enumerate(ballots)],
            )
            first = "(SELECT COALESCE(MAX(rank) + 1, 0) FROM hints WHERE turn_id = ?1)"
            tx.executemany(
                f"INSERT INTO hints (turn_id, rank, text) VALUES (?1, {first}, ?2)",
                [(turn_id, text) for text in hints],
            )
            tx.execute(
                "INSERT INTO verdicts (turn_id, value, weight, judged, prompt) "
                "VALUES (?1, ?2, ?3, ?2, ?4) ON CONFLICT (turn_id) DO UPDATE SET "
                "judged = excluded.judged, prompt = excluded.prompt",
                (turn_id, value, weight, prompt),
            )
            return learn(tx, turn_id, wish, repeats, contradicts)

    def follows_hints(self, turn_id: int) -> bool:
        """Return whether the model does what the hints of a turn's user ask, as far as known: of
        the first replies that they judged behind each, with the correction in their prompt, they
        have accepted more than `FOLLOWED`."""
        accepted = self._db.column(_BEHIND_HINTS, turn_id)
        return len(accepted) < BEHIND_HINTS // 4 or sum(accepted) > FOLLOWED * len(accepted)

    def demonstration(self, turn_id: int) -> str | None:
        """Return the accepted reply that corrects this turn: the first later one of the session
        that the user answered and did not reject; None: there is none, or none yet."""
        return self._db.one(f"SELECT ({DEMONSTRATION}) FROM turns WHERE id = ?", turn_id)

    def take_up_corrected(self, accepted: int, reason: str) -> bool:
        """Reopen rejected turns that were refused for `reason`, if they lacked a demonstration and
        turn `accepted` of their session brings one. True: some were reopened."""
        with self._db.transaction() as tx:
            rejected = tx.execute(
                "SELECT turns.id FROM turns JOIN turns AS later "
                "ON later.session_id = turns.session_id AND later.kind = turns.kind "
                "AND later.idx > turns.idx JOIN verdicts ON turn_id = turns.id "
                "WHERE later.id = ? AND value = -1 AND turns.reason = ? "
                "AND LENGTH(turns.tokens) > 1",
                (accepted, reason),
            )
            again = [row["id"] for row in rejected.fetchall() if self.demonstration(row["id"])]
            for turn_id in again:
                reopen(tx, turn_id)
        return bool(again)

    def verdict(self, turn_id: int) -> Verdict | None:
        """Return the verdict; None: not judged yet. A verdict with value None: judged, no valid
        vote."""
        row = self._db.row(
            "SELECT value, source, score, weight FROM verdicts WHERE turn_id = ?", turn_id
        )
        if row is None:
            return None
        votes = self._db.column("SELECT value FROM votes WHERE turn_id = ? ORDER BY n", turn_id)
        return Verdict(votes=tuple(votes), **row)

    def hints(self, turn_id: int) -> tuple[str, ...]:
        """Return the hints, best first. Explicit ones replace the judge's; where explicit feedback
        accepts the reply, there are none."""
        rows = self._db.rows(
            "SELECT hints.text, hints.source, score FROM hints "
            "LEFT JOIN verdicts ON verdicts.turn_id = hints.turn_id "
            "WHERE hints.turn_id = ? AND COALESCE(score, -1) < 0 ORDER BY rank",
            turn_id,
        )
        outright = [row for row in rows if row["source"] != "judge"]
        return tuple(row["text"] for row in outright or rows)
