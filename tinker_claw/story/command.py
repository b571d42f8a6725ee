"""What the commands that read a ledger share: their flags, their lines, their ends.

Rule: a reader who leaves early, by Ctrl-C or by closing the pipe, is no error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

from tinker_claw import config
from tinker_claw.errors import LedgerError
from tinker_claw.ledger.reading import FILE

FLAGS_FROM_RUN = (
    "The data directory is that of --data-dir, or the one that run.py would use with the same "
    "flags, all of which can be given."
)


def parse(
    own: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, config.Settings]:
    """The command's own flags and, of the others, the settings.

    Raises:
        ConfigError: a setting is wrong.
        SystemExit: argparse's.
    """
    if {"-h", "--help"} & set(arguments):
        own.parse_args(["--help"])
    settings, rest = config.load_known(arguments)
    return own.parse_args(rest), settings


def ledger_file(settings: config.Settings) -> Path:
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
