"""To whom a command speaks: the gateway that runs on the data directory, or nobody, and then the
command has the ledger to itself.

Rule: the directory's lock decides, and nothing is done by both.
"""

from __future__ import annotations

import fcntl
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinker_claw.errors import LedgerError, UndoError
from tinker_claw.serve.control import FILE

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
        known = json.loads((directory / FILE).read_text())
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
