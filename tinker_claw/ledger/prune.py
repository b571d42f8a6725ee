"""What is left on the file's pages of rows that are gone.

Rule: SQLite overwrites what it deletes (secure_delete), but where it shares rows out anew among
pages, copies of rows that moved stay on a page between its list of cells and its first cell, where
nothing is read and what comes next is written. Such a gap is overwritten with zeros, in the file
itself, while this process has the ledger's write lock and its log is empty: nobody else writes
then, no reader looks there, and a power cut leaves zeros or what was there.

The format is https://www.sqlite.org/fileformat2.html.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tinker_claw.errors import LedgerError, UndoError
from tinker_claw.ledger.codec import pack_ids, unraw_ids
from tinker_claw.ledger.database import SCHEMA_VERSION, Rows, Writer
from tinker_claw.ledger.versions import read_versions

_BATCH: Final = 256
"""Pages looked at before others have a turn."""
_PENDING_BYTE: Final = 0x4000_0000
"""The page that holds it is no page."""
_TREE: Final = {1, 5}
"""Kinds, in the map of pages, of those that hold cells."""
_HEADER: Final = {2: 12, 5: 12, 10: 8, 13: 8}
"""Bytes before the list of cells, by the kind of page."""
_PATIENCE_S: Final = 60.0
"""How long is waited for readers to let go of the log."""
_RETRY_S: Final = 0.05


def emptied_log(writer: Writer) -> Iterator[int]:
    """Make the log empty, waiting for whoever reads it.

    Raises:
        LedgerError: a reader would not end.
    """
    until = time.monotonic() + _PATIENCE_S
    while not writer.empty_log():
        if time.monotonic() > until:
            raise LedgerError(
                f"the rows are gone, but another program reads {writer.path} without a pause, so "
                "that its log holds them; end that program, and they leave it within minutes, or "
                "at the next start"
            )
        time.sleep(_RETRY_S)
        yield 0


def overwritten(path: Path, file: int) -> Iterator[int]:
    """Overwrite what pages hold of rows that are gone, a few pages at a time.

    On a connection of its own, which remembers no page of earlier; others forget theirs once they
    see that something was written.

    Args:
        file: the ledger open for reading and writing, as long as any connection to it: closing it
            would drop the locks that SQLite has on the file.
    """
    with closing(Writer(path)) as writer:
        yield from emptied_log(writer)
        for suspects in _suspects(writer, file):
            while suspects and not _overwrite(writer, file, suspects):
                yield from emptied_log(writer)
            yield 0
        yield from emptied_log(writer)


def _suspects(writer: Writer, file: int) -> Iterator[list[int]]:
    """Pages that may have something to overwrite, as the file shows them, batch by batch."""
    size, pages = writer.pragma("page_size"), writer.pragma("page_count")
    for first in range(2, pages + 1, _BATCH):
        batch = range(first, min(first + _BATCH, pages + 1))
        yield [page for page in batch if _gap(file, page, size)]


def _overwrite(writer: Writer, file: int, suspects: Sequence[int]) -> bool:
    """Do it. False: something is in the log, so that the file is not what it will be."""
    log = writer.path.with_name(f"{writer.path.name}-wal")
    with writer.transaction() as tx:
        if log.stat().st_size:
            return False
        size = writer.pragma("page_size")
        for page in suspects:
            if found := _gap(file, page, size):
                start, end = found
                os.pwrite(file, bytes(end - start), (page - 1) * size + start)
        os.fsync(file)
        # Written, so that other connections drop the pages that they remember.
        tx.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    return True


def _gap(file: int, page: int, size: int) -> tuple[int, int] | None:
    """Where a page of cells holds something between their list and the first of them."""
    if not _is_tree(file, page, size):
        return None
    data = os.pread(file, size, (page - 1) * size)
    if len(data) < size or data[0] not in _HEADER:
        return None
    start = _HEADER[data[0]] + 2 * int.from_bytes(data[3:5])
    end = int.from_bytes(data[5:7]) or 65_536
    return (start, end) if start < end <= size and any(data[start:end]) else None


def _is_tree(file: int, page: int, size: int) -> bool:
    """What the map says that stands before every so many pages: five bytes for each."""
    mapped = size // 5 + 1
    at = (page - 2) // mapped * mapped + 2
    if at == _PENDING_BYTE // size + 1:
        at += 1
    if page <= at:
        return False
    kind = os.pread(file, 1, (at - 1) * size + 5 * (page - at - 1))
    return len(kind) == 1 and kind[0] in _TREE


# Old turns lose their texts and tokens; what became of them stays to be told and counted.
#
# Rule: only what was asked to go goes, the oldest first, and never what may still be trained: a
# turn
# that is open, a queued sample, a sample of a step whose state may have to be loaded again. It is
# done in transactions of a few milliseconds, between which the gateway writes.


UNFOLLOWED = "nothing followed it before it was dropped for its age or the ledger's size"
SAFE_STATES = 8
"""Saved states to which a restart may have to go back; it queues the samples since then again."""
SLICE_S = 0.003
"""What a transaction may take, roughly."""
_ROWS = 25
_PAGES = 64
"""Pages given back at a time."""
_SPARE = 256
"""Free pages that stay for what comes next."""
_EMPTY = pack_ids(())

_NEXT = f"""
SELECT turns.id, turns.created_at, settled,
  LENGTH(tokens) > 1 OR LENGTH(prompt) > 1 OR request_text <> '' OR reply_text <> '' AS full,
  CASE WHEN settled THEN
    COALESCE(samples.state <> 'queued', 1)
    AND (samples.step_id IS NULL OR COALESCE(steps.version <= (
      SELECT id FROM versions WHERE state_ref IS NOT NULL ORDER BY id DESC
      LIMIT 1 OFFSET {SAFE_STATES - 1}), 0))
  ELSE closed_at IS NOT NULL AND next_states.turn_id IS NULL END AS done
FROM turns JOIN sessions ON sessions.id = session_id
  LEFT JOIN samples ON samples.turn_id = turns.id
  LEFT JOIN steps ON steps.id = samples.step_id
  LEFT JOIN next_states ON next_states.turn_id = turns.id
WHERE turns.id > ? ORDER BY turns.id LIMIT ?
"""


class Retention:
    """Drops what is too old or too much, a little at a time."""

    def __init__(self, database: Writer) -> None:
        self._db = database
        self._begin = 0
        """Every turn up to this one has been dropped."""

    def round(
        self, before: float | None, most_bytes: int | None, on: Writer | None = None
    ) -> Iterator[int]:
        """One pass over what there is to drop; yields turns dropped, after each transaction.

        Args:
            before: drop turns captured earlier, seconds since 1970.
            most_bytes: drop the oldest while the file holds more.
            on: the connection of another thread.
        """
        db = on or self._db
        if before is not None:
            yield from self._drop(db, lambda row, _: row["created_at"] < before)
        if most_bytes is not None:
            # What prompts share is freed by the sweep only, so it is looked again now and then.
            some = max(20, db.one("SELECT COUNT(*) FROM turns") // 50)
            dropped = 1
            while dropped and live_bytes(db) > most_bytes:
                dropped = yield from self._drop(
                    db, lambda _, dropped: dropped < some and live_bytes(db) > most_bytes
                )
        yield from give_back(db)

    def _drop(
        self, db: Writer, wanted: Callable[[sqlite3.Row, int], bool]
    ) -> Generator[int, None, int]:
        """Empty turns, the oldest first, while they are wanted; returns how many.

        Args:
            wanted: of a row, with how many were emptied before.
        """
        total, at, whole, more = 0, self._begin, True, True
        while more and (rows := db.rows(_NEXT, at, _ROWS)):
            dropped, until = 0, time.perf_counter() + SLICE_S
            with db.transaction() as tx:
                for passed, row in enumerate(rows):
                    more = wanted(row, total + dropped)
                    # At least one, however late a busy machine lets this begin.
                    if not more or (passed and time.perf_counter() > until):
                        break
                    if row["done"] and row["full"]:
                        _empty(tx, row["id"], settled=row["settled"])
                        dropped += 1
                    at, whole = row["id"], whole and row["done"]
                    if whole:
                        self._begin = at
            total += dropped
            yield dropped
        if total:
            yield from sweep(db)
        return total


def live_bytes(database: Writer) -> int:
    """What the ledger's file holds, without its free pages."""
    pages = database.pragma("page_count") - database.pragma("freelist_count")
    return database.pragma("page_size") * pages


def sweep(database: Writer) -> Iterator[int]:
    """Delete the blocks that no prompt is made of any more."""
    used, at = set[int](), 0
    top = database.one("SELECT MAX(id) FROM prompt_blocks") or 0
    query = "SELECT id, blocks FROM turns WHERE id > ? ORDER BY id LIMIT ?"
    while rows := database.rows(query, at, 2 * _ROWS):
        at = rows[-1]["id"]
        for row in rows:
            used.update(unraw_ids(row["blocks"]))
        yield 0
    block = 0
    while block < top:
        with database.transaction() as tx:
            # Turns that were written meanwhile may share blocks with those that are gone.
            for row in tx.execute(query, (at, -1)):
                at = row["id"]
                used.update(unraw_ids(row["blocks"]))
            found = tx.execute(
                "SELECT id FROM prompt_blocks WHERE id > ? ORDER BY id LIMIT ?",
                (block, 2 * _ROWS),
            ).fetchall()
            block = found[-1]["id"] if found else top
            unused = [(row["id"],) for row in found if row["id"] not in used]
            tx.executemany("DELETE FROM prompt_blocks WHERE id = ?", unused)
        yield 0


def give_back(database: Writer) -> Iterator[int]:
    """Make the file smaller."""
    while database.pragma("freelist_count") > _SPARE:
        database.give_back(_PAGES)
        yield 0
    database.rows("PRAGMA wal_checkpoint(PASSIVE)")


def _empty(tx: sqlite3.Connection, turn: int, *, settled: bool) -> None:
    values = {
        **dict.fromkeys(("prompt", "tokens", "logprobs", "topk_ids", "topk_logprobs"), _EMPTY),
        **{"blocks": b"", "topk": 0, "hint_at": None, "history": "[]", "settled": 1},
        **dict.fromkeys(("request_text", "reply_text", "reply_digest"), ""),
    }
    sets = ", ".join(f"{name} = :{name}" for name in values)
    tx.execute(
        f"UPDATE turns SET {sets}, params = json_set(params, '$.stop', json_array()) "
        "WHERE id = :turn",
        values | {"turn": turn},
    )
    if not settled:
        tx.execute("UPDATE turns SET untrained_because = ? WHERE id = ?", (UNFOLLOWED, turn))
    _close_up(tx, turn)
    tx.execute(
        "UPDATE samples SET hint = '', teacher_logprobs = NULL, teacher_targets = NULL "
        "WHERE turn_id = ? AND hint IS NOT NULL",
        (turn,),
    )
    for column in ("next_states.text", "votes.answer", "hints.text"):
        table, _, name = column.partition(".")
        tx.execute(f"UPDATE {table} SET {name} = '' WHERE turn_id = ?", (turn,))


def _close_up(tx: sqlite3.Connection, turn: int) -> None:
    """Give back the room that the turn's row no longer needs.

    SQLite joins pages where a row is deleted, and not where one is written anew and shorter.
    """
    tx.execute("PRAGMA defer_foreign_keys = ON")  # until this transaction ends
    row = tx.execute("SELECT * FROM turns WHERE id = ?", (turn,)).fetchone()
    tx.execute("DELETE FROM turns WHERE id = ?", (turn,))
    tx.execute(f"INSERT INTO turns VALUES ({', '.join('?' * len(row))})", tuple(row))


# Forgetting: turns leave the file, free pages and write-ahead log included.
#
# Rule: one transaction says what goes, after which nobody judges it, trains on it or adds to it;
# the
# rest is done a few milliseconds at a time, and taken up again at the next start where it was cut
# short. What a step has trained on leaves a row that says so, with numbers and without ids, text
# or
# anything that they could be read from. Sums of what was spent stay. Later turns of a session
# repeat
# the earlier ones in their prompts, so a turn is forgotten with all that come after it.


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
