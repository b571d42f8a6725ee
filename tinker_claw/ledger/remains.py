"""What is left on the file's pages of rows that are gone.

Rule: SQLite overwrites what it deletes (secure_delete), but where it shares rows out anew among
pages, copies of rows that moved stay on a page between its list of cells and its first cell, where
nothing is read and what comes next is written. Such a gap is overwritten with zeros, in the file
itself, while this process has the ledger's write lock and its log is empty: nobody else writes
then, no reader looks there, and a power cut leaves zeros or what was there.

The format is https://www.sqlite.org/fileformat2.html.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from tinker_claw.errors import LedgerError
from tinker_claw.ledger.database import Writer
from tinker_claw.ledger.reading import SCHEMA_VERSION

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
