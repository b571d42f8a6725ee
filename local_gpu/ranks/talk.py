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

from dataclasses import dataclass, field
from typing import Any

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
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """An error on its way: classes with an `__init__` of their own do not pickle."""

    kind: type[Exception]
    arguments: tuple[Any, ...]
    fields: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, error: Exception) -> Failure:
        arguments = error.__reduce__()[1]  # of an OSError: the file, too
        assert isinstance(arguments, tuple)
        return cls(type(error), arguments, dict(vars(error)))

    def error(self) -> Exception:
        error = self.kind.__new__(self.kind, *self.arguments)
        vars(error).update(self.fields)
        return error


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank cannot go on, and so none can."""

    rank: int
    sentence: str
    halve: int | None
    """Too many tokens to compute at once; None: that was not it."""


CLOSE = "close"
"""The last command."""

EXPECTED = (ClawError, OSError)
"""What a command may raise and the ranks go on; anything else ends them."""
