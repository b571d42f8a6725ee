"""Old turns lose their texts and tokens; what became of them stays to be told and counted.

Rule: only what was asked to go goes, the oldest first, and never what may still be trained: a turn
that is open, a queued sample, a sample of a step whose state may have to be loaded again. It is
done in transactions of a few milliseconds, between which the gateway writes.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator

from tinker_claw.ledger.codec import pack_ids, unraw_ids
from tinker_claw.ledger.database import Database

UNFOLLOWED = "nothing followed it before it was dropped for its age or the ledger's size"
SAFE_STATES = 8
"""Saved states to which a restart may have to go back, whose later samples are then queued again."""
SLICE_S = 0.003
"""What a transaction may take, roughly."""
_ROWS = 100
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
"""


class Retention:
    """Drops what is too old or too much, a little at a time."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._at = 0
        """All turns up to this one were dropped, or are in `_kept`."""
        self._kept: list[int] = []

    def live_bytes(self) -> int:
        """What the ledger's file holds, without its free pages."""
        pages, free, size = (
            int(self._db.one(f"PRAGMA {name}"))
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def round(self, before: float | None, most_bytes: int | None) -> Iterator[int]:
        """One pass over what there is to drop; yields turns dropped, after each transaction.

        Args:
            before: drop turns captured earlier, seconds since 1970.
            most_bytes: drop the oldest while the file holds more.
        """
        # What is dropped must not lie readable in the free pages.
        self._db.rows("PRAGMA secure_delete = ON")
        dropped = 0
        for done in self._drop(before, most_bytes):
            dropped += done
            yield done
        if dropped:
            yield from self._sweep()
            yield from self._give_back()

    def _drop(self, before: float | None, most_bytes: int | None) -> Iterator[int]:
        again, self._kept = self._kept, []
        at = 0
        while True:
            ids = again[at : at + _ROWS]
            at += len(ids)
            if ids:
                marks = ", ".join("?" * len(ids))
                rows = self._db.rows(f"{_NEXT} WHERE turns.id IN ({marks}) ORDER BY turns.id", *ids)
            else:
                rows = self._db.rows(
                    f"{_NEXT} WHERE turns.id > ? ORDER BY turns.id LIMIT {_ROWS}", self._at
                )
            if not rows:
                return
            while rows:
                if not self._wanted(rows[0], before, most_bytes):
                    self._kept += again[at - len(rows) if ids else at :] if ids else []
                    return
                yield self._slice(rows, before, most_bytes)

    def _wanted(self, row: sqlite3.Row, before: float | None, most_bytes: int | None) -> bool:
        old = before is not None and row["created_at"] < before
        return old or (most_bytes is not None and self.live_bytes() > most_bytes)

    def _slice(
        self, rows: list[sqlite3.Row], before: float | None, most_bytes: int | None
    ) -> int:
        """Drop the first of these rows, as many as the time allows; takes them off the list."""
        until, dropped = time.perf_counter() + SLICE_S, 0
        with self._db.transaction() as tx:
            while rows and time.perf_counter() < until:
                if not self._wanted(rows[0], before, most_bytes):
                    break
                row = rows.pop(0)
                self._at = max(self._at, row["id"])
                if not row["done"]:
                    self._kept.append(row["id"])
                elif row["full"]:
                    _empty(tx, row["id"], settled=row["settled"])
                    dropped += 1
        return dropped
