"""The ledger: every turn, verdict, sample, step and version as rows of one SQLite file.

Rule: a component reads its work from the ledger, never from memory alone, so that a restart picks
up where the last process stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tinker_claw.errors import LedgerError
from tinker_claw.ledger.database import (
    LOG_BYTES,
    PAUSE_S,
    Database,
    Rows,
    WritingConnection,
    beside,
)
from tinker_claw.ledger.feedback import FeedbackTable
from tinker_claw.ledger.groups import GroupTable
from tinker_claw.ledger.jobs import JobTable
from tinker_claw.ledger.judgements import JudgementTable
from tinker_claw.ledger.lessons import LessonTable
from tinker_claw.ledger.practice import PracticeTable
from tinker_claw.ledger.prune import Forgetting, drop_some, forget, give_back, sweep
from tinker_claw.ledger.reference import Reference
from tinker_claw.ledger.samples import SampleTable
from tinker_claw.ledger.spend import SpendTable
from tinker_claw.ledger.steps import StepTable
from tinker_claw.ledger.turns import TurnTable
from tinker_claw.ledger.versions import VersionTable


def holds_run(rows: Rows, run: Mapping[str, str]) -> bool:
    """Return whether a ledger holds this run. One without a version never began, and may be
    replaced.

    Raises:
        LedgerError: it holds another run; names what differs.
    """
    stored = rows.pairs("SELECT * FROM meta")
    held = rows.one("SELECT 1 FROM versions LIMIT 1") is not None
    for key, value in run.items():
        if held and stored.get(key, value) != value:
            flag = key.replace("model", "model-name").replace("_", "-")
            raise LedgerError(
                f"{rows.path} holds a run with {key} {stored[key]!r}, not {value!r}: "
                f"give --{flag} {stored[key]}, or another --data-dir"
            )
    return held and stored.keys() >= run.keys()


class Ledger:
    """All tables of one locked data directory."""

    def __init__(self, directory: Path) -> None:
        self._db = Database(directory)
        self.path = self._db.path
        self.rows: Rows = self._db
        """Queries, for the functions that read a file as well as a running ledger."""
        self._erasing = asyncio.Lock()
        """Held by long work: blocks that it finds unused, other long work might use again."""
        self.turns = TurnTable(self._db)
        self.jobs = JobTable(self._db)
        self.judgements = JudgementTable(self._db)
        self.lessons = LessonTable(self._db)
        self.practice = PracticeTable(self._db)
        self.feedback = FeedbackTable(self._db)
        self.samples = SampleTable(self._db)
        self.groups = GroupTable(self._db)
        self.steps = StepTable(self._db)
        self.spend = SpendTable(self._db)
        self.versions = VersionTable(self._db)
        self.reference = Reference(self._db)

    def watch(self, on_write: Callable[[str | None], None]) -> None:
        """Call this with None after each write, and with the error after each refusal."""
        self._db.on_write = on_write

    def bind(self, run: dict[str, str]) -> None:
        """Tie the ledger to a run's model and method. Raises as `holds_run`."""
        if not holds_run(self._db, run):
            with self._db.transaction() as tx:
                tx.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(run.items()))

    def forget(self, select: Callable[[Rows], Forgetting]) -> Forgetting:
        """Forget data at once and erase it from the file; return a description of it.

        Only for a process that has the ledger to itself: it blocks writers for seconds per
        gigabyte.
        """
        forgotten = forget(self._db, select)
        try:
            self.vacuum()
        except LedgerError as error:
            raise LedgerError(
                f"it is forgotten, but {error}; what SQLite may have left between other rows goes "
                "with `tinker-claw forget leftovers`"
            ) from error
        return forgotten

    def vacuum(self) -> None:
        """Rewrite the file without the remains of deleted rows that SQLite left between others."""
        self._db.vacuum()
        give_back(self._db)

    async def forget_in_thread(self, select: Callable[[Rows], Forgetting]) -> Forgetting:
        """Forget data while a gateway runs; return a description of it."""
        async with self._erasing:
            return await beside(self.path, lambda writer: forget(writer, select))

    async def trim(self, before: float) -> int:
        """Drop turns captured before a time, in seconds since 1970, a few at a time in a thread;
        return their number."""
        async with self._erasing:
            dropped, at = 0, 0
            while at is not None:
                some, at = await beside(self.path, partial(drop_some, before=before, at=at))
                dropped += some
                await asyncio.sleep(PAUSE_S)
            if dropped:
                await beside(self.path, sweep)
            return dropped

    async def empty_log(self) -> bool:
        """Empty the write-ahead log in a thread, if it is long. False: a reader holds its pages, so
        that it grows until it is emptied later."""
        log = self.path.with_name(f"{self.path.name}-wal")
        if not log.exists() or log.stat().st_size <= LOG_BYTES:
            return True
        async with self._erasing:
            return await beside(self.path, WritingConnection.empty_log)

    def live_bytes(self) -> int:
        """Return the bytes in use in the file, without its free pages."""
        pages = self._db.one("PRAGMA page_count") - self._db.one("PRAGMA freelist_count")
        return self._db.one("PRAGMA page_size") * pages

    def close(self) -> None:
        self._db.close()
