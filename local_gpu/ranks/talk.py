"""What the control process and rank 0 say to one another, over a pair of sockets.

    control ─ Start ─▶ rank 0        once
    control ◀ Ready ─ rank 0         once: the base is loaded on every rank
    control ─ Command ─▶ rank 0      then, any number of times,
    control ◀ Answer ─ rank 0        one answer to one command
    control ◀ Lost ─ rank 0          at any time: a rank is about to end

The pair is the standard input of torchrun and of every rank that it starts. Rank 0 alone reads and
writes; for the others, and for torchrun's end, it is a leash: when the control process is gone, it
hangs up.

Rule: what is raised on the far side is raised here, as the same class with the same sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from local_gpu.config import LocalConfig
from local_gpu.parts import Facts
from tinker_claw.errors import ClawError


@dataclass(frozen=True, slots=True)
class Start:
    config: LocalConfig
    timeout_s: float
    """Of what ranks say to one another."""


@dataclass(frozen=True, slots=True)
class Ready:
    facts: Facts


@dataclass(frozen=True, slots=True)
class Command:
    """A method of `Learning`, for every rank to call."""

    name: str
    """One of `COMMANDS`."""
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    error: Exception


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank cannot go on, and so none can."""

    rank: int
    sentence: str
    halve: int | None
    """Too many tokens to compute at once; None: that was not it."""
    outage: bool
    """The device failed: what was computed is not to blame."""


CLOSE: Final = "close"
"""The last command."""

COMMANDS: Final = frozenset(
    {
        *("step", "score", "write_adapter", "export_adapter", "write_state", "read_state"),
        CLOSE,
    }
)

EXPECTED: Final = (ClawError, OSError)
"""What a command may raise and the ranks go on; anything else ends them."""
