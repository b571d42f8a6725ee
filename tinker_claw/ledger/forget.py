"""Forgetting: turns leave the file, free pages and write-ahead log included.

Rule: one transaction says what goes, after which nobody judges it, trains on it or adds to it; the
rest is done a few milliseconds at a time, and taken up again at the next start where it was cut
short. What a step has trained on leaves a row that says so, with numbers and without ids, text or
anything that they could be read from. Sums of what was spent stay. Later turns of a session repeat
the earlier ones in their prompts, so a turn is forgotten with all that come after it.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_claw.errors import UndoError
from tinker_claw.ledger.codec import pack_ids
from tinker_claw.ledger.database import Writer
from tinker_claw.ledger.lineage import read_versions
from tinker_claw.ledger.reading import Rows
from tinker_claw.ledger.remains import overwritten
from tinker_claw.ledger.retention import SLICE_S, give_back, sweep

FORGOTTEN = "forgotten"
"""Stands as the reason of the kind in what is left of a turn, and before a session's new key."""
_CHUNK = 500
_BEGUN = "forgetting"
"""In the ledger, what is not finished yet."""


@dataclass(frozen=True, slots=True)
class UsedIn:
    """A step that trained on what is to be forgotten."""

    step: int
    version: int
    """The version that it made."""
    before: int
    """The version that it began with."""
    samples: int
    """Of those to be forgotten."""
    live: bool
    """The newest version descends from it."""


@dataclass(frozen=True, slots=True)
class Forgetting:
    """What there is to forget, or was."""

    session: int
    whole: bool
    """The whole session."""
    turns: tuple[int, ...]
    unsaid: tuple[int, ...]
    """Turns that stay, but whose next state is in what is forgotten, or a reply that their teacher
    was shown: the next state, its votes and its hints go too."""
    withdrawn: int
    """Samples that were queued."""
    steps: tuple[UsedIn, ...]

    @property
    def roll_back_to(self) -> int | None:
        """The version before all that was learned from it; None: nothing that is live was."""
        return min((used.before for used in self.steps if used.live), default=None)


def in_session(which: str, user: str | None) -> Callable[[Rows], Forgetting]:
    """A whole session, by its number or by the client's name for it."""

    def find(rows: Rows) -> Forgetting:
        found = rows.rows(
            "SELECT id, user FROM sessions WHERE (key = ?1 OR CAST(id AS TEXT) = ?1) "
            "AND (?2 IS NULL OR user = ?2)",
            which,
            user,
        )
        if not found:
            whose = "" if user is None else f" of user {user}"
            raise UndoError(
                f"{rows.path} has no session {which!r}{whose}; "
                "`python run.py log turns` lists them by their numbers"
            )
        if len(found) > 1:
            several = ", ".join(f"{row['id']} (of {row['user']})" for row in found)
            raise UndoError(f"{which!r} may be session {several}; give the number, or --user")
        return _forgetting(rows, found[0]["id"], first=0)

    return find


def from_turn(turn_id: int) -> Callable[[Rows], Forgetting]:
    """A turn, and the later ones of its session."""

    def find(rows: Rows) -> Forgetting:
        row = rows.row("SELECT session_id, kind_reason FROM turns WHERE id = ?", turn_id)
        if row is None:
            raise UndoError(f"{rows.path} has no turn {turn_id}; `python run.py log turns` lists")
        return _forgetting(rows, row["session_id"], first=turn_id)

    return find


def _forgetting(rows: Rows, session: int, *, first: int) -> Forgetting:
    turns = [
        row["id"]
        for row in rows.rows(
            "SELECT id FROM turns WHERE session_id = ? AND id >= ? AND kind_reason <> ? "
            "ORDER BY id",
            *(session, first, FORGOTTEN),
        )
    ]
    unsaid = rows.rows(
        # The turn that the first of them followed. Those that were hung up on have none.
        "SELECT turns.id, next_states.turn_id AS said FROM turns LEFT JOIN next_states "
        "ON next_states.turn_id = turns.id WHERE session_id = ? AND turns.id < ? AND kind = 'main' "
        "AND (next_states.turn_id IS NOT NULL OR settled = 0) ORDER BY turns.id DESC LIMIT 1",
        *(session, first),
    )
    shown = rows.rows(
        # Whose teacher may have been shown one of them, not a hint: it was asked after that one, or
        # is being asked.
        "SELECT turns.id FROM turns JOIN verdicts ON verdicts.turn_id = turns.id "
        "LEFT JOIN samples ON samples.turn_id = turns.id WHERE session_id = ? AND turns.id < ? "
        "AND NOT EXISTS (SELECT 1 FROM hints WHERE hints.turn_id = turns.id) AND value = -1 "
        "AND (settled = 0 OR (hint IS NOT NULL AND samples.created_at >= "
        "(SELECT created_at FROM turns WHERE id = ?)))",
        *(session, first, first),
    )
    followed = {row["id"] for row in unsaid if row["said"] is not None}
    before = tuple(sorted(followed | {row["id"] for row in shown}))
    return Forgetting(
        session=session,
        whole=first == 0,
        turns=tuple(turns),
        unsaid=before,
        withdrawn=_queued(rows, [*turns, *before]),
        steps=_steps(rows, [*turns, *before]),
    )


def _queued(rows: Rows, turns: Sequence[int]) -> int:
    return sum(
        rows.one(
            f"SELECT COUNT(*) FROM samples WHERE state = 'queued' AND turn_id IN ({_marks(some)})",
            *some,
        )
        for some in _chunks(turns)
    )


def _steps(rows: Rows, turns: Sequence[int]) -> tuple[UsedIn, ...]:
    live = {record.version.id for record in read_versions(rows) if record.live}
    found: dict[int, UsedIn] = {}
    for some in _chunks(turns):
        for row in rows.rows(
            "SELECT steps.id, version, parent, COUNT(*) AS n FROM samples "
            "JOIN steps ON steps.id = step_id WHERE state = 'trained' "
            f"AND turn_id IN ({_marks(some)}) GROUP BY steps.id",
            *some,
        ):
            earlier = found[row["id"]].samples if row["id"] in found else 0
            found[row["id"]] = UsedIn(
                step=row["id"],
                version=row["version"],
                before=row["parent"],
                samples=earlier + row["n"],
                live=row["version"] in live,
            )
    return tuple(found[step] for step in sorted(found))


def begin(database: Writer, found: Callable[[Rows], Forgetting]) -> Forgetting:
    """Say for good that it is to be forgotten.

    Raises:
        LedgerError: it cannot be written.
    """
    what = found(database)
    with database.transaction() as tx:
        for some in _chunks(what.turns):
            which = f"turn_id IN ({_marks(some)})"
            tx.execute(
                f"UPDATE samples SET state = 'expired' WHERE state = 'queued' AND {which}", some
            )
            tx.execute(
                f"UPDATE turns SET settled = 1 WHERE settled = 0 AND id IN ({_marks(some)})", some
            )
        for turn in what.unsaid:
            _unsay(tx, turn)
        if what.whole:
            tx.execute(
                "UPDATE sessions SET key = ? || '-' || id, "
                "closed_at = COALESCE(closed_at, created_at) WHERE id = ?",
                (FORGOTTEN, what.session),
            )
        begun = _begun(database)
        if what.turns:
            begun.append((what.session, what.turns[0], what.turns[-1]))
        _write_begun(tx, begun)
    return what


def is_begun(rows: Rows) -> bool:
    """Whether there is something left to do of what was to be forgotten."""
    return rows.row("SELECT 1 FROM meta WHERE key = ?", _BEGUN) is not None


def finish(database: Writer, file: int) -> Iterator[int]:
    """Forget what is to be forgotten; yields turns, after each transaction, the newest first.

    Args:
        file: as in remains.overwritten.

    Raises:
        LedgerError: it could not be finished; the next start goes on with it.
    """
    begun = _begun(database)
    for session, first, last in begun:
        turns = [
            row["id"]
            for row in database.rows(
                "SELECT id FROM turns WHERE session_id = ? AND id BETWEEN ? AND ? "
                "AND kind_reason <> ? ORDER BY id",
                *(session, first, last, FORGOTTEN),
            )
        ]
        while turns:
            gone, until = 0, time.perf_counter() + SLICE_S
            with database.transaction() as tx:
                while turns and (not gone or time.perf_counter() < until):
                    _forget_turn(tx, turns.pop())
                    gone += 1
            yield gone
    yield from sweep(database)
    yield from give_back(database)
    yield from overwritten(database.path, file)
    with database.transaction() as tx:
        _write_begun(tx, [one for one in _begun(database) if one not in begun])


def _begun(rows: Rows) -> list[tuple[int, int, int]]:
    """Session, first and last turn of what is to be forgotten."""
    stored = rows.one("SELECT value FROM meta WHERE key = ?", _BEGUN)
    return [tuple(one) for one in json.loads(stored)] if stored else []


def _write_begun(tx: sqlite3.Connection, begun: Sequence[tuple[int, int, int]]) -> None:
    tx.execute("DELETE FROM meta WHERE key = ?", (_BEGUN,))
    if begun:
        tx.execute("INSERT INTO meta VALUES (?, ?)", (_BEGUN, json.dumps(begun)))


def _forget_turn(tx: sqlite3.Connection, turn: int) -> None:
    row = tx.execute("SELECT params FROM turns WHERE id = ?", (turn,)).fetchone()
    for table in ("next_states", "votes", "verdicts", "hints"):
        tx.execute(f"DELETE FROM {table} WHERE turn_id = ?", (turn,))
    tx.execute("UPDATE spend SET turn_id = NULL WHERE turn_id = ?", (turn,))
    if _withdraw(tx, turn):
        _blank(tx, turn, json.loads(row["params"]))
    else:
        tx.execute("DELETE FROM turns WHERE id = ?", (turn,))


def _withdraw(tx: sqlite3.Connection, turn: int) -> bool:
    """Take a turn's sample away. True: it was trained, so that it stays, without its hint."""
    sample = tx.execute("SELECT id, state FROM samples WHERE turn_id = ?", (turn,)).fetchone()
    if sample is None:
        return False
    if sample["state"] == "trained":
        tx.execute(
            "UPDATE samples SET hint = NULL, teacher_logprobs = NULL, teacher_targets = NULL, "
            "overlap = NULL WHERE id = ?",
            (sample["id"],),
        )
        return True
    tx.execute("DELETE FROM step_samples WHERE sample_id = ?", (sample["id"],))
    tx.execute("DELETE FROM samples WHERE id = ?", (sample["id"],))
    return False


def _blank(tx: sqlite3.Connection, turn: int, params: dict[str, Any]) -> None:
    nothing = pack_ids(())
    values: dict[str, Any] = {
        **dict.fromkeys(("prompt", "tokens", "logprobs", "topk_ids", "topk_logprobs"), nothing),
        **{"blocks": b"", "topk": 0, "hint_at": None, "history": "[]", "settled": 1},
        **dict.fromkeys(("request_text", "reply_text", "reply_digest", "call"), ""),
        **{"kind_reason": FORGOTTEN, "trace": None, "fallback": None, "misfit": None},
        "params": json.dumps(params | {"stop": []}),  # what the client wrote
    }
    sets = ", ".join(f"{name} = :{name}" for name in values)
    tx.execute(f"UPDATE turns SET {sets} WHERE id = :turn", values | {"turn": turn})


def _unsay(tx: sqlite3.Connection, turn: int) -> None:
    """A turn that stays, without what followed it and what was made of that."""
    if not _withdraw(tx, turn):
        tx.execute(
            "UPDATE turns SET settled = 1, untrained_because = COALESCE(untrained_because, ?) "
            "WHERE id = ?",
            ("what followed it was forgotten", turn),
        )
    tx.execute("UPDATE next_states SET text = '' WHERE turn_id = ?", (turn,))
    tx.execute("UPDATE votes SET answer = '' WHERE turn_id = ?", (turn,))
    tx.execute("DELETE FROM hints WHERE turn_id = ?", (turn,))


def _chunks(ids: Sequence[int]) -> list[Sequence[int]]:
    return [ids[at : at + _CHUNK] for at in range(0, len(ids), _CHUNK)]


def _marks(ids: Sequence[int]) -> str:
    return ", ".join("?" * len(ids))
