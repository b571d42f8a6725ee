"""Steps, the policy versions they make, and the lineage of versions.

The protocol of one step: intent row; advantages; train; publish; save state; one transaction that
commits the step, the samples it consumed and the new version. A step without that transaction does
not count: it is voided by `void` or `void_unfinished`, its samples are still queued, and its method
continues from its earlier state.

Rule: versions are never deleted, and ids only grow. Samples trained in versions that a rollback
left behind stay trained there; untrained samples of those versions expire, since the live weights
never sampled them.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any

from pydantic_core import to_json

from tinker_claw.errors import LedgerError, StepError
from tinker_claw.ledger.codec import pack_floats
from tinker_claw.ledger.database import LedgerTable, Rows, insert, set_meta
from tinker_claw.ledger.lessons import practise, tell_again
from tinker_claw.ledger.turns import reopen, set_state
from tinker_claw.turn_state import Reason, TurnRefusal, TurnState
from tinker_claw.types import PolicyVersion

_PINNED, ACCEPTED, ANSWERS = "pinned", "accepted", "canary_answers"
"""Keys in `meta`: the pinned version, the accepted one, and the kept answers to canaries."""
LEFT_OPEN = "it could not be closed when it ended"
"""Why a step of this process is void."""
_WITHDRAWN = "what it trained on was forgotten meanwhile"


class Void(IntEnum):
    """Reason why a step is void; its row has a sentence, too. Only a failure counts against the
    batch."""

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


@dataclass(frozen=True, slots=True)
class Line:
    """Lineage of the newest version."""

    parents: Mapping[int, int | None]
    """Parent of every version, by id."""
    live: frozenset[int]
    """The newest version and all its ancestors; a rollback leaves the others behind."""


_LINE = """
WITH RECURSIVE line (id, n) AS (
  SELECT id, 1 FROM versions WHERE id = COALESCE(?1, (SELECT MAX(id) FROM versions))
  UNION ALL SELECT parent, n + 1 FROM versions JOIN line USING (id) WHERE parent IS NOT NULL)
"""
"""SQL of a version, or the newest for NULL, as number 1 and its ancestors as 2, 3 ..."""
_GATES = f"""
{_LINE} SELECT line.id, COALESCE(metrics -> '$.gate', '{{}}') AS gate FROM line
  JOIN steps ON steps.version = line.id AND status = 'committed'
WHERE line.id > ?2 ORDER BY n LIMIT ?3
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
    if why := details.get("unasked"):
        objection = f"v{number} answers although the gate could not ask it: {why}"
    elif details.get("fell"):
        objection = f"v{number} has lost too much since the reference: learning is paused"
    else:
        objection = step["error"] if refused else None
    passed = f"v{number} passed the gate ({details.get('asked', 0)} canaries)"
    return {
        "step": step["id"],
        "version": number,
        "refused": refused,
        "well": objection is None,
        "told": objection or passed,
    }


def read_line(rows: Rows) -> Line:
    """Return the current lineage."""
    live = frozenset(rows.column(f"{_LINE} SELECT id FROM line", None))
    return Line(rows.pairs("SELECT id, parent FROM versions"), live)


def expire_left_behind(tx: sqlite3.Connection, line: Line) -> int:
    """Expire queued samples of versions that a rollback left behind; return how many."""
    sampled_by = tx.execute(
        "SELECT DISTINCT policy_version FROM turns WHERE state IN ('queued', 'held')"
    ).fetchall()
    return sum(
        set_state(
            tx,
            TurnState.REFUSED,
            "state IN ('queued', 'held') AND policy_version = ?",
            version,
            refusal=TurnRefusal(Reason.LEFT_BEHIND),
        )
        for (version,) in sampled_by
        if version not in line.live
    )


def read_versions(rows: Rows) -> list[dict[str, Any]]:
    """Return all versions of a run, oldest first, with their state.

    `samples`: those of the step that made it; `made_by_step` is None where a start or a rollback
    did. `live`: it is `newest` or an ancestor of it. `serving`: it answers, or will when the
    gateway runs.
    """
    version_rows = rows.rows(
        "SELECT versions.id, versions.parent, step, versions.created_at, steps.id AS made_by_step, "
        "(SELECT COUNT(*) FROM step_samples WHERE step_id = steps.id) AS samples, state_ref, "
        "sampler_ref FROM versions LEFT JOIN steps ON steps.version = versions.id "
        "ORDER BY versions.id"
    )
    live, pin = read_line(rows).live, pinned(rows)
    newest = max(live, default=None)
    serving = newest if pin is None else pin
    return [
        {
            **dict(row),
            "live": row["id"] in live,
            "newest": row["id"] == newest,
            "pinned": row["id"] == pin,
            "serving": row["id"] == serving,
        }
        for row in version_rows
    ]


def read_version(rows: Rows, version_id: int) -> PolicyVersion | None:
    """Return a version; None: there is none of that number."""
    return _version(rows, "WHERE id = ?", version_id)


def _version(rows: Rows, which: str, *values: Any) -> PolicyVersion | None:
    row = rows.row(
        f"SELECT id, parent, step, state_ref, sampler_ref FROM versions {which}", *values
    )
    return PolicyVersion(**row) if row else None


class PinTable(LedgerTable):
    """The pinned version, which answers whatever is learned meanwhile."""

    @property
    def version(self) -> int | None:
        """Pinned version; None: the newest answers."""
        return pinned(self._db)

    def to(self, version_id: int) -> None:
        """Pin a version."""
        with self._db.transaction() as tx:
            set_meta(tx, _PINNED, str(version_id))

    def end(self) -> None:
        with self._db.transaction() as tx:
            set_meta(tx, _PINNED, None)


def pinned(rows: Rows) -> int | None:
    """Return the pinned version; None: the newest answers."""
    return rows.one("SELECT CAST(value AS INTEGER) FROM meta WHERE key = ?", _PINNED)


class Reference(LedgerTable):
    """The version from which canaries may not fall far, and the answers to them that are kept."""

    @property
    def version(self) -> PolicyVersion | None:
        """The version that the owner accepted last; else the first, which is the base."""
        return read_version(self._db, _accepted(self._db))

    @property
    def answers(self) -> dict[str, dict[str, float]]:
        """Logprob of a right reply, by sampler and by the question's key."""
        return json.loads(self._db.meta(ANSWERS) or "{}")

    def keep(self, answers: Mapping[str, Mapping[str, float]]) -> None:
        """Keep these answers, and no others."""
        with self._db.transaction() as tx:
            set_meta(tx, ANSWERS, json.dumps(answers))

    def accept(self) -> int:
        """Make the newest version the reference, which ends a pause; return its number."""
        newest = self._db.one("SELECT COALESCE(MAX(id), 0) FROM versions")
        with self._db.transaction() as tx:
            set_meta(tx, ACCEPTED, str(newest))
        return newest

    def fallen(self) -> str | None:
        """Return why learning is paused until its owner acts; None: it is not."""
        return read_fallen(self._db)


def _accepted(rows: Rows) -> int:
    return int(rows.meta(ACCEPTED) or 0)


def read_fallen(rows: Rows) -> str | None:
    """Return which canaries have fallen too far since the reference, with the commands that end the
    pause; None: none have."""
    accepted = _accepted(rows)
    fell = [json.loads(row["gate"]).get("fell") for row in rows.rows(_GATES, None, accepted, 1)]
    if not any(fell):
        return None
    losses = [
        (row["id"], json.loads(row["gate"]).get("whole"))
        for row in rows.rows(_GATES, None, accepted, -1)
    ]
    whole, newest = losses[0][1], rows.one("SELECT MAX(id) FROM versions")
    back = (id for id, lost in losses if lost is not None and lost <= whole / 2)
    return (
        f"right replies to canaries are {whole:.2f} nats less likely than with v{accepted}, above "
        f"all to {', '.join(fell[0])}. `tinker-claw rollback v{next(back, accepted)}` goes on from "
        f"the last version that had lost at most half of that; `tinker-claw accept` keeps "
        f"v{newest}, with which later versions are then compared"
    )


class StepTable(LedgerTable):
    """Table of steps and the versions they made."""

    def newest_version(self) -> PolicyVersion | None:
        return _version(self._db, "ORDER BY id DESC LIMIT 1")

    def version(self, version_id: int) -> PolicyVersion | None:
        return read_version(self._db, version_id)

    def add_first_version(self, *, state_ref: str, sampler_ref: str) -> PolicyVersion:
        """Add version 0: the base with an adapter that changes nothing yet."""
        with self._db.transaction() as tx:
            return _insert_version(tx, PolicyVersion(0, None, 0, state_ref, sampler_ref))

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

    def keep(
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

    def method_state(self, version: int) -> Any:
        """Return the method's state after the newest step in the lineage of `version` that trained
        samples; None: there is none."""
        stored = self._db.one(
            f"{_LINE} SELECT method_state FROM line JOIN steps ON steps.version = line.id "
            "WHERE status = 'committed' AND lesson IS NULL ORDER BY n LIMIT 1",
            version,
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
        practised: bool = False,
    ) -> PolicyVersion:
        """Commit step, samples and version in one transaction; a lesson that it practised is
        provisional from then on.

        Args:
            metrics: a figure in it that is not finite is kept as null, since SQLite reads no other
                JSON.
            practised: whether it practised its lesson; False: it trained samples.

        Raises:
            VoidStepError: one of its samples was forgotten meanwhile, or its lesson was changed.
            LedgerError: the step is not open, or one of its samples is not queued any more.
        """
        metrics_json = to_json(metrics, inf_nan_mode="null").decode()
        with self._db.transaction() as tx:
            version = _insert_version(
                tx, PolicyVersion(0, parent.id, parent.step + 1, state_ref, sampler_ref)
            )
            closed = tx.execute(
                "UPDATE steps SET status = 'committed', version = ?, finished_at = ?, metrics = ? "
                "WHERE id = ? AND status = 'intent'",
                (version.id, time.time(), metrics_json, step_id),
            ).rowcount
            planned = tx.execute(
                "SELECT COUNT(*) FROM step_samples WHERE step_id = ?", (step_id,)
            ).fetchone()[0]
            queued = (
                "SELECT {} FROM step_samples JOIN samples ON samples.id = sample_id "
                "JOIN turns ON turns.id = turn_id "
                "WHERE step_samples.step_id = ? AND turns.state = 'queued'"
            )
            tx.execute(
                f"UPDATE samples SET step_id = ? WHERE id IN ({queued.format('sample_id')})",
                (step_id, step_id),
            )
            which = f"id IN ({queued.format('turn_id')})"
            trained = set_state(tx, TurnState.TRAINED, which, step_id)
            withdrawn = "SELECT 1 FROM steps WHERE id = ? AND void = ?"
            if tx.execute(withdrawn, (step_id, Void.WITHDRAWN)).fetchone():
                raise VoidStepError(Void.WITHDRAWN, _WITHDRAWN)
            if practised and not practise(tx, step_id):
                raise VoidStepError(Void.WITHDRAWN, "its lesson was changed meanwhile")
            if closed != 1 or trained != planned:
                raise LedgerError(
                    f"step {step_id} cannot be committed: {trained} of its {planned} samples are "
                    "queued" + ("" if closed else ", and it is not open")
                )
        return version

    def void(self, step_id: int, error: str, why: Void = Void.FAILED) -> None:
        """Void a step, unless it is committed; its samples stay queued."""
        with self._db.transaction() as tx:
            _void(tx, error, why, json.dumps([step_id]))
            _apply_late_feedback(tx)

    def void_unfinished(
        self, why: str = "the process ended before the step was committed"
    ) -> list[int]:
        """Void the steps that were left open; return their ids."""
        with self._db.transaction() as tx:
            void = self._db.column("SELECT id FROM steps WHERE status = 'intent'")
            _void(tx, why, Void.AWAY, json.dumps(void))
            _apply_late_feedback(tx)
        return void

    def roll_back(self, to: PolicyVersion) -> PolicyVersion:
        """Add a version with the weights of `to`, from which learning goes on; end a pin.

        The steps since then remain in a lineage that is left behind: their samples count as trained
        and are not queued again.
        """
        with self._db.transaction() as tx:
            set_meta(tx, _PINNED, None)
            return _go_on_from(tx, self._db, to)

    def unlearn(self, lesson: int, back_to: PolicyVersion | None) -> None:
        """Tell a practised lesson again; go on from the version before its practice, unless that
        is None. A pin stays."""
        with self._db.transaction() as tx:
            newest = self._db.one("SELECT MAX(id) FROM versions")
            tell_again(tx, newest, lesson)
            if back_to is not None:
                _go_on_from(tx, self._db, back_to)

    def republish(self, version: PolicyVersion, sampler_ref: str) -> PolicyVersion:
        """Record the weights of a version under another sampler, as the old one is gone; return the
        version."""
        self._db.write("UPDATE versions SET sampler_ref = ? WHERE id = ?", sampler_ref, version.id)
        return replace(version, sampler_ref=sampler_ref)

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
    _void(
        tx,
        _WITHDRAWN,
        Void.WITHDRAWN,
        json.dumps(turn_ids),
        "SELECT step_samples.step_id FROM step_samples JOIN samples ON samples.id = sample_id "
        "JOIN json_each(?4) AS these ON these.value = turn_id "
        "UNION SELECT step_id FROM step_prompts JOIN json_each(?4) AS these ON value = turn_id",
    )


def _void(
    tx: sqlite3.Connection,
    error: str,
    why: Void,
    these: str,
    steps: str = "SELECT value FROM json_each(?4)",
) -> None:
    """Void the open steps among those that `steps` selects by `these`, a JSON array."""
    tx.execute(
        "UPDATE steps SET status = 'void', error = ?1, void = ?2, finished_at = ?3 "
        f"WHERE status = 'intent' AND id IN ({steps})",
        (error, why, time.time(), these),
    )


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


def _go_on_from(tx: sqlite3.Connection, rows: Rows, to: PolicyVersion) -> PolicyVersion:
    """Add a version with the weights of `to`; lessons that these have not practised are told
    again."""
    version = _insert_version(tx, replace(to, parent=to.id))
    expire_left_behind(tx, read_line(rows))
    tell_again(tx, version.id)
    return version


def _insert_version(tx: sqlite3.Connection, version: PolicyVersion) -> PolicyVersion:
    """Insert a version under the next id, instead of its own; return it."""
    next_id = tx.execute("SELECT COALESCE(MAX(id) + 1, 0) FROM versions").fetchone()[0]
    version = replace(version, id=next_id)
    insert(tx, "versions", asdict(version) | {"created_at": time.time()})
    return version
