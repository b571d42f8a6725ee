"""The version from which canaries may not fall far, and the gate's results for later ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tinker_claw.ledger.database import LedgerTable, Rows, set_meta
from tinker_claw.ledger.versions import LINE, read_version
from tinker_claw.types import PolicyVersion

ACCEPTED, ANSWERS = "accepted", "canary_answers"
"""Keys in `meta`: the version that the owner accepted last, and the stored answers to canaries."""
_GATES = f"""
{LINE} SELECT line.id, COALESCE(metrics -> '$.gate', '{{}}') AS gate FROM line
  JOIN steps ON steps.version = line.id AND status = 'committed'
WHERE line.id > ? ORDER BY n LIMIT ?
"""


def gate_of(step: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the gate's result for a step's version; None: there is none.

    `refused`: it never served. `told`: the result as a sentence.

    Args:
        step: record of the step from `views.read`.
    """
    gate_record: dict[str, Any] | None = step["metrics"].get("gate")
    refused = step["refused"]
    if gate_record is None and not refused:
        return None
    number, details = step["version"], gate_record or {}
    objection: str | None = step["error"] if refused else None
    if why := details.get("unasked"):
        objection = f"v{number} answers although the gate could not ask it: {why}"
    elif details.get("fell"):
        objection = f"v{number} has lost too much since the reference: learning is paused"
    passed = f"v{number} passed the gate ({details.get('asked', 0)} canaries)"
    return {
        "step": step["id"],
        "version": number,
        "refused": refused,
        "well": objection is None,
        "told": objection or passed,
    }


class Reference(LedgerTable):
    """The reference version, and the stored answers to canaries."""

    @property
    def version(self) -> PolicyVersion | None:
        """The version that the owner accepted last; else the first, which is the base."""
        return read_version(self._db, _accepted(self._db))

    @property
    def answers(self) -> dict[str, dict[str, float]]:
        """Logprob of a right reply, by sampler and by the question's key."""
        return json.loads(self._db.meta(ANSWERS) or "{}")

    def store_answers(self, answers: Mapping[str, Mapping[str, float]]) -> None:
        """Store these answers in place of all others."""
        with self._db.transaction() as tx:
            set_meta(tx, ANSWERS, json.dumps(answers))

    def accept(self) -> int:
        """Make the newest version the reference, which ends a pause; return its number."""
        newest = self._db.one("SELECT COALESCE(MAX(id), 0) FROM versions")
        with self._db.transaction() as tx:
            set_meta(tx, ACCEPTED, newest)
        return newest


def _accepted(rows: Rows) -> int:
    return int(rows.meta(ACCEPTED) or 0)


def read_fallen(rows: Rows) -> str | None:
    """Return which canaries have fallen too far since the reference, with the commands that end the
    pause; None: none have."""
    accepted = _accepted(rows)
    fell = [json.loads(row["gate"]).get("fell") for row in rows.rows(_GATES, accepted, 1)]
    if not any(fell):
        return None
    losses = [
        (row["id"], json.loads(row["gate"]).get("whole")) for row in rows.rows(_GATES, accepted, -1)
    ]
    whole, newest = losses[0][1], rows.one("SELECT MAX(id) FROM versions")
    back = (id for id, lost in losses if lost is not None and lost <= whole / 2)
    return (
        f"right replies to canaries are {whole:.2f} nats less likely than with v{accepted}, above "
        f"all to {', '.join(fell[0])}. `tinker-claw rollback v{next(back, accepted)}` goes on from "
        f"the last version that had lost at most half of that; `tinker-claw accept` keeps "
        f"v{newest}, with which later versions are then compared"
    )
