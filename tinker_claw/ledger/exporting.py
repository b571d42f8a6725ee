"""Turns as records to take along: one that says everything for each, one after the other.

Rule: only a few are in memory at a time, and each is as it is at one moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tinker_claw.ledger.forget import FORGOTTEN
from tinker_claw.ledger.prompts import load
from tinker_claw.ledger.reading import Outside
from tinker_claw.ledger.turns import completion_of

_PAGE = 50
_TURNS = """
SELECT turns.*, user, sessions.key, next_states.role, next_states.text, verdicts.value AS verdict,
  verdicts.turn_id IS NOT NULL AS judged, samples.state AS sample,
  CASE WHEN samples.state = 'trained' THEN samples.step_id END AS trained_in_step
FROM turns JOIN sessions ON sessions.id = session_id
  LEFT JOIN next_states ON next_states.turn_id = turns.id
  LEFT JOIN verdicts ON verdicts.turn_id = turns.id
  LEFT JOIN samples ON samples.turn_id = turns.id
WHERE turns.id > ? AND kind_reason <> ? ORDER BY turns.id LIMIT ?
"""


def turns_in_full(ledger: Outside, *, tokens: bool) -> Iterator[dict[str, Any]]:
    """All turns, oldest first. `tokens`: with ids and logprobs."""
    after = 0
    while True:
        with ledger.moment():
            rows = ledger.rows(_TURNS, after, FORGOTTEN, _PAGE)
            page = [_record(ledger, row, tokens=tokens) for row in rows]
        if not page:
            return
        yield from page
        after = page[-1]["id"]


def _record(ledger: Outside, row: Any, *, tokens: bool) -> dict[str, Any]:
    hints = ledger.rows("SELECT text FROM hints WHERE turn_id = ? ORDER BY rank", row["id"])
    record: dict[str, Any] = {
        "id": row["id"],
        "session": row["session_id"],
        "session_key": row["key"],
        "user": row["user"],
        "index": row["idx"],
        **{name: row[name] for name in ("kind", "call", "policy_version", "created_at")},
        "request": row["request_text"],
        "reply": row["reply_text"],
        "next_state": None if row["role"] is None else {"role": row["role"], "text": row["text"]},
        **{"judged": bool(row["judged"]), "verdict": row["verdict"]},
        "hints": [hint["text"] for hint in hints],
        **{name: row[name] for name in ("sample", "trained_in_step", "untrained_because")},
    }
    if tokens:
        done = completion_of(row)
        record |= {"prompt": load(ledger, row), "tokens": done.tokens, "logprobs": done.logprobs}
    return record
