"""Types and names shared by inference servers of any dialect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tinker_claw.errors import OutageError

NEVER_LOADED: Final = "tinker-claw-never-loaded"
"""Name for a trial unload: a server that takes no adapters while it runs refuses it."""


class Busy(OutageError):
    """The server is well but at its limit (429): another may answer, or this one later."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Description of a server by itself."""

    model: str
    """Base model's name, for requests without an adapter."""
    context_tokens: int
    """Longest prompt and reply together, in tokens."""
    adapters: frozenset[str]
    """Names of the loaded adapters."""
