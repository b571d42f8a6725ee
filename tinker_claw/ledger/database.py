"""The SQLite file: open, lock, transactions.

Rule: every write happens inside `Database.transaction()`; a crash leaves whole transactions only.
WAL with synchronous=NORMAL keeps every committed transaction through a killed process; after a
power cut the newest few may be missing, never half of one. A damaged file is left as it is.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from tinker_claw.errors import LedgerError
from tinker_claw.ledger.reading import FILE, SCHEMA_VERSION, Rows
from tinker_claw.telemetry import log

_MIGRATIONS = {1: "migrate_1_to_2.sql", 2: "migrate_2_to_3.sql", 3: "migrate_3_to_4.sql"}
"""From each older version to the next."""

_LARGE_BYTES = 200_000_000
"""Of a ledger whose check at the start takes long enough to say so."""

_DISK: Final = {
    sqlite3.SQLITE_FULL: "make room on its disk",
    sqlite3.SQLITE_IOERR: "see what is wrong with its disk",
}
"""What helps where the file itself may be as it should."""


class Database(Rows):
    """One connection, used from one thread, to a data directory that this process has locked."""

    def __init__(self, directory: Path) -> None:
        """Open or create the ledger of `directory`.

        Raises:
            LedgerError: the directory cannot be written or is in use, or the file is no ledger.
        """
        path = directory / FILE
        self._lock = _lock(directory)
        try:
            _check(path)
            super().__init__(path, sqlite3.connect(path, isolation_level=None))
            self._prepare()
        except sqlite3.Error as error:
            os.close(self._lock)
            code: int = getattr(error, "sqlite_errorcode", 0)  # none where we raised it ourselves
            cure = _DISK.get(code & 0xFF, "move it away")
            raise LedgerError(
                f"{path} cannot be used as a ledger ({error}); {cure} or choose another --data-dir"
            ) from error
        except LedgerError:
            os.close(self._lock)
            raise

    def _prepare(self) -> None:
        execute = self._connection.execute
        version = execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            execute(
                "PRAGMA auto_vacuum = INCREMENTAL"
            )  # of an older file it would write the header
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        execute("PRAGMA foreign_keys = ON")
        if version == 0:
            schema = files("tinker_claw.ledger").joinpath("schema.sql").read_text()
            self._connection.executescript(
                f"BEGIN; {schema} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )
        while 0 < version < SCHEMA_VERSION:
            step = files("tinker_claw.ledger").joinpath(_MIGRATIONS[version]).read_text()
            version += 1
            self._connection.executescript(
                f"BEGIN; {step} PRAGMA user_version = {version}; COMMIT;"
            )
        if version > SCHEMA_VERSION:
            raise sqlite3.DatabaseError(
                f"its schema is version {version}, this program knows {SCHEMA_VERSION}"
            )

    @contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        """All writes inside happen together or not at all.

        Raises:
            LedgerError: the database refused (disk full, for example); nothing was written.
        """
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # Where the disk has failed, SQLite has rolled back by itself.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise LedgerError(f"{self.path} cannot be written: {error}") from error

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._reading():
            return super().rows(query, *values)

    def row(self, query: str, *values: Any) -> sqlite3.Row | None:
        with self._reading():
            return super().row(query, *values)

    def give_back(self, pages: int) -> None:
        """Make the file shorter by so many free pages, where it was made for that."""
        with self._reading():
            # Not execute(): that takes the first step of this statement, which is one page.
            self._connection.executescript(f"PRAGMA incremental_vacuum({pages})")

    @contextmanager
    def _reading(self) -> Generator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise LedgerError(f"{self.path} cannot be read: {error}") from error

    def close(self) -> None:
        self._connection.close()
        os.close(self._lock)


def _check(path: Path) -> None:
    """Refuse a damaged ledger before anything is written to it.

    The connection only reads: one that may write would move the newest transactions from the log
    into the damaged file when it is closed. A gigabyte takes seconds, or as long as the disk needs
    to read it.

    Raises:
        LedgerError: it is damaged; says what to do.
        sqlite3.DatabaseError: it is no database at all.
    """
    if not path.exists() or path.stat().st_size == 0:
        return
    if path.stat().st_size >= _LARGE_BYTES:
        log.info("ledger.checking", gigabytes=round(path.stat().st_size / 1e9, 1))
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as reader:
            found = str(reader.execute("PRAGMA quick_check(1)").fetchone()[0])
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CORRUPT:
            raise
        found = str(error)
    if found != "ok":
        raise LedgerError(
            f"{path} is damaged ({' '.join(found.split())}); nothing in it was changed. Keep a "
            f"copy of {path.parent}, and put a backup of that directory back, or go on with "
            f"another --data-dir. What is left can often be read with sqlite3's command .recover"
        )


def _lock(directory: Path) -> int:
    """Take the directory's lock; the operating system drops it when the process ends, however."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # it will hold conversations
        handle = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise LedgerError(
            f"the data directory {directory} cannot be written ({error.strerror}); "
            "choose another with --data-dir"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise LedgerError(
            f"the data directory {directory} is in use by another process; "
            "stop that one or choose another with --data-dir"
        ) from error
    return handle
