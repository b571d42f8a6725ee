"""Reading a ledger: rows of an open connection, or of a file from outside while a gateway may be
writing to it.

Rule: reading from outside locks nothing, writes nothing, and sees one moment.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tinker_claw.errors import LedgerError

SCHEMA_VERSION = 4
FILE = "ledger.sqlite3"
"""Its name in the data directory."""
_BUSY_S = 5.0


class Rows:
    """Queries over a connection."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._connection.row_factory = sqlite3.Row

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        return self._connection.execute(query, values).fetchall()

    def row(self, query: str, *values: Any) -> sqlite3.Row | None:
        return self._connection.execute(query, values).fetchone()

    def one(self, query: str, *values: Any) -> Any:
        """The first column of the only row; None where there is none."""
        row = self.row(query, *values)
        return None if row is None else row[0]


class Outside(Rows):
    """A ledger file that another process may be writing to."""

    @contextmanager
    def moment(self) -> Generator[None]:
        """All that is read inside is of one moment; the next one sees what has come since."""
        try:
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise LedgerError(f"{self.path} cannot be read as a ledger ({error})") from error

    def changes(self) -> int:
        """A number that is another one once something was written, to be asked between moments."""
        return int(self.one("PRAGMA data_version"))


@contextmanager
def reading(path: Path) -> Generator[Outside]:
    """The ledger file `path`, opened for reading.

    Raises:
        LedgerError: there is no such file, it is no ledger, or of another schema.
    """
    if not path.is_file():
        raise LedgerError(f"{path} does not exist")
    address = f"file:{quote(str(path.absolute()))}?mode=ro"
    try:
        with closing(
            sqlite3.connect(address, uri=True, timeout=_BUSY_S, isolation_level=None)
        ) as connection:
            outside = Outside(path, connection)
            _check(path, outside.one("PRAGMA user_version"))
            yield outside
    except sqlite3.Error as error:
        raise LedgerError(f"{path} cannot be read as a ledger ({error})") from error


def _check(path: Path, version: int) -> None:
    if version > SCHEMA_VERSION:
        raise LedgerError(
            f"{path} was written by a newer release (its schema is version {version}, this "
            f"program knows {SCHEMA_VERSION}); use that release"
        )
    if version == 0:
        raise LedgerError(f"{path} is no ledger")
    if version < SCHEMA_VERSION:
        raise LedgerError(
            f"{path} was written by an older release (schema {version}); the next start of run.py "
            f"brings it to version {SCHEMA_VERSION}"
        )
