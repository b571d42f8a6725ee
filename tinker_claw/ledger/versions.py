"""Steps, the policy versions that they make, and the line that these stand in.

The protocol of one step: intent row; advantages; train; publish; save state; one transaction that
commits the step, the samples it consumed and the new version. A step without that transaction never
happened: `begin` or `void_unfinished` says so, whichever comes first, its samples are still queued,
and its method goes on from the state that it had before.

Rule: versions are never taken back, and ids only grow. What was trained in versions that a rollback
has left behind stays trained there; what they sampled and nobody has trained on yet expires, for
the weights that learn have never been theirs.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tinker_claw.errors import LedgerError, UndoError, WithdrawnError
from tinker_claw.ledger.codec import pack_floats
from tinker_claw.ledger.database import Database, Rows, insert, set_meta
from tinker_claw.ledger.turns import reopen
from tinker_claw.types import PolicyVersion

REFUSED, TOO_FAR = "the gate refused the version", "the step moved the policy too far"
"""How the reason of a step begins that is void for it."""
_PINNED, _HALF = "pinned", "half of the sessions from turn"
_HELD, _RULING, _ALARM = "held", "ruling", "alarm"
_GUARDED_FROM = "guarded from turn"
"""Keys in `meta`."""
LEFT_OPEN = "it could not be closed when it ended"
"""Why a step of this process is void."""
_VERSION = "SELECT id, parent, step, state_ref, sampler_ref FROM versions"
_WITHDRAWN = "what it trained on was forgotten meanwhile"


@dataclass(frozen=True, slots=True)
class Line:
    """Which versions the newest one goes on from."""

    parents: Mapping[int, int | None]
    """Of every version, by id."""
    live: frozenset[int]
    """The newest version, and all that it descends from; a rollback leaves the others behind."""
    lost: frozenset[int]
    """Made by steps that a crash has undone, whose samples are queued again."""

    def leads_on(self, version: int) -> bool:
        """Whether the newest version descends from this one, or did until a crash lost its step:
        then it counts as its parent."""
        at: int | None = version
        while at in self.lost:
            at = self.parents[at]
        return at in self.live


@dataclass(frozen=True, slots=True)
class Gated:
    """What the gate noted of a version; see `learner.gate`."""

    version: int
    said: Mapping[str, Any]
    """What it has lost, or why it was not asked."""
    after: Mapping[str, Any]
    """Its answers, by question."""
    before: Mapping[str, Any]
    """Those of the version before it, where no step had asked that one."""

    @property
    def warning(self) -> str | None:
        """What is to be known of a version that serves; None: nothing."""
        return _warning(self.version, self.said)


def _warning(version: int, said: Mapping[str, Any]) -> str | None:
    if why := said.get("unasked"):
        return f"v{version} answers although the gate could not ask it: {why}"
    lost = said.get("lost")
    return f"v{version} serves, though {'; '.join(lost)}" if lost else None


def gate_of(step: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the gate said of a step's version; None: nothing.

    `refused`: it never served. `losses`: against the version before, in the mean over the
    questions, by what `learner.gate.FIGURES` names. `told`: all of it in a sentence.

    Args:
        step: as `views.read` has it.
    """
    said: dict[str, Any] | None = step["metrics"].get("gate")
    refused = (step["error"] or "").startswith(REFUSED)
    if said is None and not refused:
        return None
    number, known = step["version"], said or {}
    told = step["error"] if refused else _warning(number, known)
    well = f"v{number} has lost nothing that matters, by {known.get('asked', 0)} questions"
    return {
        "step": step["id"],
        "version": number,
        "refused": refused,
        "well": told is None,
        "told": told or well,
        "losses": known.get("losses", {}),
    }


def read_line(rows: Rows) -> Line:
    """The line as it is now."""
    parents = rows.pairs("SELECT id, parent FROM versions")
    void = rows.column("SELECT version FROM steps WHERE status = 'void' AND version IS NOT NULL")
    live, at = set[int](), max(parents, default=None)
    while at is not None:
        live.add(at)
        at = parents[at]
    return Line(parents, frozenset(live), frozenset(void) - live)


def expire_left_behind(tx: sqlite3.Connection, line: Line) -> int:
    """Take samples out of the queue whose version was left behind by a rollback; how many."""
    sampled_by = tx.execute(
        "SELECT DISTINCT policy_version FROM samples JOIN turns ON turns.id = turn_id "
        "WHERE state IN ('queued', 'held')"
    ).fetchall()
    return sum(
        tx.execute(
            "UPDATE samples SET state = 'expired' WHERE state IN ('queued', 'held') AND EXISTS "
            "(SELECT 1 FROM turns WHERE turns.id = turn_id AND policy_version = ?)",
            (version,),
        ).rowcount
        for (version,) in sampled_by
        if not line.leads_on(version)
    )


def read_versions(rows: Rows) -> list[dict[str, Any]]:
    """All versions of a run, oldest first, and what each is to the run.

    `samples`: that the step trained on which made it; `made_by_step` is None where a start or a
    rollback did. `live`: `newest` descends from it, or is it. `serving`: it answers, if
    only one session in two, or will when the gateway runs.
    """
    found = rows.rows(
        "SELECT versions.id, versions.parent, step, versions.created_at, steps.id AS made_by_step, "
        "(SELECT COUNT(*) FROM step_samples WHERE step_id = steps.id) AS samples, state_ref, "
        "sampler_ref FROM versions LEFT JOIN steps ON steps.version = versions.id "
        "ORDER BY versions.id"
    )
    live, pin = read_line(rows).live, pinned(rows)
    newest = max(live, default=None)
    serving = {newest if pin is None else pin}
    if compared_from(rows) is not None:
        serving |= {newest}
    return [
        {
            **dict(row),
            "live": row["id"] in live,
            "newest": row["id"] == newest,
            "pinned": row["id"] == pin,
            "serving": row["id"] in serving,
        }
        for row in found
    ]


def read_version(rows: Rows, version_id: int) -> PolicyVersion | None:
    """None: there is no such version."""
    row = rows.row(f"{_VERSION} WHERE id = ?", version_id)
    return PolicyVersion(**row) if row else None


class Pin:
    """The version that answers whatever is learned meanwhile."""

    def __init__(self, database: Database) -> None:
        self._db = database

    @property
    def version(self) -> int | None:
        """None: the newest answers."""
        return pinned(self._db)

    @property
    def half(self) -> bool:
        """It answers one session in two only."""
        return compared_from(self._db) is not None

    def check_half(self, version_id: int) -> None:
        """
        Raises:
            UndoError: it is the newest version, which answers the other sessions.
        """
        if version_id == max(read_line(self._db).live, default=None):
            raise UndoError(
                f"v{version_id} is the newest version, so it would be compared with itself: name "
                "an earlier one"
            )

    def to(self, version_id: int, *, half: bool = False) -> None:
        """
        Raises:
            UndoError: half, and it is the newest version.
        """
        if half:
            self.check_half(version_id)
        with self._db.transaction() as tx:
            set_meta(tx, _PINNED, str(version_id))
            set_meta(tx, _HALF, _newest_turn(tx) if half else None)

    def end(self) -> None:
        with self._db.transaction() as tx:
            _end_pin(tx)


class Hold:
    """Learning waits until the user says from which version it is to go on, by a rollback."""

    def __init__(self, database: Database) -> None:
        self._db = database

    @property
    def reason(self) -> str | None:
        """None: learning goes on."""
        return held(self._db)

    @property
    def ruling(self) -> str | None:
        """What is still to be done because of it; None: nothing, or all is done."""
        return self._db.meta(_RULING)

    def because(self, reason: str, ruling: str | None = None, alarm: str | None = None) -> None:
        """
        Args:
            ruling: what is still to be done.
            alarm: the name of what raised it; None: as before.
        """
        with self._db.transaction() as tx:
            _hold(tx, reason, ruling)
            if alarm is not None:
                set_meta(tx, _ALARM, alarm)

    def is_carried_out(self) -> None:
        """What it ruled is done, or cannot be."""
        self._db.write("DELETE FROM meta WHERE key = ?", _RULING)

    @property
    def guarded_from(self) -> int:
        """The newest turn when a rollback last said from where to go on: what was before it is no
        measure of what came later. 0: there was no rollback."""
        return int(self._db.meta(_GUARDED_FROM) or 0)


def held(rows: Rows) -> str | None:
    """Why learning is held; None: it is not."""
    return rows.meta(_HELD)


def _hold(tx: sqlite3.Connection, reason: str | None, ruling: str | None = None) -> None:
    set_meta(tx, _HELD, reason)
    set_meta(tx, _RULING, ruling)


def pinned(rows: Rows) -> int | None:
    """The version that was pinned; None: the newest answers."""
    return _number(rows.meta(_PINNED))


def compared_from(rows: Rows) -> int | None:
    """The newest turn when the pinned version began to answer one session in two; None: it answers
    all, or none is pinned."""
    return _number(rows.meta(_HALF))


def _number(value: str | None) -> int | None:
    return None if value is None else int(value)


def _newest_turn(tx: sqlite3.Connection) -> str:
    return str(tx.execute("SELECT COALESCE(MAX(id), 0) FROM turns").fetchone()[0])


def _end_pin(tx: sqlite3.Connection) -> None:
    tx.execute("DELETE FROM meta WHERE key IN (?, ?)", (_PINNED, _HALF))


class StepTable:
    """Steps, and the versions that they made."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def newest_version(self) -> PolicyVersion | None:
        return self._one("ORDER BY id DESC LIMIT 1")

    def newest_saved_version(self) -> PolicyVersion | None:
        """The newest version whose trainer state was saved: where a restart begins."""
        return self._one("WHERE state_ref IS NOT NULL ORDER BY id DESC LIMIT 1")

    def version(self, version_id: int) -> PolicyVersion | None:
        return read_version(self._db, version_id)

    def _one(self, which: str) -> PolicyVersion | None:
        row = self._db.row(f"{_VERSION} {which}")
        return PolicyVersion(**row) if row else None

    def add_first_version(self, *, state_ref: str, sampler_ref: str) -> PolicyVersion:
        """Version 0: the base with an adapter that changes nothing yet."""
        with self._db.transaction() as tx:
            return _insert_version(tx, parent=None, step=0, state_ref=state_ref, ref=sampler_ref)

    def begin(self, parent: int, sample_ids: Sequence[int]) -> int:
        """Write the intent to train these samples; returns the step's id.

        One step at a time: `void_unfinished` first closes what was left open.
        """
        with self._db.transaction() as tx:
            begun = {"status": "intent", "parent": parent, "created_at": time.time()}
            step_id = insert(tx, "steps", begun)
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
        """Write what a step trains: of each sample its id, its advantage and those of its tokens.

        Args:
            state: JSON of the method's after the step, which counts once that is committed.
        """
        rows = [(one, pack_floats(each), sample) for sample, one, each in advantages]
        with self._db.transaction() as tx:
            tx.executemany(
                "UPDATE samples SET advantage = ?, advantages = ? "
                "WHERE id = ? AND state = 'queued'",  # else it was forgotten meanwhile
                rows,
            )
            tx.execute("UPDATE steps SET method_state = ? WHERE id = ?", (state, step_id))

    def method_state(self, version: int) -> Any:
        """What the newest step in the line of `version` has left for its method; None: nothing."""
        found = self._db.one(
            "WITH RECURSIVE line (id) AS (VALUES (?) UNION ALL SELECT parent FROM versions "
            "JOIN line USING (id) WHERE parent IS NOT NULL) SELECT method_state FROM line "
            "JOIN steps ON steps.version = line.id WHERE status = 'committed' "
            "ORDER BY line.id DESC LIMIT 1",
            version,
        )
        return None if found is None else json.loads(found)

    def commit(
        self,
        step_id: int,
        parent: PolicyVersion,
        *,
        state_ref: str | None,
        sampler_ref: str,
        metrics: Mapping[str, Any],
    ) -> PolicyVersion:
        """Commit step, samples and version in one transaction.

        Raises:
            WithdrawnError: one of its samples was forgotten meanwhile.
            LedgerError: the step is not open, or one of its samples is not queued any more.
        """
        with self._db.transaction() as tx:
            version = _insert_version(
                tx, parent=parent.id, step=parent.step + 1, state_ref=state_ref, ref=sampler_ref
            )
            closed = tx.execute(
                "UPDATE steps SET status = 'committed', version = ?, finished_at = ?, metrics = ? "
                "WHERE id = ? AND status = 'intent'",
                (version.id, time.time(), json.dumps(metrics), step_id),
            ).rowcount
            planned = tx.execute(
                "SELECT COUNT(*) FROM step_samples WHERE step_id = ?", (step_id,)
            ).fetchone()[0]
            trained = tx.execute(
                "UPDATE samples SET state = 'trained', step_id = ? WHERE state = 'queued' "
                "AND id IN (SELECT sample_id FROM step_samples WHERE step_id = ?)",
                (step_id, step_id),
            ).rowcount
            why = tx.execute("SELECT error FROM steps WHERE id = ?", (step_id,)).fetchone()
            if why is not None and why["error"] == _WITHDRAWN:
                raise WithdrawnError(_WITHDRAWN)
            if closed != 1 or trained != planned:
                raise LedgerError(
                    f"step {step_id} cannot be committed: {trained} of its {planned} samples are "
                    "queued" + ("" if closed else ", and it is not open")
                )
        return version

    def void(self, step_id: int, error: str, *, outage: bool = False) -> None:
        """This step never happened, unless it is committed; its samples stay queued.

        `outage`: the service was away, which says nothing about the samples.
        """
        with self._db.transaction() as tx:
            _void(tx, error, json.dumps([step_id]), outage=outage)
            _hear(tx)

    def void_unfinished(
        self, why: str = "the process ended before the step was committed"
    ) -> list[int]:
        """Void the steps that were left open; returns their ids.

        How they ended says nothing about the samples in hand.
        """
        with self._db.transaction() as tx:
            void = self._db.column("SELECT id FROM steps WHERE status = 'intent'")
            _void(tx, why, json.dumps(void))
            _hear(tx)
        return void

    def unsaved(self, saved: PolicyVersion) -> list[int]:
        """The committed steps after `saved`: their weights are gone."""
        return self._db.column(
            "SELECT id FROM steps WHERE status = 'committed' AND version > ?", saved.id
        )

    def restart_from(
        self, saved: PolicyVersion, *, sampler_ref: str | None = None
    ) -> PolicyVersion:
        """A new version with the state of `saved`; in the same transaction, later steps are void.

        Their versions keep their ids. Their samples are queued again: they had trained well, so
        the void steps do not count among their failures.
        `sampler_ref`: the same weights, published anew because the old sampler is gone.
        """
        with self._db.transaction() as tx:
            lost = "SELECT id FROM steps WHERE status = 'committed' AND version > ?"
            tx.execute(
                f"UPDATE samples SET state = 'queued', step_id = NULL WHERE step_id IN ({lost})",
                (saved.id,),
            )
            tx.execute(
                "UPDATE steps SET status = 'void', error = 'its state was not saved', outage = 1 "
                f"WHERE id IN ({lost})",
                (saved.id,),
            )
            _hear(tx)
            return _insert_version(
                tx,
                parent=saved.id,
                step=saved.step,
                state_ref=saved.state_ref,
                ref=sampler_ref or saved.sampler_ref,
            )

    def roll_back(self, to: PolicyVersion, because: str | None = None) -> PolicyVersion:
        """A new version with the weights of `to`, from which learning goes on; pin and hold end.

        The steps since then stay what they were, in a line that is left: what they trained on is
        trained, and is not queued again. `because`: why learning is held nevertheless.
        """
        with self._db.transaction() as tx:
            _end_pin(tx)
            _hold(tx, because)
            set_meta(tx, _GUARDED_FROM, _newest_turn(tx))
            version = _insert_version(
                tx, parent=to.id, step=to.step, state_ref=to.state_ref, ref=to.sampler_ref
            )
            expire_left_behind(tx, read_line(self._db))
        return version

    def save(self, version: PolicyVersion, state_ref: str) -> PolicyVersion:
        """The state of a version has been saved after all."""
        self._db.write("UPDATE versions SET state_ref = ? WHERE id = ?", state_ref, version.id)
        return replace(version, state_ref=state_ref)

    def replies(self, after: int, most: int) -> list[tuple[int, dict[str, Any]]]:
        """What committed steps found of the replies before them, with the version that they began
        with: the first and the newest `most`, oldest first; only figures that rest on turns behind
        `after`."""
        such = (
            "SELECT id, parent, json_extract(metrics, '$.replies') AS found FROM steps "
            "WHERE status = 'committed' AND json_extract(metrics, '$.replies.since') > ?1 "
        )
        rows = self._db.rows(
            f"SELECT * FROM ({such} ORDER BY id LIMIT 1) "
            f"UNION SELECT * FROM ({such} ORDER BY id DESC LIMIT ?2) ORDER BY id",
            after,
            most,
        )
        return [(row["parent"], json.loads(row["found"])) for row in rows]

    def gated(self, version: int, most: int) -> list[Gated]:
        """What the gate asked of this version and of those that it goes on from, the newest first,
        as far as their steps asked anything."""
        rows = self._db.rows(
            "WITH RECURSIVE line (id, n) AS (VALUES (?1, 1) UNION ALL "
            "SELECT parent, n + 1 FROM versions JOIN line USING (id) WHERE parent IS NOT NULL "
            "AND n < ?2) SELECT version, json_extract(metrics, '$.gate') AS said, "
            "json_extract(metrics, '$.answers') AS answers FROM line "
            "JOIN steps ON steps.version = line.id WHERE status = 'committed' "
            "AND json_extract(metrics, '$.gate') IS NOT NULL ORDER BY n",
            version,
            most,
        )
        found = list[Gated]()
        for row in rows:
            answers = json.loads(row["answers"] or "{}")
            both = (answers.get("after", {}), answers.get("before", {}))
            found.append(Gated(row["version"], json.loads(row["said"]), *both))
        return found

    def void_lately(self, because: str) -> list[str]:
        """Why steps from the newest version on are void, of those reasons that begin so."""
        return self._db.column(
            "SELECT error FROM steps WHERE status = 'void' AND substr(error, 1, ?) = ? "
            "AND parent = (SELECT MAX(id) FROM versions) ORDER BY id",
            len(because),
            because,
        )

    def failures(self, sample_ids: Sequence[int]) -> int:
        """How many steps with exactly these samples failed, outages left out."""
        return self._db.one(
            "SELECT COUNT(*) FROM (SELECT step_id FROM step_samples JOIN steps "
            "ON steps.id = step_id WHERE status = 'void' AND outage = 0 GROUP BY step_id "
            "HAVING COUNT(*) = ?2 AND "
            "SUM(sample_id IN (SELECT value FROM json_each(?1))) = ?2)",
            json.dumps(sample_ids),
            len(sample_ids),
        )


def withdraw_from_step(tx: sqlite3.Connection, turn_ids: Sequence[int]) -> None:
    """The step in hand comes to nothing if it trains one of these turns."""
    _void(
        tx,
        _WITHDRAWN,
        json.dumps(turn_ids),
        "SELECT step_samples.step_id FROM step_samples JOIN samples ON samples.id = sample_id "
        "JOIN json_each(?4) AS these ON these.value = turn_id",
    )


def _void(
    tx: sqlite3.Connection,
    error: str,
    these: str,
    steps: str = "SELECT value FROM json_each(?4)",
    *,
    outage: bool = True,
) -> None:
    """Void the steps that are open of those that `steps` selects by `these`, a JSON array."""
    tx.execute(
        "UPDATE steps SET status = 'void', error = ?1, outage = ?2, finished_at = ?3 "
        f"WHERE status = 'intent' AND id IN ({steps})",
        (error, outage, time.time(), these),
    )


def _hear(tx: sqlite3.Connection) -> None:
    """What was said of replies while a step trained them counts where that came to nothing."""
    found = tx.execute(
        "SELECT DISTINCT feedback.turn_id FROM feedback "
        "JOIN samples ON samples.turn_id = feedback.turn_id AND state = 'queued' "
        "JOIN sessions ON sessions.id = feedback.session_id AND episode = 0 "  # groups stay whole
        "WHERE final = 0 AND unused IS NOT NULL"
    ).fetchall()
    for (turn_id,) in found:
        tx.execute("UPDATE feedback SET unused = NULL WHERE turn_id = ? AND final = 0", (turn_id,))
        reopen(tx, turn_id)


def _insert_version(
    tx: sqlite3.Connection, *, parent: int | None, step: int, state_ref: str | None, ref: str
) -> PolicyVersion:
    next_id = tx.execute("SELECT COALESCE(MAX(id) + 1, 0) FROM versions").fetchone()[0]
    version = PolicyVersion(next_id, parent, step, state_ref, ref)
    insert(tx, "versions", asdict(version) | {"created_at": time.time()})
    return version
