"""Steps: from the row with the intent to the transaction that commits step, samples and version.

The protocol of one step: intent row; advantages; train; publish; save state; one transaction that
commits the step, the samples it consumed and the new version. A step without that transaction does
not count: it is voided by `void` or `void_unfinished`, its samples are still queued, and its method
continues from its earlier state.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from pydantic_core import to_json

from tinker_claw.errors import LedgerError, StepError
from tinker_claw.ledger.codec import pack_floats
from tinker_claw.ledger.database import LedgerTable, insert
from tinker_claw.ledger.lessons import practise
from tinker_claw.ledger.turns import reopen, set_state
from tinker_claw.ledger.versions import LINE, insert_version
from tinker_claw.turn_state import TurnState
from tinker_claw.types import PolicyVersion

LEFT_OPEN = "it could not be closed when it ended"
"""Why a step of this process is void."""
_WITHDRAWN = "what it trained on was forgotten meanwhile"


class Void(IntEnum):
    """Reason why a step is void; its row has a sentence, too. Only failures over several batches in
    a row end learning."""

    FAILED = 1
    AWAY = 2
    """The service was away, the gateway was stopped, or what it gave was lost."""
    REFUSED = 3
    """The gate refused its version."""
    WITHDRAWN = 4
    """A turn that it trained on was forgotten, its lesson was changed, or an undo came first."""
    UNLEARNED = 5
    """It practised a lesson, and its version did not pass the check."""
    EMPTY = 6
    """No sample of its batch carried a gradient."""
    DISAGREES = 7
    """The sampler's logprobs are not the trainer's."""
    ENDED = 8
    """Learning ended with it, as where a service trains this model no more."""


class VoidStepError(StepError):
    """Raised when a step comes to nothing for a reason that is no failure."""

    def __init__(self, why: Void, because: str) -> None:
        super().__init__(because)
        self.why = why


class StepTable(LedgerTable):
    """Table of steps."""

    def begin(
        self,
        parent: int,
        sample_ids: Sequence[int],
        lesson: int | None = None,
        prompts: Iterable[tuple[str, int]] = (),
    ) -> int:
        """Write the intent to train these samples, or to practise a lesson; return the step's id.

        One step at a time: `void_unfinished` first closes open ones.

        Args:
            prompts: turns on which the practice rests, each with its purpose (schema.sql).
        """
        with self._db.transaction() as tx:
            begun = {"status": "intent", "parent": parent, "created_at": time.time()}
            step_id = insert(tx, "steps", begun | {"lesson": lesson})
            tx.executemany(
                "INSERT INTO step_prompts (step_id, purpose, turn_id) VALUES (?, ?, ?)",
                [(step_id, *prompt) for prompt in prompts],
            )
            tx.executemany(
                "INSERT INTO step_samples (step_id, sample_id) VALUES (?, ?)",
                [(step_id, sample_id) for sample_id in sample_ids],
            )
        return step_id

    def store_advantages(
        self,
        step_id: int,
        advantages: Iterable[tuple[int, float, Sequence[float]]],
        state: str | None,
    ) -> None:
        """Write the advantages of a step: each sample's id, own advantage, and (T,) token
        advantages.

        Args:
            state: JSON of the method's state after the step, valid once that is committed.
        """
        rows = [(own, pack_floats(of_tokens), id) for id, own, of_tokens in advantages]
        with self._db.transaction() as tx:
            tx.executemany(
                "UPDATE samples SET advantage = ?, advantages = ? "
                "WHERE id = ? AND EXISTS (SELECT 1 FROM turns WHERE turns.id = turn_id "
                "AND state = 'queued')",  # else it was forgotten meanwhile
                rows,
            )
            tx.execute("UPDATE steps SET method_state = ? WHERE id = ?", (state, step_id))

    def method_state(self) -> Any:
        """Return the method's state after the newest step in the current lineage that trained
        samples; None: there is none."""
        stored = self._db.one(
            f"{LINE} SELECT method_state FROM line JOIN steps ON steps.version = line.id "
            "WHERE status = 'committed' AND lesson IS NULL ORDER BY n LIMIT 1"
        )
        return None if stored is None else json.loads(stored)

    def commit(
        self,
        step_id: int,
        parent: PolicyVersion,
        *,
        state_ref: str,
        sampler_ref: str,
        metrics: Mapping[str, Any],
    ) -> PolicyVersion:
        """Commit step, samples and version in one transaction; a lesson that it practised is
        provisional from then on.

        Args:
            metrics: a figure in it that is not finite is kept as null, since SQLite reads no other
                JSON.

        Raises:
            VoidStepError: one of its samples was forgotten meanwhile, or its lesson was changed.
            LedgerError: the step is not open, or one of its samples is not queued any more.
        """
        metrics_json = to_json(metrics, inf_nan_mode="null").decode()
        samples = "SELECT sample_id FROM step_samples WHERE step_id = ?"
        with self._db.transaction() as tx:
            version = insert_version(
                tx, PolicyVersion(0, parent.id, parent.step + 1, state_ref, sampler_ref)
            )
            step = tx.execute(
                "UPDATE steps SET status = 'committed', version = ?, finished_at = ?, metrics = ? "
                "WHERE id = ? AND status = 'intent' RETURNING lesson",
                (version.id, time.time(), metrics_json, step_id),
            ).fetchone()
            if step is None:
                withdrawn = "SELECT 1 FROM steps WHERE id = ? AND void = ?"
                if tx.execute(withdrawn, (step_id, Void.WITHDRAWN)).fetchone():
                    raise VoidStepError(Void.WITHDRAWN, _WITHDRAWN)
                raise LedgerError(f"step {step_id} cannot be committed: it is not open")
            if step["lesson"] is not None and not practise(tx, step_id):
                raise VoidStepError(Void.WITHDRAWN, "its lesson was changed meanwhile")
            planned = tx.execute(
                f"UPDATE samples SET step_id = ? WHERE id IN ({samples})", (step_id, step_id)
            ).rowcount
            of_samples = f"id IN (SELECT turn_id FROM samples WHERE id IN ({samples}))"
            trained = set_state(
                tx, TurnState.TRAINED, f"state = 'queued' AND {of_samples}", step_id
            )
            if trained != planned:
                raise LedgerError(
                    f"step {step_id} cannot be committed: {trained} of its {planned} samples are "
                    "queued"
                )
        return version

    def void(self, step_id: int, error: str, why: Void = Void.FAILED) -> None:
        """Void a step, unless it is committed; its samples stay queued."""
        with self._db.transaction() as tx:
            _void(tx, error, why, "id = ?", step_id)
            _apply_late_feedback(tx)

    def void_unfinished(
        self, why: str = "the process ended before the step was committed"
    ) -> list[int]:
        """Void the steps that were left open; return their ids."""
        with self._db.transaction() as tx:
            void = _void(tx, why, Void.AWAY, "1")
            _apply_late_feedback(tx)
        return void

    def refused_lately(self) -> list[tuple[str, float]]:
        """Return the steps from the newest version that the gate refused, oldest first: the reason,
        and when they began, in seconds since 1970."""
        refusals = self._db.rows(
            "SELECT error, created_at FROM steps WHERE void = ? "
            "AND parent = (SELECT MAX(id) FROM versions) ORDER BY id",
            Void.REFUSED,
        )
        return [(error, at) for error, at in refusals]


def withdraw_from_step(tx: sqlite3.Connection, turn_ids: Sequence[int]) -> None:
    """Void the step in progress if it trains one of these turns."""
    these = "turn_id IN (SELECT value FROM json_each(?))"
    _void(
        tx,
        _WITHDRAWN,
        Void.WITHDRAWN,
        "id IN (SELECT step_samples.step_id FROM step_samples JOIN samples "
        f"ON samples.id = sample_id WHERE {these} "
        f"UNION SELECT step_id FROM step_prompts WHERE {these})",
        *[json.dumps(turn_ids)] * 2,
    )


def _void(
    tx: sqlite3.Connection, error: str, why: Void, which: str, *values: int | str
) -> list[int]:
    """Void the open steps that a condition selects; return their ids."""
    void = tx.execute(
        "UPDATE steps SET status = 'void', error = ?, void = ?, finished_at = ? "
        f"WHERE status = 'intent' AND {which} RETURNING id",
        (error, why, time.time(), *values),
    )
    return [step_id for (step_id,) in void.fetchall()]


def _apply_late_feedback(tx: sqlite3.Connection) -> None:
    """Apply feedback that came while a step trained its reply, now that the step is void."""
    turn_rows = tx.execute(
        "SELECT DISTINCT feedback.turn_id FROM feedback "
        "JOIN turns ON turns.id = feedback.turn_id AND state = 'queued' "
        "JOIN sessions ON sessions.id = feedback.session_id AND episode = 0 "  # groups stay whole
        "WHERE final = 0 AND unused IS NOT NULL"
    ).fetchall()
    for (turn_id,) in turn_rows:
        tx.execute("UPDATE feedback SET unused = NULL WHERE turn_id = ? AND final = 0", (turn_id,))
        reopen(tx, turn_id)
