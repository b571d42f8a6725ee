"""New rows as they come.

Rule: a row is shown when it appears, and again, whole, whenever something in it has changed; of
several lines with one id the last one holds. Among the newest rows only: what changes further back
is not shown.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace

from tinker_claw.ledger.full import in_full
from tinker_claw.ledger.listing import Filter, Record, Table, read
from tinker_claw.ledger.reading import Outside
from tinker_claw.story.columns import COLUMNS
from tinker_claw.story.command import write
from tinker_claw.story.table import table

POLL_S = 0.3
WATCHED = 500
"""Rows behind the newest that are watched for changes."""


class Following:
    """Watches a table of a ledger."""

    def __init__(self, ledger: Outside, name: Table, wanted: Filter, *, full: bool) -> None:
        self._ledger = ledger
        self._name: Table = name
        self._wanted = wanted
        self._full = full
        self._known: dict[int, Record] = {}

    def run(self, first: int | None, *, as_json: bool) -> None:
        """Show the newest `first` rows, then what comes, until interrupted."""
        with self._ledger.moment():
            records = self._read()
        shown = records if first is None else records[-first:]
        if as_json:
            self._show_json(shown)
        else:
            write(table(COLUMNS[self._name], shown))
        self._known = {_id(record): record for record in records}
        seen = -1
        while True:
            changes = self._ledger.changes()
            if changes != seen:
                seen = changes
                with self._ledger.moment():
                    new = self._new()
                if as_json:
                    self._show_json(new)
                elif new:
                    write(table(COLUMNS[self._name], new)[1:])
            time.sleep(POLL_S)

    def _new(self) -> list[Record]:
        records = self._read()
        new = [record for record in records if self._known.get(_id(record)) != record]
        self._known = {_id(record): record for record in records}
        return new

    def _read(self) -> list[Record]:
        # What lies far behind is not looked through again with every change.
        newest = self._ledger.one("SELECT MAX(id) FROM turns") or 0
        turns = self._name in ("turns", "verdicts", "samples")
        after = max(0, newest - 2 * WATCHED) if turns else 0
        return read(self._ledger, self._name, replace(self._wanted, after=after), WATCHED)

    def _show_json(self, records: list[Record]) -> None:
        for record in records:
            shown = in_full(self._ledger, self._name, record) if self._full else record
            write([json.dumps(shown)])


def _id(record: Record) -> int:
    return int(record.get("id", record.get("turn", 0)))
