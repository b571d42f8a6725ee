"""Program that reports a run's steps to one sink: `python -m tinker_claw.sinks.follow NAME DIR`.

It follows the ledger from the last step it has noted until its standard input ends, which the
gateway closes when it stops or dies.

Rule: it only reads the ledger, and ends on any failure. The gateway starts it again, and it
continues after its note. So a tracker's library that fails, hangs or ends its process never affects
the gateway.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tinker_claw.ledger.database import FILE, Outside, open_read_only
from tinker_claw.sinks.base import Sink, read_reports, read_run, sink

LOOK_S = 1.0
"""Seconds between two looks for new steps."""
ANSWER_S = 120
"""Seconds after which a sink has hung: the alarm ends the process, wherever it is."""


def main(name: str, directory: Path) -> None:
    """Report every step to the sink until standard input ends."""
    os.umask(0o077)
    with open_read_only(directory / FILE) as ledger:
        with ledger.moment():
            run = read_run(ledger)
        run.folder.mkdir(exist_ok=True)
        with _alarm():
            _alone(run.folder / f"{name}.lock")
            opened = sink(name, run)
        tell(opened, ledger, run.folder / f"{name}.step")
        with _alarm():
            opened.close()


def tell(opened: Sink, ledger: Outside, note: Path) -> None:
    """Report every step after the one in `note`, and new ones, until standard input ends."""
    last, ending = int(note.read_text()) if note.exists() else 0, False
    while True:
        with ledger.moment():
            reports = read_reports(ledger, last)
        for report in reports:
            with _alarm():
                opened.write(report)
            last, beside = report.step, note.with_suffix(".new")
            beside.write_text(str(last))
            beside.replace(note)
        if ending and not reports:
            return
        if not reports:
            ending = bool(select.select([sys.stdin], [], [], LOOK_S)[0])


def _alone(file: Path) -> None:
    """Wait until a process left by a killed gateway releases the lock."""
    fcntl.flock(os.open(file, os.O_WRONLY | os.O_CREAT), fcntl.LOCK_EX)


@contextmanager
def _alarm() -> Generator[None]:
    signal.alarm(ANSWER_S)
    try:
        yield
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
