"""Messages between the control process and its ranks, pickled, over one pipe for each rank.

    control ─ Command ─▶ rank           any number of times; the first is `BUILD`
    control ◀ RankAnswer or Failure ─ rank    one for each command
    control ◀ Part ─ rank               within a command: the control process collects one of each
    control ─ list of parts ─▶ rank     rank, and returns all of them to each
    control ◀ RankLost ─ rank           at any time: this rank is about to end

Rule: both ends are processes of this program, joined by a socket without an address, so nobody else
can write what is unpickled here. Nothing else in the product unpickles.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from local_gpu.halves import Learning

BUILD: Final = "build"
"""The command that loads the base; its value is the facts about it."""
COMMANDS: Final = frozenset(name for name in vars(Learning) if not name.startswith("_"))
"""All other names that a command may have: the methods of `Learning`."""


@dataclass(frozen=True, slots=True)
class RankCommand:
    """A method of `Learning`, for every rank to call."""

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class RankAnswer:
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that a command may raise: it is raised in the control process, and nobody ends."""

    error: Exception

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle an error whose class takes other arguments than its message."""
        return _failure, (type(self.error), self.error.__reduce__()[1], dict(vars(self.error)))


@dataclass(frozen=True, slots=True)
class RankPart:
    """Object that one rank gives to the others in the middle of a command."""

    value: Any


@dataclass(frozen=True, slots=True)
class RankLost:
    """Cause of a rank's end."""

    sentence: str
    outage: bool = False
    """Whether the device failed, so that the computation is not to blame."""
    follows: bool = False
    """Whether another rank's end may be the cause."""
    budget: int | None = None
    """Tokens of a pass that may fit, after one that all ranks were in ran out of memory; 1: every
    sequence needs a pass of its own."""


def send(link: Connection, message: object) -> None:
    # By bytes: `Connection.send` would move tensors into shared memory, one file each.
    link.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(link: Connection) -> Any:
    """Wait for the next message. Raises EOFError or OSError where the other end is gone."""
    return pickle.loads(link.recv_bytes())


def _failure(kind: type[Exception], arguments: tuple[Any, ...], more: dict[str, Any]) -> Failure:
    error = kind.__new__(kind, *arguments)
    vars(error).update(more)
    return Failure(error)
