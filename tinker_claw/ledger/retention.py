"""Old turns lose their texts and tokens; what became of them stays to be told and counted.

Rule: only what was asked to go goes, the oldest first, and never what may still be trained: a turn
that is open, a queued sample, a sample of a step whose state may have to be loaded again. It is
done in transactions of a few milliseconds, between which the gateway writes.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Generator, Iterator

from tinker_claw.ledger.codec import pack_ids, unraw_ids
from tinker_claw.ledger.database import Writer

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
