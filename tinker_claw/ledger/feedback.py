"""Explicit feedback on a reply or on how a session ended, and its effects.

Rule: feedback takes precedence over the judge, the newest over older, and nothing is trained twice:
feedback on a trained reply is only recorded. All its changes to a turn, verdict, hint and sample
are one transaction. One query checks whose turn it is: another user's turn, a forgotten one, a
private one and one that never existed are indistinguishable.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import asdict, dataclass
from typing import Literal

from tinker_claw.errors import ClawError
from tinker_claw.ledger.database import LedgerTable, insert
from tinker_claw.ledger.turns import reopen, set_state
from tinker_claw.turn_state import Reason, TurnRefusal, TurnState
from tinker_claw.types import RatedBy

SESSION_DONE = TurnRefusal(Reason.SESSION_DONE)
"""Why a turn is not trained, unless somebody rates it."""
NO_EPISODE = "it is of how the session ended, and the session is no episode (X-Turn-Type: episode)"
"""Why an outcome of a plain session trains no reply."""
TOO_LATE = "the episode is over: it was queued already, or has expired"
"""Why an outcome that comes late trains no reply."""
_OUTCOMES = (NO_EPISODE, None, TOO_LATE)
"""Reasons why an outcome trains no reply, by `sessions.episode`."""

LONGEST_TEXT = 4000
"""Most characters of a hint: a sentence or two, which a teacher reads with every reply it
scores."""


@dataclass(frozen=True, slots=True)
class About:
    """Subject of the feedback, named in one of three ways."""

    what: Literal["turn", "response", "session"]
    name: int | str
    """The ledger's id of a turn, the client's name of a reply, or that of a session, meaning its
    newest main turn."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """Feedback as a client gives it."""

    score: float
    """Rating from -1 to 1."""
    text: str = ""
    """Text with secrets removed. For a score below 0 it becomes the teacher's hint."""
    source: RatedBy = "user"
    final: bool = False
    """Whether it rates how the session ended rather than a reply."""
    task: str | None = None
    group: str | None = None
    key: str | None = None
    """The client's idempotency key, unique for a user; None without one."""


@dataclass(frozen=True, slots=True)
class Given:
    """Feedback as it is recorded."""

    id: int
    turn_id: int
    repeated: bool
    """Whether it had been recorded before."""
    unused: str | None
    """Why no reply is trained by it; None: it is the verdict of one."""


class KeyReusedError(ClawError):
    """Raised when a key is used again for different feedback."""


_ABOUT = {
    "turn": "turns.id = :name",
    "response": "turns.response_id = :name",
    "session": "turns.id = (SELECT id FROM turns WHERE kind = 'main' AND session_id = (SELECT id "
    "FROM sessions WHERE key = :name AND user = :user) ORDER BY idx DESC LIMIT 1)",
}
_FIND = """
SELECT turns.id, turns.session_id, turns.state, reason, detail, LENGTH(tokens) > 1 AS has_tokens,
  episode, verdicts.turn_id IS NOT NULL AS judged, samples.id IS NOT NULL AS sampled,
  EXISTS (SELECT 1 FROM step_samples JOIN steps ON steps.id = step_samples.step_id
    WHERE sample_id = samples.id AND status = 'intent') AS training
FROM turns JOIN sessions ON sessions.id = turns.session_id
  LEFT JOIN verdicts ON verdicts.turn_id = turns.id
  LEFT JOIN samples ON samples.turn_id = turns.id
WHERE {} AND user = :user AND private <> 1 AND turns.state <> 'forgotten'
"""


class FeedbackTable(LedgerTable):
    """Table of feedback from users and their programs."""

    def give(self, user: str, about: About, feedback: Feedback) -> Given | None:
        """Record feedback and apply it where possible; None: this user has no such turn.

        Raises:
            KeyReusedError: its key was used for different feedback before.
        """
        with self._db.transaction() as tx:
            turn = tx.execute(
                _FIND.format(_ABOUT[about.what]), {"name": about.name, "user": user}
            ).fetchone()
            if turn is None:
                return None
            values = asdict(feedback) | {
                "user": user,
                "turn_id": turn["id"],
                "session_id": turn["session_id"],
            }
            values["task_group"] = values.pop("group")
            same_key = (
                "SELECT * FROM feedback WHERE user = ? AND key = ?"  # a NULL key matches no row
            )
            if (earlier := tx.execute(same_key, (user, feedback.key)).fetchone()) is not None:
                # A session may have new turns since.
                now = {k: v for k, v in values.items() if (about.what, k) != ("session", "turn_id")}
                if any(earlier[name] != value for name, value in now.items()):
                    raise KeyReusedError(
                        "This key was used for different feedback before; send a new key with new "
                        "feedback."
                    )
                return Given(earlier["id"], earlier["turn_id"], True, earlier["unused"])
            unused = _OUTCOMES[turn["episode"]] if feedback.final else _unused(turn)
            values |= {"unused": unused, "created_at": time.time()}
            # A message (its key begins with a newline) that says the same after this one is no
            # retry, but was edited back.
            tx.execute(
                "UPDATE feedback SET key = NULL WHERE turn_id = ? AND key LIKE char(10) || '%'",
                (turn["id"],),
            )
            feedback_id = insert(tx, "feedback", values)
            if not feedback.final and (unused is None or turn["sampled"]):
                _judge(tx, turn["id"], feedback)
            if unused is None and feedback.final:
                # The last reply of an episode has no next state; the outcome is enough.
                last = (
                    "SELECT id FROM turns WHERE session_id = ? AND kind = 'main' "
                    "ORDER BY idx DESC LIMIT 1"
                )
                which = f"id = ({last}) AND state = 'waiting'"
                set_state(tx, TurnState.JUDGING, which, turn["session_id"])
            elif unused is None:
                reopen(tx, turn["id"])
        return Given(feedback_id, turn["id"], repeated=False, unused=unused)


def _unused(turn: sqlite3.Row) -> str | None:
    """Return why a turn can no longer be trained by feedback; None: it can."""
    if turn["episode"] == 2:  # its group is trained as it is, or not at all
        return TOO_LATE
    match turn["state"]:
        case TurnState.HELD | TurnState.QUEUED:
            return "the reply is being trained" if turn["training"] else None
        case TurnState.TRAINED:
            return "the reply was trained already"
        case TurnState.REFUSED:
            judged_again = turn["reason"] in (Reason.UNJUDGED, Reason.SESSION_DONE) or (
                turn["judged"] and turn["reason"] != Reason.FORGOTTEN_LESSON
            )
            if turn["has_tokens"] and judged_again and not turn["sampled"]:
                return None
            return str(TurnRefusal(turn["reason"], turn["detail"] or ""))
        case _:
            return None


def _judge(tx: sqlite3.Connection, turn_id: int, feedback: Feedback) -> None:
    """Make the feedback the verdict; the judge's stays in the column `judged`."""
    score = feedback.score
    tx.execute(
        "INSERT INTO verdicts (turn_id, value, source, score) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (turn_id) DO UPDATE SET value = excluded.value, source = excluded.source, "
        "score = excluded.score, weight = 1",
        (turn_id, (score > 0) - (score < 0), feedback.source, score),
    )
    tx.execute("DELETE FROM hints WHERE turn_id = ? AND source <> 'judge'", (turn_id,))
    if score < 0 and feedback.text:
        tx.execute(
            "INSERT INTO hints (turn_id, rank, text, source) VALUES (?1, "
            "(SELECT COALESCE(MIN(rank) - 1, 0) FROM hints WHERE turn_id = ?1), ?2, ?3)",
            (turn_id, feedback.text, feedback.source),
        )
