"""To whom a command speaks: the gateway that runs on the data directory, or nobody, and then the
command has the ledger to itself.

Rule: the directory's lock decides, and nothing is done by both.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import socket
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_claw.app.control import CONTROL_FILE
from tinker_claw.config.load import load_known
from tinker_claw.config.settings import Settings
from tinker_claw.errors import LedgerError, UndoError
from tinker_claw.ledger.database import FILE, Rows
from tinker_claw.ledger.outcome import RunView, read_run, run_of
from tinker_claw.ledger.views import TurnView
from tinker_claw.methods import METHODS
from tinker_claw.methods.base import Evidence
from tinker_claw.types import NextState, Verdict

_CONNECT_S = 10.0


def is_running(directory: Path) -> bool:
    """Whether a process has the lock of this data directory."""
    try:
        with (directory / "lock").open("r+") as lock:
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


def tell(directory: Path, order: Mapping[str, Any]) -> Any:
    """Give an order to the gateway that runs, and wait until it is done.

    Leaving (Ctrl-C) takes an order back that has not been carried out yet.

    Raises:
        UndoError: it says why it cannot be done, or does not answer.
    """
    try:
        known = json.loads((directory / CONTROL_FILE).read_text())
        with socket.create_connection(("127.0.0.1", known["port"]), _CONNECT_S) as connection:
            connection.settimeout(None)  # a step in hand may take minutes
            connection.sendall(json.dumps({**order, "token": known["token"]}).encode() + b"\n")
            with connection.makefile("rb") as answers:
                line = answers.readline()
    except (OSError, ValueError, KeyError) as error:
        raise UndoError(
            f"a process has {directory} in use and takes no orders ({error}); it may be starting "
            "or stopping: try again, or stop it first"
        ) from error
    if not line:
        raise UndoError("the gateway ended before it was done; look with `python run.py versions`")
    answer = json.loads(line)
    if "error" in answer:
        raise UndoError(answer["error"])
    return answer["done"]


# What the commands that read a ledger share: their flags, their lines, their ends.
#
# Rule: a reader who leaves early, by Ctrl-C or by closing the pipe, is no error.


FLAGS_FROM_RUN = (
    "The data directory is that of --data-dir, or the one that run.py would use with the same "
    "flags, all of which can be given."
)


def parse(
    own: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, Settings]:
    """The command's own flags and, of the others, the settings.

    Raises:
        ConfigError: a setting is wrong.
        SystemExit: argparse's.
    """
    if {"-h", "--help"} & set(arguments):
        own.parse_args(["--help"])
    settings, rest = load_known(arguments)
    return own.parse_args(rest), settings


def ledger_file(settings: Settings) -> Path:
    """The ledger of the data directory in force.

    Raises:
        LedgerError: there is none.
    """
    file = settings.run.directory / FILE
    if not file.is_file():
        raise LedgerError(
            f"{settings.run.directory} holds no ledger; name the directory with --data-dir, or "
            "give the flags that run.py was started with (--config, --model-name, --method)"
        )
    return file


def read_run_view(rows: Rows, batch_size: int) -> RunView:
    """What the outcomes of a ledger's turns depend on, its method's teacher included.

    Args:
        batch_size: samples of a step, where none was taken yet.
    """
    method = METHODS.get(run_of(rows).get("method", ""))

    def told(turn: TurnView) -> str | None:
        if method is None or method.teaching is None or not turn.has_hint_place:
            return None
        known = Evidence(
            Verdict(turn.votes, turn.verdict),
            # Whether there is something to tell, not what it says.
            ("hint",) * turn.hints,
            NextState("user" if turn.next_role == "user" else "tool", "said"),
            "shown" if turn.demonstrated else None,
        )
        return method.teaching.what if method.tells(known) else None

    return read_run(rows, batch_size, told)


def write(lines: Iterable[str]) -> None:
    """Lines to standard output, as they come, and all of them at the end."""
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def until_left() -> Generator[None]:
    """The reader may leave at any time."""
    try:
        yield
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        # Else Python writes the rest once more at its end, and says that it could not.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Records as an aligned table, and single values as people write them. Pure.
#
# Rule: a cell holds one line, without what would steer a terminal: clients choose parts of it.


GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, and what it shows of a record."""

    name: str
    show: Callable[[Mapping[str, Any]], str]
    right: bool = False
    least: int = 0
    """Least width, so that lines that come later fit."""


def table(columns: Sequence[Column], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The heading, and one line a record."""
    rows = [[column.name for column in columns], *cells(columns, records)]
    widths = [max(column.least, *(len(row[i]) for row in rows)) for i, column in enumerate(columns)]
    return [_line(columns, row, widths) for row in rows]


def cells(columns: Sequence[Column], records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """What stands in the columns for each record."""
    return [[printable(column.show(record)) for column in columns] for record in records]


def _line(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int]) -> str:
    fitted = [
        cell.rjust(width) if column.right else cell.ljust(width)
        for column, cell, width in zip(columns, row, widths, strict=True)
    ]
    return GAP.join(fitted).rstrip()


def printable(text: str) -> str:
    """On one line, and without control characters."""
    return "".join(c if c.isprintable() else " " for c in text)


def short(text: str, length: int) -> str:
    """At most so many characters."""
    return text if len(text) <= length else text[: length - 1] + "…"


def vote(value: int | None) -> str:
    """+1, 0 or -1; `none` where no vote was valid."""
    return "none" if value is None else f"{value:+d}" if value else "0"


def number(value: float | None) -> str:
    """Three figures; `-` where it is not known."""
    return "-" if value is None else f"{value:.3g}"


def apart(metrics: Mapping[str, Any]) -> str:
    """Sampler and trainer, standard deviation in nats; marked where it is more than rounding."""
    return number(metrics.get("agreement_sd")) + "!" * (metrics.get("agrees") is False)
