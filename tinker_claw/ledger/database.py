"""The SQLite file: read-only access, the lock, transactions, and long work in a thread.

Rule: every write happens inside `Writer.transaction()`; a crash leaves whole transactions only.
WAL with synchronous=NORMAL keeps every committed transaction through a killed process; after a
power cut the newest few may be missing, never half of one. A damaged file is left as it is. Deleted
data is overwritten, by every connection that writes (secure_delete).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypeVar

from tinker_claw.errors import LedgerError

T = TypeVar("T")

SCHEMA_VERSION: Final = 17
"""`PRAGMA user_version` of the schema in schema.sql."""
CARRIED_FROM: Final = 11
"""Oldest schema that `carry` reads; later ones have the same versions and steps."""
FILE = "ledger.sqlite3"
"""File name in the data directory."""
PAUSE_S = 0.005
"""Seconds between two transactions of long work."""
_BUSY_MS = 5000
"""Milliseconds that a connection waits for a writer."""
_LARGE_BYTES = 200_000_000
"""Size in bytes from which the check at the start takes long enough to be logged."""
LOG_BYTES: Final = 16_000_000
"""Size in bytes to which the write-ahead log is cut once no reader holds its pages, and from which
it is emptied at a quiet moment. SQLite itself begins to empty it at 4 MB."""
_STATEMENTS = 256
"""Prepared statements that a connection keeps; handling a turn takes about thirty."""
_SMALLEST: Final = 512
"""Bytes of SQLite's smallest page: no ledger is shorter."""
_LOCK: Final = "lock"


class Rows:
    """Queries over a connection. A refusal by SQLite is a LedgerError."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._connection.row_factory = sqlite3.Row

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._refusing():
            return self._connection.execute(query, values).fetchall()

    def row(self, query: str, *values: Any) -> sqlite3.Row | None:
        with self._refusing():
            return self._connection.execute(query, values).fetchone()

    def one(self, query: str, *values: Any) -> Any:
        """Return the first column of the only row; None where there is none."""
        row = self.row(query, *values)
        return None if row is None else row[0]

    def column(self, query: str, *values: Any) -> list[Any]:
        """Return the first column of all rows."""
        return [row[0] for row in self.rows(query, *values)]

    def pairs(self, query: str, *values: Any) -> dict[Any, Any]:
        """Return the second column of all rows, by the first."""
        return {row[0]: row[1] for row in self.rows(query, *values)}

    def meta(self, key: str) -> str | None:
        """Return a value of the table `meta`; None where there is none."""
        return self.one("SELECT value FROM meta WHERE key = ?", key)

    @contextmanager
    def _refusing(self, what: str = "read as a ledger") -> Generator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._refused(f"{self.path} cannot be {what}: {error}") from error
        except OverflowError as error:  # somebody's number is larger than SQLite's can be
            raise LedgerError(f"{self.path} has nothing with so large a number") from error

    def _refused(self, why: str) -> LedgerError:
        return LedgerError(why)


class Outside(Rows):
    """A ledger file that another process may be writing to."""

    @contextmanager
    def moment(self) -> Generator[None]:
        """Read one consistent snapshot inside; the next one sees later writes."""
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.execute("ROLLBACK")


@contextmanager
def open_read_only(path: Path, *, oldest: int = SCHEMA_VERSION) -> Generator[Outside]:
    """Open the ledger file `path` for reading.

    Args:
        oldest: oldest schema that the caller can read.

    Raises:
        LedgerError: there is no such file, it is no ledger, or of another schema.
    """
    if not path.is_file():
        raise LedgerError(f"{path} does not exist")
    address = f"{path.absolute().as_uri()}?mode=ro"
    try:
        connection = sqlite3.connect(
            address, uri=True, timeout=_BUSY_MS / 1e3, isolation_level=None
        )
    except sqlite3.Error as error:
        raise LedgerError(f"{path} cannot be read as a ledger: {error}") from error
    with closing(connection):
        outside = Outside(path, connection)
        _check_version(path, outside.one("PRAGMA user_version"), oldest)
        yield outside


def _check_version(path: Path, version: int, oldest: int = SCHEMA_VERSION) -> None:
    if oldest <= version <= SCHEMA_VERSION:
        return
    if version <= 0:
        raise LedgerError(f"{path} is no ledger")
    cure = "get that release, or use another --data-dir"
    if CARRIED_FROM <= version < SCHEMA_VERSION:
        cure = f"`tinker-claw carry {path.parent} NEW` takes what it has learned to a new directory"
    raise LedgerError(
        f"{path} was written by another release (its schema is version {version}, this program "
        f"knows {SCHEMA_VERSION}), and was left as it is; {cure}"
    )


class WritingConnection(Rows):
    """A writing connection to a file that exists, used from one thread, in a process that has the
    lock."""

    def __init__(self, path: Path) -> None:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=rw",
            uri=True,
            timeout=_BUSY_MS / 1e3,
            isolation_level=None,
            cached_statements=_STATEMENTS,
        )
        super().__init__(path, connection)
        self._lock_file = path.parent / _LOCK
        self._opened, self._locked = path.stat(), self._lock_file.stat()
        self.on_write: Callable[[str | None], None] = lambda error: None
        """Called with None after each write, and with the error after each refusal."""
        self._connection.execute("PRAGMA secure_delete = ON")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        self._connection.execute("PRAGMA foreign_keys = ON")
        self._connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")

    @contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        """Run all writes inside together or not at all.

        Raises:
            LedgerError: the database refused (disk full, for example), or its file is gone;
                nothing was written.
        """
        if lost := self._lost():
            raise self._refused(lost)
        with self._refusing("written"):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # Where the disk has failed, SQLite has rolled back by itself.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        self.on_write(None)

    def write(self, query: str, *values: Any) -> int:
        """Run one statement in a transaction of its own; return the number of rows it changed.

        Raises:
            LedgerError: as `transaction`.
        """
        with self.transaction() as tx:
            return tx.execute(query, values).rowcount

    def give_back(self, pages: int) -> None:
        """Release free pages to the file system, if the file was created with auto_vacuum."""
        with self._refusing():
            # Not execute(): that takes the first step of this statement, which is one page.
            self._connection.executescript(f"PRAGMA incremental_vacuum({pages})")

    def vacuum(self) -> None:
        """Rewrite the file; the copy needs as much disk space again, and as much for temporary
        files."""
        room = "which takes room for a copy, there and in /var/tmp (or SQLITE_TMPDIR)"
        with self._refusing(f"written anew, {room}"):
            self._connection.execute("VACUUM")

    def empty_log(self) -> bool:
        """Move the write-ahead log into the file and empty it. False: a reader is using it.

        Raises:
            LedgerError: the file is gone.
        """
        if lost := self._lost():
            raise self._refused(lost)
        self.rows("PRAGMA wal_checkpoint(PASSIVE)")  # does most of it, and blocks nobody
        self.rows("PRAGMA busy_timeout = 0")  # waiting here would block writers
        try:
            return self.rows("PRAGMA wal_checkpoint(TRUNCATE)")[0][0] == 0
        finally:
            self.rows(f"PRAGMA busy_timeout = {_BUSY_MS}")

    def _lost(self) -> str | None:
        """Return what befell the file or the lock if one was deleted or replaced while it was open.
        SQLite would not notice, and all that it wrote would be lost; without its lock nobody is
        kept out."""
        if change := _change(self.path, self._opened):
            return (
                f"{self.path} {change}: stop the gateway, put {self.path.parent} back from a "
                "backup, and start it again"
            )
        lock = self._lock_file
        with suppress(OSError):
            if os.path.samestat(lock.stat(), self._locked):
                return None
        return (
            f"{lock} was deleted, so another gateway may write here, too: stop all that run on "
            f"{self.path.parent}, and start one"
        )

    def _refused(self, why: str) -> LedgerError:
        why = self._lost() or why
        self.on_write(why)
        return super()._refused(why)

    def close(self) -> None:
        self._connection.close()


def _change(path: Path, opened: os.stat_result) -> str | None:
    """Return what befell a file since it was opened; None: it is there, and not empty."""
    try:
        now = path.stat()
    except OSError as error:
        return f"is not there any more ({error.strerror})"
    if not os.path.samestat(now, opened):
        return "is another file than the one that was opened"
    return "was emptied" if now.st_size < _SMALLEST else None


def insert(tx: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> int:
    """Insert a row, given by its columns; return its id."""
    query = f"INSERT INTO {table} ({', '.join(values)}) VALUES (:{', :'.join(values)})"
    return int(tx.execute(query, values).lastrowid or 0)


def set_meta(tx: sqlite3.Connection, key: str, value: str | int | None) -> None:
    """Write a value of the table `meta`; None deletes it."""
    tx.execute("DELETE FROM meta WHERE key = ?", (key,))
    if value is not None:
        tx.execute("INSERT INTO meta VALUES (?, ?)", (key, value))


class Database(WritingConnection):
    """The first connection to a data directory, which it locks for this process."""

    def __init__(self, directory: Path) -> None:
        """Open or create the ledger of `directory`.

        Raises:
            LedgerError: the directory cannot be written or is in use, or the file is no ledger.
        """
        path = directory / FILE
        self._lock = _lock(directory)
        try:
            _check(path)
            path.touch(0o600)
            super().__init__(path)
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            os.close(self._lock)
            raise LedgerError(
                f"{path} cannot be used as a ledger ({error}); check its disk, move it away "
                "or choose another --data-dir"
            ) from error
        except LedgerError:
            os.close(self._lock)
            raise

    def _prepare(self) -> None:
        version = self.one("PRAGMA user_version")
        if version != 0:
            _check_version(self.path, version)
        else:
            self._connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self._connection.execute("PRAGMA journal_mode = WAL")
        if version == 0:
            schema = files("tinker_claw.ledger").joinpath("schema.sql").read_text()
            self._connection.executescript(
                f"BEGIN; {schema} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )

    def close(self) -> None:
        super().close()
        os.close(self._lock)


class LedgerTable:
    """Queries on some tables of a ledger."""

    def __init__(self, database: Database) -> None:
        self._db = database


def _check(path: Path) -> None:
    """Refuse a damaged ledger before anything is written to it.

    The connection only reads: one that may write would move the newest transactions from the log
    into the damaged file when it is closed. A gigabyte takes seconds, or as long as the disk needs
    to read it.

    Raises:
        LedgerError: it is damaged; the message says what to do.
        sqlite3.DatabaseError: it is no database at all.
    """
    if not path.exists() or path.stat().st_size == 0:
        return
    if path.stat().st_size >= _LARGE_BYTES:
        from tinker_claw.telemetry import log  # not needed by readers

        log.info("ledger.checking", gigabytes=round(path.stat().st_size / 1e9, 1))
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as reader:
            check_result = str(reader.execute("PRAGMA quick_check(1)").fetchone()[0])
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CORRUPT:
            raise
        check_result = str(error)
    if check_result != "ok":
        raise LedgerError(
            f"{path} is damaged ({' '.join(check_result.split())}); nothing in it was changed. "
            f"Keep a copy of {path.parent}, and put a backup of that directory back, or continue "
            "with another --data-dir. What is left can often be read with sqlite3's command "
            ".recover"
        )


def _lock(directory: Path) -> int:
    """Take the directory's lock; the operating system releases it however the process ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # it will hold conversations
        handle = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise LedgerError(
            f"the data directory {directory} cannot be written ({error.strerror}); "
            "choose another with --data-dir"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise in_use(directory) from error
    return handle


def in_use(directory: Path) -> LedgerError:
    """Return the error for a data directory that another process has locked."""
    return LedgerError(
        f"the data directory {directory} is in use by another process; "
        "stop that one or choose another with --data-dir"
    )


def is_locked(directory: Path) -> bool:
    """Return whether a process has the lock of this data directory: a gateway is running.

    Raises:
        LedgerError: the directory cannot be used.
    """
    try:
        with (directory / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        raise LedgerError(
            f"the data directory {directory} cannot be used: {error.strerror}"
        ) from error
    return False


async def beside(path: Path, work: Callable[[WritingConnection], T]) -> T:
    """Do some work in a thread, over a connection of its own; what is begun is ended.

    Raises:
        LedgerError: a write was refused.
    """

    def run() -> T:
        try:
            writer = WritingConnection(path)
        except (OSError, sqlite3.Error) as error:
            raise LedgerError(f"{path} cannot be written: {error}") from error
        with closing(writer):
            return work(writer)

    running = asyncio.ensure_future(asyncio.to_thread(run))
    try:
        return await asyncio.shield(running)
    finally:
        if not running.done():
            await asyncio.wait({running})
